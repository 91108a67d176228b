"""Where the device tests run: on the CPU, on CUDA where there is one, and (started by
``test_interpreted.py`` with TRITON_INTERPRET=1) with the Triton kernels run on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

from blocktable.device import upload

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _places() -> list[str]:
    if INTERPRETED:
        return ["interpreted"]
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=_places())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Each device that the tables can live on here."""
    if request.param == "interpreted":
        monkeypatch.setattr(upload, "default_backend", lambda device: "triton")
        return torch.device("cpu")
    return torch.device(request.param)


@pytest.fixture
def steps() -> int:
    """Random operations of one property test; the interpreter is some thousand times slower."""
    return 60 if INTERPRETED else 400
