"""The command line within the test's process: what it prints and how it ends."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from microvm_mcp.cli import main as command_line


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*argv: object) -> Done:
    """The whole command line within this process: starting an interpreter costs more than all that it does here."""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["microvm-mcp", *map(str, argv)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            command_line.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = before
    return Done(status, out.getvalue(), err.getvalue())
