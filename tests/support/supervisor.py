"""The real supervisor as a process of this host: `python3 -I -S`, real cgroups, directories of its own.

Its clock is never this host's: setting it is recorded in a file instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
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


class RunningSupervisor:
    def __init__(self, base: Path, cgroup: Path, arguments: tuple[str, ...], stream: socket.socket | None) -> None:
        self.base = base
        self.cgroup = cgroup
        self.workspace = base / "workspace"
        self.user_cgroup = cgroup / "user"
        self._clock = base / "clock"
        self._socket = base / "control.sock"
        self._stream = stream
        channel = ["--fd", str(stream.fileno())] if stream else ["--listen", str(self._socket)]
        places = ["--workspace", self.workspace, "--state-dir", base / "state", "--home", base / "home"]
        self._argv = [
            *(PYTHON, "-I", "-S", "-c", _MAIN, str(SOURCES), str(self._clock)),
            *channel,
            *map(str, places),
            *("--cgroup-root", str(cgroup)),
            *arguments,
        ]
        self.process = self._start()

    def restart(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._socket.unlink(missing_ok=True)
        self.process = self._start()

    def link(self) -> LinkClient:
        return LinkClient(dialer("unix", self._socket, 0))

    def connect(self) -> socket.socket:
        """A raw connection, once the supervisor listens."""
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(20)
        deadline = time.monotonic() + 20
        while True:
            try:
                stream.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            else:
                return stream

    def clock_settings(self) -> list[int]:
        lines = self._clock.read_text().splitlines() if self._clock.exists() else []
        return [int(line.split()[1]) for line in lines]

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._argv, pass_fds=[self._stream.fileno()] if self._stream else [])


@contextlib.contextmanager
def running_supervisor(*arguments: str, stream: socket.socket | None = None) -> Iterator[RunningSupervisor]:
    """With `stream` it talks on that one until it ends; without, it listens on a Unix socket."""
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
            supervisor = RunningSupervisor(base, cgroup, arguments, stream)
            try:
                yield supervisor
            finally:
                supervisor.process.kill()
                supervisor.process.wait(10)
        finally:
            remove_cgroup(cgroup)


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
