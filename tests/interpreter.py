"""Whether Triton's interpreter can run here: release 3.6 and older make a Python number of a NumPy
array with one element, which NumPy refuses from 2.4 on (not even a loop runs then)."""

from importlib.metadata import PackageNotFoundError, version

import pytest


def _release(name: str) -> tuple[int, int]:
    try:
        major, minor = version(name).split(".")[:2]
    except PackageNotFoundError:
        return (0, 0)
    return int(major), int(minor)


WORKS = _release("triton") >= (3, 7) or _release("numpy") < (2, 4)

needs_interpreter = pytest.mark.skipif(
    not WORKS, reason="the interpreter of this Triton needs NumPy below 2.4"
)
