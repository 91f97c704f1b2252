"""Files that hold machines: private reflink copies, sparse files, and publication that a crash cannot tear.

A copy is always a reflink: it costs nothing until written to. A file system that cannot make one is refused with
the command that mends it, never copied byte by byte. What is published is whole and durable: fsync of the file,
one rename, fsync of the directory. No symlink is followed at the last component of any path.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

FICLONE = 0x40049409
_NO_REFLINK = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS})
_WRITE_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FLAGS_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotReflinkable(Exception):
    """The message says which file system is meant; `mend` is a command that makes one that can."""

    def __init__(self, directory: Path, reason: str) -> None:
        self.mend = mend_command(directory)
        super().__init__(
            f"{directory}: no reflink copies here ({reason}); make a file system that can: {self.mend}"
        )


def mend_command(directory: Path) -> str:
    image = f"{str(directory).rstrip('/')}.xfs"
    return (
        f"truncate -s 100G {image} && mkfs.xfs -m reflink=1 {image} && "
        f"mkdir -p {directory} && mount -o loop {image} {directory}"
    )


async def clone(source: Path, target: Path, *, mode: int = 0o600) -> None:
    """`target` must not exist; on failure it does not exist either. Durable once `sync` has been called on it."""
    await asyncio.to_thread(clone_now, source, target, mode=mode)


def clone_now(source: Path, target: Path, *, mode: int = 0o600) -> None:
    src = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        dst = os.open(target, _WRITE_NEW, mode)
        try:
            os.fchmod(dst, mode)
            fcntl.ioctl(dst, FICLONE, src)
        except OSError as error:
            target.unlink()
            if error.errno not in _NO_REFLINK:
                raise
            reason = "source on another file system" if error.errno == errno.EXDEV else str(error.strerror)
            raise NotReflinkable(target.parent, reason) from error
        finally:
            os.close(dst)
    finally:
        os.close(src)


async def create_sparse(path: Path, size_bytes: int, *, mode: int = 0o600) -> None:
    """A new file of that size that occupies nothing."""
    await asyncio.to_thread(_create_sparse, path, size_bytes, mode)


def _create_sparse(path: Path, size_bytes: int, mode: int) -> None:
    fd = os.open(path, _WRITE_NEW, mode)
    try:
        os.fchmod(fd, mode)
        os.ftruncate(fd, size_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


async def extend(path: Path, size_bytes: int) -> None:
    """Makes a file larger, never smaller. The file system inside is grown by whoever knows it."""
    await asyncio.to_thread(_extend, path, size_bytes)


def _extend(path: Path, size_bytes: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size > size_bytes:
            raise ValueError("a disk never gets smaller")
        os.ftruncate(fd, size_bytes)
    finally:
        os.close(fd)


async def sync(path: Path) -> None:
    """fsync of a file, or of a directory (which makes the names in it durable)."""
    await asyncio.to_thread(_sync, path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


async def publish(staging: Path, final: Path) -> None:
    """Puts a finished file or a flat directory in place by one rename; a file already there is replaced."""
    await asyncio.to_thread(_publish, staging, final)


def _publish(staging: Path, final: Path) -> None:
    if staging.is_dir() and not staging.is_symlink():
        for entry in staging.iterdir():
            _sync(entry)
    _sync(staging)
    staging.rename(final)
    _sync(final.parent)


async def write_durable(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """The file holds either what it held, or all of `data`, whenever the power goes."""
    await asyncio.to_thread(write_durable_now, path, data, mode=mode)


def write_durable_now(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """`write_durable` for code that runs before there is a loop to hold up."""
    staging = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    fd = os.open(staging, _WRITE_NEW, mode)
    try:
        try:
            os.fchmod(fd, mode)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        _publish(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


async def remove_tree(path: Path) -> None:
    """A directory of ours and all below it, symlinks themselves, not their targets. Idempotent."""
    await asyncio.to_thread(_remove_tree, path)


def _remove_tree(path: Path) -> None:
    with suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)


def free_bytes(path: Path) -> int:
    """What an unprivileged writer may still write on the file system of `path`."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def size_bytes(path: Path) -> int:
    return path.lstat().st_size


def allocated_bytes(path: Path) -> int:
    """What a file really occupies. Blocks shared with other copies count in each of them."""
    return path.lstat().st_blocks * 512


async def probe_reflink(directory: Path, source: Path | None = None) -> None:
    """Really makes a copy in `directory`, of `source` or of a small file there; NotReflinkable says why not."""
    await asyncio.to_thread(probe_reflink_now, directory, source)


def probe_reflink_now(directory: Path, source: Path | None = None) -> None:
    token = secrets.token_hex(6)
    original, copy = (directory / f".reflink-probe-{token}-{name}" for name in "ab")
    try:
        if source is None:
            fd = os.open(original, _WRITE_NEW, 0o600)
            try:
                os.write(fd, b"x" * 65536)
            finally:
                os.close(fd)
        clone_now(source or original, copy)
    finally:
        original.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
