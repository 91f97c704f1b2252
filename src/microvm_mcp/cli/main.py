"""The command line: which commands there are, and how their errors look.

An error is one line on stderr and the exit status of its class; wrong usage exits with 2. A traceback is shown only
to someone who asks for it by MICROVM_DEBUG=1. Only the module of the command that was named is imported, so that a
client verb in a loop does not pay for the image builder; command modules import what is slow in their functions.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

import typer

from microvm_mcp import __version__
from microvm_mcp.errors import MicrovmError

COMMANDS: dict[str, str] = {
    "serve": "serve:serve",
    "build-image": "image:build_image_command",
    "doctor": "doctor:doctor",
    "issue-token": "admin:issue_token",
    "set-workspace": "admin:set_workspace",
    "revoke-token": "admin:revoke_token",
    "revoke-workspace": "admin:revoke_workspace",
    "vm": "client:app",
    "demo-manifest": "demo:demo_manifest",
}
"""Name of the command: module of this package, and in it a function or a `typer.Typer` with further commands."""


def build(only: str | None = None) -> typer.Typer:
    """All commands, or `only` that one."""
    app = typer.Typer(
        name="microvm-mcp",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, where in COMMANDS.items():
        if only in (None, name):
            module, _, attribute = where.partition(":")
            command = getattr(importlib.import_module(f"microvm_mcp.cli.{module}"), attribute)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
    return app


def main() -> None:
    """What the console script calls."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        build(first if first in COMMANDS else None)(prog_name="microvm-mcp")
    except MicrovmError as error:
        _fail(error.message, error.exit_status, error)
    except Exception as error:  # noqa: BLE001 - the top of the process
        _fail(f"internal error ({type(error).__name__}); MICROVM_DEBUG=1 shows where", 1, error)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"microvm-mcp {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Private Linux machines in microVMs, over MCP and HTTP."""


def _fail(message: str, status: int, error: Exception) -> None:
    if os.environ.get("MICROVM_DEBUG") == "1":
        raise error
    print(f"microvm-mcp: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
