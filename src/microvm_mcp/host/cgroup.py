"""One cgroup v2 leaf per machine, `<mount>/microvm-<tag>/<slot>`: limits, and a kill that misses nobody.

The v2 hierarchy may be the only one (`/sys/fs/cgroup`) or stand beside v1 (`/sys/fs/cgroup/unified`), with or
without controllers: limits are written where their controller exists, and what is missing is reported, never
assumed. `ensure` and `remove` are idempotent. Nothing outside the named parent is ever touched, except that
controllers are switched on from the root down to it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

CONTROLLERS = frozenset({"cpu", "memory", "pids", "io"})
"""What production limits a machine with."""
_POLL_S = 0.005
"""`cgroup.events` wakes only poll(POLLPRI), which asyncio does not offer; a dying VMM takes a few of these."""


class CgroupError(Exception):
    """The kernel refused; the message says what and where."""


@dataclass(frozen=True, slots=True)
class Limits:
    memory_bytes: int
    pids: int
    cpus: int
    swap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Leaf:
    path: Path
    missing: frozenset[str]
    """Controllers that this host does not offer there: their limits are not in force."""


def find_mount(mountinfo: Path = Path("/proc/self/mountinfo")) -> Path | None:
    return parse_mount(mountinfo.read_text())


def parse_mount(mountinfo: str) -> Path | None:
    """Where the whole v2 hierarchy is mounted; a bind mount of a part of it does not count."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if right.startswith("cgroup2 ") and fields[3] == "/":
            return Path(fields[4])
    return None


def controllers(mount: Path) -> frozenset[str]:
    return frozenset((mount / "cgroup.controllers").read_text().split()) & CONTROLLERS


def render_limits(limits: Limits) -> dict[str, dict[str, str]]:
    """Controller -> file -> value."""
    return {
        "memory": {"memory.max": str(limits.memory_bytes), "memory.swap.max": str(limits.swap_bytes)},
        "pids": {"pids.max": str(limits.pids)},
        "cpu": {"cpu.max": f"{limits.cpus * 100_000} 100000"},
    }


def parent(mount: Path, tag: str) -> Path:
    return mount / f"microvm-{tag}"


def ensure(mount: Path, tag: str, name: str, limits: Limits) -> Leaf:
    group = parent(mount, tag)
    path = group / name
    try:
        group.mkdir(exist_ok=True)
        offered = controllers(mount)
        _switch_on(mount, offered)
        _switch_on(group, offered)
        path.mkdir(exist_ok=True)
        there = frozenset((path / "cgroup.controllers").read_text().split())
        for controller, files in render_limits(limits).items():
            if controller in there:
                for file, value in files.items():
                    # memory.swap.max is missing where the kernel counts no swap: then there is none to limit.
                    if (path / file).exists():
                        (path / file).write_text(value)
    except OSError as error:
        raise CgroupError(f"cgroup {path}: {error.strerror}") from error
    return Leaf(path, CONTROLLERS - there)


def _switch_on(group: Path, names: frozenset[str]) -> None:
    control = group / "cgroup.subtree_control"
    for name in sorted(names - set(control.read_text().split())):
        # One at a time: a controller that is taken elsewhere must not keep the others off.
        with suppress(OSError):
            control.write_text(f"+{name}")


def leaves(mount: Path, tag: str) -> frozenset[str]:
    """Names of all leaves of an instance: what recovery compares with its rows."""
    try:
        return frozenset(entry.name for entry in parent(mount, tag).iterdir() if entry.is_dir())
    except FileNotFoundError:
        return frozenset()


def is_populated(path: Path) -> bool:
    """Whether any live process sits in it or below. A group that does not exist is empty."""
    try:
        return "populated 1" in (path / "cgroup.events").read_text().splitlines()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return False
        raise CgroupError(f"cgroup {path}: {error.strerror}") from error


def pids(path: Path) -> tuple[int, ...]:
    try:
        return tuple(int(line) for line in (path / "cgroup.procs").read_text().split())
    except OSError:
        return ()


async def kill(path: Path, *, timeout_s: float) -> None:
    """Returns when nothing in it lives. Idempotent; a group that does not exist is dead."""
    try:
        (path / "cgroup.kill").write_text("1")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return
        raise CgroupError(f"cgroup {path}: {error.strerror}") from error
    try:
        async with asyncio.timeout(timeout_s):
            while is_populated(path):  # noqa: ASYNC110 - see _POLL_S
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        stuck = ", ".join(map(str, pids(path)))
        raise CgroupError(f"cgroup {path}: still alive after {timeout_s:g} s: {stuck}") from error


async def remove(path: Path, *, timeout_s: float) -> None:
    """Kills what is in it, then removes it and, if nothing else is left there, the instance's parent."""
    await kill(path, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            # Zombies keep a group busy for a moment after it stopped being populated.
            while not _removed(path):  # noqa: ASYNC110 - see _POLL_S
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise CgroupError(f"cgroup {path}: cannot be removed") from error
    with suppress(OSError):
        path.parent.rmdir()


def _removed(path: Path) -> bool:
    try:
        for below in path.iterdir():
            if below.is_dir():
                _removed(below)
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise CgroupError(f"cgroup {path}: {error.strerror}") from error
    return True
