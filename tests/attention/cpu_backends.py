"""The CPU back ends this machine can run, and a way to force one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from blocktable.attention.cpu import backend

ENVIRONMENT = ("BLOCKTABLE_CPU_KERNEL", "BLOCKTABLE_CPU_LEVEL", "BLOCKTABLE_CPU_THREADS")


def cpu_backends() -> list[str]:
    """``reference``, ``numba`` and one ``native-LEVEL`` for each level this CPU runs."""
    names = ["reference", "numba"]
    if backend.native_available():
        from blocktable.attention.cpu import _kernels  # pyright: ignore

        names += [f"native-{level}" for level in _kernels.levels()]
    return names


def _forget() -> None:
    backend.backend_name.cache_clear()
    if backend.native_available():
        from blocktable.attention.cpu import native

        native.level.cache_clear()
        native.own_threads.cache_clear()


@contextmanager
def forced(name: str, threads: str | None = None) -> Iterator[None]:
    """Run the block with the named back end; the environment is put back afterwards."""
    kernel, _, level = name.partition("-")
    before = {key: os.environ.get(key) for key in ENVIRONMENT}
    for key, value in zip(ENVIRONMENT, (kernel, level or None, threads), strict=True):
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    _forget()
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
        _forget()
