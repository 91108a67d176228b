"""The tests of the tables again, with the Triton kernels run by Triton's interpreter.

The interpreter is chosen when triton is imported, so this is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import needs_interpreter

HERE = Path(__file__).resolve().parent


@needs_interpreter
@pytest.mark.parametrize(
    "file", ["test_row_operations.py", "test_slot_mapping.py", "test_metadata.py", "test_graphs.py"]
)
def test_under_the_interpreter(file: str) -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-o",
            "addopts=",
            "-v",
            "-x",
            "--tb=short",
            "-p",
            "no:xdist",
            file,
        ],
        cwd=HERE,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert "passed" in run.stdout and "skipped" not in run.stdout
