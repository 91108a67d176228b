"""Gives memory that the heap holds free back to the system: a server is as large as what it uses.

A step's temporaries are freed at its end, and what was made between them and stays (a kernel for a
number of tokens not seen before, the tokens of an ended request) splits the room that they leave.
The next step's larger ones do not fit there, and the heap grows though nothing more is in use: by
270 MiB in 10 minutes of mixed requests, all of it free. A trim finds every free page, those in
the middle of the heap too; it takes 10 to 20 ms, in which whoever allocates may wait.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable


def find_trim() -> Callable[[], object] | None:
    """What gives free memory back, or None where the C library has nothing of the kind (only
    glibc's keeps so much that it needs it)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return lambda: trim(0)


_M_ARENA_MAX = -8  # glibc's name for it in mallopt


def use_one_arena() -> None:
    """Let all threads allocate from the main heap, unless the environment says otherwise: a trim
    does not reach the free end of any other, and each may keep 64 MiB there. Call it before there
    are threads; does nothing where the C library is not glibc."""
    if "MALLOC_ARENA_MAX" in os.environ or find_trim() is None:
        return
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


class HeapTrimmer:
    """Trims after every ``seconds`` in which the engine stepped; a server that is idle is trimmed.

    Args:
        seconds: from one trim to the next; 0 never trims.
        trim: gives the memory back; None where that cannot be done, and nothing is done then.
    """

    def __init__(self, seconds: float, trim: Callable[[], object] | None) -> None:
        self._seconds, self._trim = seconds, trim
        self._stepped = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blocktable-trim", daemon=True)

    def after_step(self, *_: object) -> None:
        """Note that there may be something to give back; called in the engine's thread."""
        self._stepped = True

    def start(self) -> None:
        """Begin to trim."""
        if self._seconds > 0 and self._trim is not None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            if self._stepped and self._trim is not None:
                self._stepped = False
                self._trim()
