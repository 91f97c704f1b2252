"""The user subtree of this guest's cgroup v2 hierarchy: one group per job below one group for all that users run.

Kill, freeze and "is anything left" are the kernel's answers (`cgroup.kill`, `cgroup.freeze`, `cgroup.events`),
never a list of pids that was read a moment ago. Limits are written where their controller exists. The groups are
root's: no process of a user can leave its own.
"""

# Not pathlib: an emulated guest would pay more for importing it than for all of this package.
# ruff: noqa: PTH102, PTH106
from __future__ import annotations

import contextlib
import errno
import os
import select
import time

MAX_PROCESSES = 1024
"""pids.max of each job: a fork bomb costs only its job."""
_CLEAR_S = 10.0


class Group:
    def __init__(self, path: str) -> None:
        """Makes the group if it is missing."""
        self.path = path
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
        self.events_fd = os.open(f"{path}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        """Polls as EPOLLPRI when `populated` or `frozen` changed since the last look."""

    def open(self) -> int:
        """A descriptor for processes to be born in the group."""
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def populated(self) -> bool:
        return self._event(b"populated")

    @property
    def frozen(self) -> bool:
        return self._event(b"frozen")

    @property
    def process_count(self) -> int:
        if not self.populated:
            return 0
        with open(f"{self.path}/cgroup.procs", "rb") as file:
            return sum(1 for _ in file)

    def look(self) -> None:
        """`events_fd` polls as changed until it was read."""
        os.pread(self.events_fd, 256, 0)

    def kill(self) -> None:
        """Everything in it and below, frozen or not, without a gap for forks to slip through."""
        _write(f"{self.path}/cgroup.kill", "1")

    def freeze(self, *, on: bool) -> None:
        _write(f"{self.path}/cgroup.freeze", "1" if on else "0")

    def limit_processes(self, count: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            _write(f"{self.path}/pids.max", str(count))

    def remove(self) -> bool:
        """False: the kernel still holds something of it; try again later."""
        try:
            os.rmdir(self.path)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            if error.errno != errno.ENOENT:
                raise
        self.close()
        return True

    def close(self) -> None:
        if self.events_fd >= 0:
            os.close(self.events_fd)
            self.events_fd = -1

    def _event(self, name: bytes) -> bool:
        return name + b" 1\n" in os.pread(self.events_fd, 256, 0)


def open_user_subtree(root: str) -> Group:
    """The group `user` below `root`, empty and thawed: what an earlier supervisor left in it is ended."""
    _enable_controllers(root)
    user = Group(f"{root}/user")
    _enable_controllers(user.path)
    user.kill()
    user.freeze(on=False)
    deadline = time.monotonic() + _CLEAR_S
    with select.epoll() as epoll:
        epoll.register(user.events_fd, select.EPOLLPRI)
        while user.populated and (left := deadline - time.monotonic()) > 0:
            epoll.poll(left)
    with os.scandir(user.path) as entries:
        left_over = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for path in left_over:
        with contextlib.suppress(OSError):
            os.rmdir(path)
    return user


def delegated_root() -> str:
    """The cgroup that this process was started in, itself moved out of the way into `supervisor` below it.

    A group that hands controllers to its children may hold no processes; the root group is exempt.
    """
    own = _own_path()
    root = _mount_point() + own.rstrip("/")
    if own == "/":
        return root
    if own.endswith("/supervisor"):
        return root.removesuffix("/supervisor")
    Group(f"{root}/supervisor").close()
    _write(f"{root}/supervisor/cgroup.procs", "0")
    return root


def _own_path() -> str:
    with open("/proc/self/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                return line[3:].rstrip("\n")
    raise SystemExit("no cgroup v2 in this guest")


def _mount_point() -> str:
    with open("/proc/self/mounts") as file:
        for line in file:
            _, where, kind, *_ = line.split(" ")
            if kind == "cgroup2":
                return where
    raise SystemExit("no cgroup v2 hierarchy is mounted in this guest")


def _enable_controllers(path: str) -> None:
    """Where they exist; a hybrid hierarchy has none. `cpu` makes jobs share by the job, not by the process."""
    for name in ("pids", "cpu"):
        with contextlib.suppress(OSError):
            _write(f"{path}/cgroup.subtree_control", f"+{name}")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
