"""From half made to there, in one rename; and nothing half made left behind.

A build works in a hidden sibling of its output that it holds locked. What a build that was killed left there has no
holder, and the next build of the same output removes it. The output appears, or changes places with the image that
was there, in one `renameat2`.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from microvm_mcp.imaging.cache import remove, sync_tree
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.manifest import MANIFEST
from microvm_mcp.imaging.progress import Progress

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_LOCK_POLL_S = 0.5
_LOCK_DEADLINE_S = 3600.0
"""Another build may take its time; it is waited for, not for ever."""


@asynccontextmanager
async def exclusive(lock: Path, progress: Progress) -> AsyncIterator[None]:
    """One build at a time per cache directory, across processes."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        waited = 0.0
        while not _try_lock(descriptor):
            if waited == 0:
                progress.detail("waiting for another build to end")
            if waited >= _LOCK_DEADLINE_S:
                raise ImageError("Another build holds the cache directory; end it or choose another --cache.")
            await asyncio.sleep(_LOCK_POLL_S)
            waited += _LOCK_POLL_S
        yield
    finally:
        os.close(descriptor)


def check_output(output: Path) -> None:
    """Only an image, or nothing, may be replaced by an image."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ImageError("The output is no directory; name a directory that may be made or replaced.")
    if output.is_dir() and not (output / MANIFEST).is_file() and any(output.iterdir()):
        raise ImageError("The output directory has something other than an image in it; name another one.")


@contextmanager
def work_directory(output: Path) -> Iterator[Path]:
    """A new locked sibling of `output`, gone at the end whatever happens; dead ones are removed first."""
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.partial-"
    for stale in output.parent.glob(f"{prefix}*"):
        with _locked(stale) as free:
            if free:
                remove(stale)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
    try:
        with _locked(work):
            yield work
    finally:
        remove(work)


def publish(made: Path, output: Path) -> None:
    """`made` lies in the work directory; afterwards it is the output, and what was there lies in its place."""
    made.chmod(0o755)
    sync_tree(made)
    if output.is_dir() and any(output.iterdir()):
        _exchange(made, output)
    else:
        made.rename(output)
    descriptor = os.open(output.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if done == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(other))
    # A file system without exchange: for a moment there is no output, never a half made one.
    aside = one.with_name(f"{one.name}.old")
    other.rename(aside)
    one.rename(other)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor >= 0 and _try_lock(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
