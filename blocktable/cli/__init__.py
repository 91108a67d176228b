"""The command line: ``blocktable generate|chat|serve|inspect|replay|simulate|soak|plan|version``.

Commands import what they need when they run, so that ``blocktable version`` loads no torch. Bad
input ends with one line on standard error and exit code 2; a run that fails, with exit code 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from blocktable.cli.app import app
from blocktable.core.errors import (
    BlocktableError,
    ConfigError,
    LoadError,
    RequestError,
)

_BAD_INPUT = (ConfigError, LoadError, RequestError, ValueError)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; prints errors as one line each."""
    try:
        result = app(args=arguments, prog_name="blocktable", standalone_mode=False)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (``| head``): leave without a traceback at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BlocktableError as error:
        return _fail(error, 2 if isinstance(error, _BAD_INPUT) else 1)
    except Exception as error:
        message = getattr(error, "format_message", None)  # what Typer raises for a wrong usage
        if message is None:
            raise
        return _fail(message(), 2)
    return result if isinstance(result, int) else 0


def _fail(error: object, code: int) -> int:
    line = " ".join(str(error).split())
    if line:  # where no command was given, Typer has shown the help and has nothing to add
        print(f"blocktable: {line}", file=sys.stderr)
    return code


def main() -> None:
    """Entry point of the ``blocktable`` script."""
    sys.exit(run())
