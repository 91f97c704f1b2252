"""`microvm-mcp serve`: read the configuration, then hand over to the application until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="TOML file; examples/service.toml shows every key.")
    ],
) -> None:
    """Run the service in the foreground. Machines go on when it stops and are found again by the next start."""
    from microvm_mcp.config import load_settings

    settings = load_settings(config)
    from microvm_mcp.app import serve as run

    run(settings)
