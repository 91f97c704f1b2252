"""Copying one file between this machine and a VM, in pieces that are safe to repeat.

Upwards, the first piece replaces the file and each further one extends a file of exactly the size so far; a piece
whose answer was lost is recognised by its bytes. Downwards, the pieces gather in a file beside the target, which is
replaced only when all of them are there.
"""

from __future__ import annotations

import base64
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from microvm_mcp.cli.remote import Result
from microvm_mcp.errors import Conflict, Detail, FailedPrecondition, InvalidArguments, Unavailable

PIECE: Final = 128 * 1024

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""


class Caller(Protocol):
    def call(self, tool: str, arguments: dict[str, Detail], /) -> Result: ...


def upload(remote: Caller, source: Path, vm_id: str, path: str, progress: Progress) -> None:
    try:
        opened = source.open("rb")
    except OSError as error:
        raise InvalidArguments(f"Cannot read {source}: {error.strerror}.") from error
    with opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArguments(f"{source} is not a regular file; copy single files, or pack a directory first.")
        done = 0
        mode = format(stat.S_IMODE(found.st_mode) & 0o777, "04o")
        while True:
            piece = opened.read(PIECE)
            if not piece and done:
                return
            target: dict[str, Detail] = {"vm_id": vm_id, "path": path}
            arguments = {**target, "content_base64": base64.b64encode(piece).decode("ascii")}
            try:
                remote.call("vm_write_file", {**arguments, **({"offset": done} if done else {"mode": mode})})
            except Conflict:
                if not done or _read(remote, target, done)[0] != piece:
                    raise
            done += len(piece)
            progress(done, max(done, found.st_size))
            if len(piece) < PIECE:
                return


def download(remote: Caller, vm_id: str, path: str, target: Path, progress: Progress) -> None:
    if target.is_dir():
        target /= path.rstrip("/").rsplit("/", 1)[-1]
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise InvalidArguments(f"Cannot write in {target.parent}: {error.strerror}.") from error
    beside = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            done, eof, mode = 0, False, 0o644
            while not eof:
                piece, size, eof, mode = _read(remote, {"vm_id": vm_id, "path": path}, done)
                if not piece and not eof:
                    raise FailedPrecondition("The file shrank while it was read; copy it again.")
                out.write(piece)
                done += len(piece)
                progress(done, size)
            os.fchmod(out.fileno(), mode & 0o777)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _read(remote: Caller, target: dict[str, Detail], offset: int) -> tuple[bytes, int, bool, int]:
    page = remote.call("vm_read_file", {**target, "offset": offset, "length": PIECE})
    content, size, eof, mode = (page.get(name) for name in ("content_base64", "size", "eof", "mode"))
    try:
        if not isinstance(content, str) or not isinstance(size, int) or not isinstance(mode, str):
            raise ValueError
        return base64.b64decode(content, validate=True), size, eof is True, int(mode, 8)
    except ValueError:
        raise Unavailable("The service's answer to vm_read_file makes no sense; are both of one version?") from None
