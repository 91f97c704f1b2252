"""The real supervisor as a process of this host: `python3 -I -S`, real cgroups, directories of its own.

Its clock is never this host's: setting it is recorded in a file instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.guest.options import GID, UID
from microvm_mcp.link.client import LinkClient
from microvm_mcp.link.dial import dialer
from tests.support import needs

SOURCES = Path(__file__).resolve().parents[2] / "src"
PYTHON = "/usr/bin/python3"
_MAIN = """
import sys, time
sources, clock, *arguments = sys.argv[1:]
def record(which, now_ns):
    with open(clock, "a") as file:
        file.write(f"{which} {now_ns}\\n")
time.clock_settime_ns = record
sys.path.insert(0, sources)
from microvm_mcp.guest.__main__ import main
main(arguments)
"""


@dataclass(frozen=True)
class RunningSupervisor:
    base: Path
    cgroup: Path
    process: subprocess.Popen[bytes]
    clock: Path

    @property
    def socket_path(self) -> Path:
        return self.base / "control.sock"

    @property
    def workspace(self) -> Path:
        return self.base / "workspace"

    @property
    def user_cgroup(self) -> Path:
        return self.cgroup / "user"

    def link(self) -> LinkClient:
        return LinkClient(dialer("unix", self.socket_path, 0))

    def connect(self) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(str(self.socket_path))
        stream.settimeout(20)
        return stream

    def clock_settings(self) -> list[int]:
        lines = self.clock.read_text().splitlines() if self.clock.exists() else []
        return [int(line.split()[1]) for line in lines]


@contextlib.contextmanager
def running_supervisor(*arguments: str, stream: socket.socket | None = None) -> Iterator[RunningSupervisor]:
    """With `stream` it talks on that one for ever; without, it listens on a Unix socket."""
    mount = needs.cgroup2_mount()
    assert mount is not None
    with tempfile.TemporaryDirectory(prefix="microvm-guest-") as name:
        base = Path(name)
        base.chmod(0o755)
        for directory in ("workspace", "home"):
            (base / directory).mkdir()
            os.chown(base / directory, UID, GID)
        cgroup = mount / f"microvm-test-{os.getpid()}-{base.name}"
        cgroup.mkdir()
        try:
            yield from _run(base, cgroup, arguments, stream)
        finally:
            remove_cgroup(cgroup)


def _run(
    base: Path, cgroup: Path, arguments: tuple[str, ...], stream: socket.socket | None
) -> Iterator[RunningSupervisor]:
    clock = base / "clock"
    channel = ["--fd", str(stream.fileno())] if stream else ["--listen", str(base / "control.sock")]
    places = {"--workspace": base / "workspace", "--state-dir": base / "state", "--home": base / "home"}
    argv = [
        *(PYTHON, "-I", "-S", "-c", _MAIN, str(SOURCES), str(clock)),
        *channel,
        *(str(part) for pair in places.items() for part in pair),
        *("--cgroup-root", str(cgroup)),
        *arguments,
    ]
    process = subprocess.Popen(argv, pass_fds=[stream.fileno()] if stream else [])
    try:
        yield RunningSupervisor(base, cgroup, process, clock)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def remove_cgroup(path: Path) -> None:
    """With all that is left in it, proven gone."""
    (path / "cgroup.kill").write_text("1")
    with open(path / "cgroup.events", "rb") as events, contextlib.closing(select.epoll()) as epoll:
        epoll.register(events.fileno(), select.EPOLLPRI)
        for _ in range(100):
            if b"populated 0" in os.pread(events.fileno(), 200, 0):
                break
            epoll.poll(0.2)
    for directory, _, _ in os.walk(path, topdown=False):
        Path(directory).rmdir()


def has_pids_controller() -> bool:
    mount = needs.cgroup2_mount()
    return mount is not None and "pids" in (mount / "cgroup.controllers").read_text().split()
