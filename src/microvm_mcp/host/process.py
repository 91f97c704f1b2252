"""Processes that outlive us: start one confined, know it for certain, wait for it, kill it, prove it dead.

A process is known by pid and start time, and held by a pidfd, so no signal ever reaches a stranger that got the
same pid. It is started through `launcher.py` into a session, cgroup and namespaces of its own, and nothing here
ends it when we end: no parent-death signal, no pipe that breaks. (Where systemd is PID 1 a transient unit will take
the place of the bare launcher; callers see the same `Process`.)

What the process prints goes into a FIFO that it holds open itself, non-blocking: the kernel keeps the first 64 KiB
that nobody has read and drops the rest, so a flood fills no disk and stops nobody.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from microvm_mcp.host.command import PLAIN_ENVIRONMENT

logger = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("launcher.py")
_HIDDEN = ("/home", "/root", "/run", "/srv", "/tmp", "/var", "/media", "/mnt", "/boot")  # noqa: S108 - covered, not used
_PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_F_SETPIPE_SZ = 1031
OUTPUT_BYTES = 64 << 10


class LaunchFailed(Exception):
    """The program never ran. `stage`: which step of the launcher failed."""

    def __init__(self, stage: str, number: int | None, text: str) -> None:
        super().__init__(f"{stage}: {text}")
        self.stage = stage
        self.errno = number


@dataclass(frozen=True, slots=True)
class Tap:
    """A TAP interface inside the network namespace, and the descriptor number it gets in the program."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a confined program gets; what is not named here it does not have."""

    argv: tuple[str, ...]
    uid: int
    gid: int
    output: Path
    """FIFO for stdout and stderr; made anew."""
    cgroup: Path | None = None
    netns: Path | None = None
    tap: Tap | None = None
    descriptors: Mapping[int, int] = field(default_factory=dict)
    """Number in the program -> our own descriptor. 0, 1 and 2 are taken."""
    private_devices: tuple[str, ...] = ()
    """Device files that only this program's user may open, besides null, zero, full and random."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """`RLIMIT_` names without the prefix -> hard and soft limit. CORE is always 0."""
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """One process, held by pidfd. Made by `launch` and `adopt`, inside the loop that will watch it."""

    def __init__(self, pid: int, started_ticks: int, pidfd: int, output: Path) -> None:
        self.pid = pid
        self.started_ticks = started_ticks
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._dead = asyncio.Event()
        self._status: int | None = None
        self._output = _Output(output)
        self._loop.add_reader(pidfd, self._on_exit)

    @property
    def is_dead(self) -> bool:
        return self._dead.is_set()

    async def wait(self) -> int | None:
        """Any number of waiters. The status as `subprocess` has it; None for a process that is not our child."""
        await self._dead.wait()
        return self._status

    def signal(self, number: signal.Signals) -> None:
        if not self.is_dead:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def output(self) -> str:
        """The last of what it printed, as far as the FIFO kept it."""
        return self._output.read()

    def close(self) -> None:
        """Let go; the process runs on."""
        if self._pidfd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._output.close()

    def _on_exit(self) -> None:
        with suppress(ChildProcessError):
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if info is None:
                return
            self._status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._output.read()
        self._output.close()
        self._dead.set()


class _Output:
    """Our reading end of the FIFO: read on demand, never followed, so that a flood costs us nothing."""

    def __init__(self, path: Path) -> None:
        self._kept = bytearray()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            self._fd = -1

    def read(self) -> str:
        left = OUTPUT_BYTES if self._fd >= 0 else 0
        with suppress(BlockingIOError):
            while left > 0 and (chunk := os.read(self._fd, left)):
                left -= len(chunk)
                self._kept.extend(chunk)
        del self._kept[:-OUTPUT_BYTES]
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


async def launch(plan: Plan, *, timeout_s: float) -> Process:
    """Returns once the program itself runs; LaunchFailed, and nothing is left, if it never does."""
    output = await asyncio.to_thread(_make_output, plan.output)
    plan_fd = os.memfd_create("launch-plan")
    status, status_end = os.pipe()
    try:
        os.write(plan_fd, _render(plan, output))
        os.lseek(plan_fd, 0, os.SEEK_SET)
        kept = [plan_fd, status_end, output, *plan.descriptors.values()]
        process = _spawn(plan, [sys.executable, "-I", "-S", str(_LAUNCHER), str(plan_fd), str(status_end)], kept)
    except BaseException:
        os.close(status)
        raise
    finally:
        for fd in (plan_fd, status_end, output):
            os.close(fd)
    try:
        async with asyncio.timeout(timeout_s):
            report = await _read_to_end(status)
            if report:
                await process.wait()
    except BaseException as error:
        # Whoever watches the pidfd reaps it; we only make sure that there is an end.
        process.signal(signal.SIGKILL)
        if isinstance(error, TimeoutError):
            raise LaunchFailed("start", None, f"the launcher did not finish within {timeout_s:g} s") from error
        raise
    if report:
        said = process.output()
        process.close()
        raise _parse_report(report, said)
    logger.debug("launched pid=%d uid=%d argv=%s", process.pid, plan.uid, shlex.join(plan.argv))
    return process


def adopt(pid: int, started_ticks: int, output: Path) -> Process | None:
    """The living process of that pid *and* start time, or None."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return None
    # Only now: what the pid meant before the descriptor was opened proves nothing.
    if started_ticks_of(pid) != started_ticks:
        os.close(pidfd)
        return None
    return Process(pid, started_ticks, pidfd, output)


def started_ticks_of(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat: clock ticks since the host booted. None for the dead, zombies included."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return parse_started_ticks(text)


def parse_started_ticks(stat: str) -> int | None:
    # The name in parentheses may hold anything, so fields are counted behind the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def host_boot_id() -> str:
    """Pids and start times mean something within one boot only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _make_output(path: Path) -> int:
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    # Read-write: the program is its own reader, so there is no SIGPIPE when we are gone. Non-blocking: a full FIFO
    # drops what is written.
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    fcntl.fcntl(fd, _F_SETPIPE_SZ, OUTPUT_BYTES)
    return fd


def _render(plan: Plan, output: int) -> bytes:
    devices = dict.fromkeys(_PLAIN_DEVICES, False) | dict.fromkeys(plan.private_devices, True)
    limits = {**plan.limits, "CORE": 0}
    return json.dumps(
        {
            "argv": plan.argv,
            "uid": plan.uid,
            "gid": plan.gid,
            "cgroup": None if plan.cgroup is None else str(plan.cgroup),
            "netns": None if plan.netns is None else str(plan.netns),
            "tap": None if plan.tap is None else {"name": plan.tap.name, "number": plan.tap.number},
            "descriptors": {**plan.descriptors, 1: output, 2: output},
            "devices": devices,
            "hidden": [path for path in _HIDDEN if not Path(plan.argv[0]).is_relative_to(path)],
            "limits": {name: (value, value) for name, value in limits.items()},
            "environment": {**PLAIN_ENVIRONMENT, **plan.environment},
        }
    ).encode()


def _spawn(plan: Plan, argv: list[str], kept: list[int]) -> Process:
    # Neither asyncio's nor subprocess's objects: the one kills the child when it is collected, the other complains.
    actions = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in kept]  # onto itself: clears close-on-exec
    pid = os.posix_spawn(argv[0], argv, dict(PLAIN_ENVIRONMENT), file_actions=actions, setsigmask=[])
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        # Our child, not reaped by anybody yet: the number is still its own.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    ticks = started_ticks_of(pid)
    return Process(pid, ticks if ticks is not None else 0, pidfd, plan.output)


async def _read_to_end(fd: int) -> bytes:
    """Reads and closes."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    os.set_blocking(fd, False)
    loop.add_reader(fd, ready.set)
    read = bytearray()
    try:
        while True:
            await ready.wait()
            ready.clear()
            with suppress(BlockingIOError):
                chunk = os.read(fd, 8192)
                if not chunk:
                    return bytes(read)
                read += chunk
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _parse_report(report: bytes, said: str) -> LaunchFailed:
    try:
        fields = json.loads(report)
        return LaunchFailed(str(fields["stage"]), fields["errno"], str(fields["text"]))
    except (ValueError, KeyError, TypeError):
        return LaunchFailed("start", None, f"the launcher died: {said.strip() or report!r}")
