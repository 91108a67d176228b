"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent


def shared_path() -> Path | None:
    """The folder with the oracle scripts and the production trace, where there is one.

    BLOCKTABLE_SHARED names it; without it, a folder ``shared`` beside the checkout is used.
    """
    path = Path(os.environ.get("BLOCKTABLE_SHARED", _ROOT.parent / "shared"))
    return path if (path / "oracle").is_dir() else None


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    path = shared_path()
    if path is None:
        pytest.skip("no shared folder beside the checkout")
    return path
