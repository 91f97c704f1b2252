"""`build-image`: the recipe on this host's command line, with progress for people and plain lines for logs."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from microvm_mcp.imaging.build import DEFAULT_CACHE, Built, Request, build_image
from microvm_mcp.imaging.errors import ImageError

_INTERRUPTED = 130


def build_image_command(
    output: Annotated[Path, typer.Option(help="Directory of the image; made, or replaced if it holds an image.")],
    variant: Annotated[
        str, typer.Option(help="`standard`, `tiny`, or another name for a standard image with --packages.")
    ] = "standard",
    packages: Annotated[
        Path | None,
        typer.Option(help="Further Debian packages: a file with one name per line, # begins a comment."),
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(help="Debian mirror; its security archive is the same address with -security.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where downloads are kept for the next build.")] = DEFAULT_CACHE,
    *,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Build again from today's packages, although the inputs are the same.")
    ] = False,
) -> None:
    """Build the kernel, the initramfs and the root disk that machines start from."""
    request = Request(output, variant, packages, mirror, cache, refresh)
    try:
        with _Lines() as lines:
            built = asyncio.run(_until_signalled(request, lines))
    except ImageError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        typer.echo("Interrupted; nothing was published.", err=True)
        raise typer.Exit(_INTERRUPTED) from error
    manifest = built.manifest
    verb = "is up to date" if built.up_to_date else "built"
    typer.echo(f"Image {manifest.variant} {verb} in {output}: kernel {manifest.kernel_version}")
    for name, record in sorted(manifest.files.items()):
        typer.echo(f"  {record.sha256}  {name}")


async def _until_signalled(request: Request, lines: _Lines) -> Built:
    """SIGTERM ends a build as Ctrl-C does: by cancelling it, so that everything it made is removed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await build_image(request, lines)


class _Lines:
    """A spinner with the present step on a terminal; one line per step, with its duration, everywhere."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._status: Status | None = None
        self._title = ""
        self._started = 0.0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(finished=kind is None)

    def stage(self, title: str) -> None:
        self._end(finished=True)
        self._title, self._started = title, time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status(title)
            self._status.start()
        else:
            self._print(f"{title} …")

    def detail(self, line: str) -> None:
        if self._status is not None:
            # Square brackets in what a program prints are not ours to interpret.
            self._status.update(f"{self._title}: {line[:100]}".replace("[", r"\["))
        else:
            self._print(f"  {line}")

    def _end(self, *, finished: bool) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._title:
            word = "done" if finished else "stopped"
            self._print(f"{self._title}: {word} after {time.monotonic() - self._started:.1f} s")
        self._title = ""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
