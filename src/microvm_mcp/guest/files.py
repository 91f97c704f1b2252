"""Files under the workspace, as the guest's user would touch them; nothing follows a symbolic link.

A path is walked one component at a time by directory descriptors that were opened without following links: the same
guarantee as openat2 with RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS, on every kernel. While it works, this process has
the effective identity of the user (its real and saved ones stay root's, so the user cannot signal or trace it):
permissions and quotas apply, root is not tricked into another's file, and new files belong to the user.

Everything opened is opened non-blocking and must be a regular file, so that no FIFO, device or lease holds up the
supervisor. What can take time is an fsync of at most 128 KiB.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from microvm_mcp.guest.options import GID, UID
from microvm_mcp.guest.refusal import Refusal, refusal_of
from microvm_mcp.wire.messages import JOB_ID, ErrorCode, FileContent, Written

_DIRECTORY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Files:
    def __init__(self, workspace: str, jobs_dir: str) -> None:
        self._workspace = workspace.rstrip("/")
        self._jobs_dir = jobs_dir.rstrip("/")

    def read(self, path: str, offset: int, length: int) -> FileContent:
        with _as_user():
            base, components = self._locate(path, reading=True)
            with _walk(base, components[:-1]) as parent:
                fd = _open_regular(parent, components, os.O_RDONLY)
                try:
                    status = os.fstat(fd)
                    data = os.pread(fd, length, offset) if offset < status.st_size else b""
                finally:
                    os.close(fd)
        # The file may change under the read: the size goes with the bytes that were seen.
        size = status.st_size
        if len(data) != min(length, max(0, size - offset)):
            size = offset + len(data)
        return FileContent(data, offset, size, stat.S_IMODE(status.st_mode))

    def write(self, path: str, data: bytes, offset: int | None, mode: int | None) -> Written:
        with _as_user():
            base, components = self._locate(path, reading=False)
            with _walk(base, components[:-1], make=True) as parent:
                if offset is None or (offset == 0 and not _exists(parent, _name(components))):
                    return _replace(parent, components, data, mode)
                return _extend(parent, components, data, offset, mode)

    def open_directory(self, path: str) -> int:
        """An O_PATH descriptor, for a command to start in."""
        with _as_user():
            base, components = self._locate(path, reading=False)
            with _walk(base, components) as directory:
                return os.dup(directory)

    def _locate(self, path: str, *, reading: bool) -> tuple[str, list[str]]:
        """The directory to start from, and the components below it. Lexical: nothing is looked up."""
        if "\0" in path:
            raise Refusal(ErrorCode.INVALID, "the path has a NUL byte")
        components = [component for component in path.split("/") if component not in ("", ".")]
        if ".." in components:
            raise Refusal(ErrorCode.INVALID, "the path has a `..` component; name the real path")
        if not path.startswith("/"):
            return self._workspace, components
        for base in (self._workspace, self._jobs_dir):
            prefix = base.split("/")[1:]
            if components[: len(prefix)] != prefix:
                continue
            below = components[len(prefix) :]
            if base == self._workspace:
                return base, below
            if reading and len(below) == 2 and JOB_ID.fullmatch(below[0]) and below[1] == "output.log":
                return base, below
        raise Refusal(ErrorCode.INVALID, "an absolute path must lie under /workspace, or be a log_path to read")


@contextlib.contextmanager
def _as_user() -> Iterator[None]:
    """OSError becomes Refusal. The group goes first and comes back last: only root may change it."""
    os.setegid(GID)
    try:
        os.seteuid(UID)
        try:
            yield
        except OSError as error:
            raise refusal_of(error) from error
        finally:
            os.seteuid(0)
    finally:
        os.setegid(0)


@contextlib.contextmanager
def _walk(base: str, components: list[str], *, make: bool = False) -> Iterator[int]:
    current = os.open(base, _DIRECTORY | os.O_DIRECTORY)
    try:
        for component in components:
            try:
                below = os.open(component, _DIRECTORY, dir_fd=current)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(component, 0o755, dir_fd=current)
                below = os.open(component, _DIRECTORY, dir_fd=current)
            os.close(current)
            current = below
            kind = os.fstat(current).st_mode
            if stat.S_ISLNK(kind):
                raise OSError(errno.ELOOP, "symbolic link")
            if not stat.S_ISDIR(kind):
                raise OSError(errno.ENOTDIR, "not a directory")
        yield current
    finally:
        os.close(current)


def _name(components: list[str]) -> str:
    if not components:
        raise OSError(errno.EISDIR, "the base itself")
    return components[-1]


def _exists(parent: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _check_regular(mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "symbolic link")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO, "not a regular file")


def _open_regular(parent: int, components: list[str], flags: int) -> int:
    """Looked at before it is opened: opening a device may already do something."""
    name = _name(components)
    _check_regular(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    fd = os.open(name, flags | _FILE, dir_fd=parent)
    try:
        _check_regular(os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def _replace(parent: int, components: list[str], data: bytes, mode: int | None) -> Written:
    name = _name(components)
    try:
        present = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        _check_regular(present)
        kept = stat.S_IMODE(present) & 0o777
    except FileNotFoundError:
        kept = 0o644
    wanted = kept if mode is None else mode
    temporary = f".microvm-{os.urandom(8).hex()}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=parent)
    try:
        try:
            _write_all(fd, data, 0)
            os.fchmod(fd, wanted)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise
    _sync_directory(parent)
    return Written(len(data), wanted)


def _extend(parent: int, components: list[str], data: bytes, offset: int, mode: int | None) -> Written:
    fd = _open_regular(parent, components, os.O_WRONLY)
    try:
        status = os.fstat(fd)
        if status.st_size != offset:
            raise Refusal(
                ErrorCode.CONFLICT,
                f"the file has {status.st_size} bytes, not {offset}; read its size and go on there",
            )
        try:
            _write_all(fd, data, offset)
            os.fsync(fd)
        except OSError:
            # So that the same call finds the same file again.
            os.ftruncate(fd, offset)
            raise
        if mode is not None:
            os.fchmod(fd, mode)
        return Written(offset + len(data), stat.S_IMODE(os.fstat(fd).st_mode))
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _sync_directory(parent: int) -> None:
    """The file is in place already: a directory that its owner may not read only costs the promise of order."""
    with contextlib.suppress(OSError):
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
