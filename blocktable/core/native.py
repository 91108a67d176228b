"""The optional compiled helper: found, switched off, or missing."""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType


@functools.cache
def load() -> ModuleType | None:
    """The module ``_native``, or None: it was not built, or BLOCKTABLE_NATIVE=0 switches it off.
    Everything works without it; when it is missing, one log line says so."""
    if os.environ.get("BLOCKTABLE_NATIVE", "1") == "0":
        return None
    try:
        from blocktable.core import _native  # type: ignore[attr-defined]
    except ImportError:
        logging.getLogger("blocktable").warning(
            "the compiled helper was not built; bookkeeping and hashing run in NumPy"
        )
        return None
    return _native
