"""Measured choices, kept on disk so that later starts cost nothing.

One JSON object: what was measured on (GPU, versions, layer) -> what came out. A file that is
missing, broken or not writable is as good as an empty one.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("blocktable")


def default_path() -> Path:
    """attention.json in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    home = os.environ.get("XDG_CACHE_HOME") or ""
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "blocktable" / "attention.json"


class DecisionFile:
    """The file, read at each look-up: engines of other processes write to it too."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path

    def get(self, key: str) -> dict[str, Any] | None:
        """What was stored under ``key``, None if nothing (readable) was."""
        found = self._read().get(key)
        return found if isinstance(found, dict) else None

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store a value: the file is replaced whole, so that readers see the old or the new one.
        Where it cannot be written, one line in the log says so."""
        entries = self._read()
        entries[key] = value
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            try:
                with os.fdopen(number, "w", encoding="utf-8") as file:
                    json.dump(entries, file, indent=1, sort_keys=True)
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            _LOG.info("the choice of attention kernels is not kept: %s", error)

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
