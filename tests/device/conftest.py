"""Where the device tests run: on the CPU, on CUDA where there is one, and (started by
``test_interpreted.py`` with TRITON_INTERPRET=1) with the Triton kernels run on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

from blocktable.device import upload

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _places() -> list[str]:
    """Each place with the compiled helper, where it is built, and with NumPy alone."""
    place = "interpreted" if INTERPRETED else "cpu"
    places = [place, *(["cuda"] if torch.cuda.is_available() and not INTERPRETED else [])]
    return [*places, *(f"{place} without helper" for place in places)]


@pytest.fixture(params=_places())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Each device that the tables can live on here."""
    place = request.param.split()[0]
    if "without helper" in request.param:
        monkeypatch.setattr(upload, "take_entries", None)
    if place == "interpreted":
        monkeypatch.setattr(upload, "default_backend", lambda device: "triton")
        return torch.device("cpu")
    return torch.device(place)


@pytest.fixture
def steps() -> int:
    """Random operations of one property test; the interpreter is some thousand times slower."""
    return 60 if INTERPRETED else 400
