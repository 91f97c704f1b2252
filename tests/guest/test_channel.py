"""The real supervisor's end of the stream: tears, garbage, slow hosts, and hosts that come back."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from microvm_mcp.guest.channel import PORT_NAME, find_port
from microvm_mcp.guest.options import parse_options
from microvm_mcp.wire.frames import Kind
from microvm_mcp.wire.messages import (
    CancelJob,
    Done,
    FileContent,
    ForgetJob,
    JobOutput,
    JobState,
    ListJobs,
    OneJob,
    Output,
    ReadFile,
    Refused,
    Reply,
    Request,
    Shell,
    StartJob,
    WriteFile,
    Written,
)
from microvm_mcp.wire.session import Answered, HostSession, Welcomed, encode_message
from tests.support import needs
from tests.support.supervisor import PYTHON, SOURCES, remove_cgroup, running_supervisor

pytestmark = pytest.mark.needs("root", "cgroup2")

SLEEP = StartJob("job-1", "r1", "echo first; sleep 1000", ".", Shell.PLAIN, (), None, 3600, 0.0)


class Host:
    """A host on a plain socket, one question at a time."""

    def __init__(self, stream: socket.socket, nonce: bytes | None = None) -> None:
        self.stream = stream
        self.session = HostSession(nonce or os.urandom(16))
        self._events: list[Welcomed | Answered] = []

    def attach(self) -> Welcomed:
        self.stream.sendall(self.session.hello())
        event = self.event()
        assert isinstance(event, Welcomed)
        return event

    def ask(self, request: Request) -> Reply | Refused:
        number, data = self.session.ask(request)
        self.stream.sendall(data)
        event = self.event()
        assert isinstance(event, Answered)
        assert event.request == number
        return event.answer

    def event(self) -> Welcomed | Answered:
        while not self._events:
            data = self.stream.recv(65_536)
            assert data, "the supervisor hung up"
            self._events += self.session.receive(data)
        return self._events.pop(0)


@pytest.fixture
def stream() -> Iterator[socket.socket]:
    """The host's end of the only stream there is, as a virtio port is."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, running_supervisor(stream=theirs):
        theirs.close()
        yield ours


def test_a_host_that_comes_back_on_the_same_stream_finds_the_jobs(stream: socket.socket) -> None:
    first = Host(stream)
    first.attach()
    first.ask(SLEEP)
    for _ in range(3):
        again = Host(stream)
        assert again.attach().welcome.active_jobs == 1
        jobs = again.ask(ListJobs(-1, 0.0))
        assert [job.job_id for job in jobs.jobs] == ["job-1"]  # type: ignore[union-attr]
    output = again.ask(JobOutput("job-1", 0, 0, 100, 10.0))
    assert isinstance(output, Output)
    assert output.stdout.data == b"first\n"


def test_a_host_that_died_in_the_middle_of_a_file_is_followed_by_one_that_is_heard(stream: socket.socket) -> None:
    first = Host(stream)
    first.attach()
    _, data = first.session.ask(WriteFile("file", bytes(131_072), None, None))
    stream.sendall(data[:90_000])
    second = Host(stream)
    stream.sendall(second.session.hello())
    second.attach()
    assert isinstance(second.ask(ReadFile("file", 0, 1)), Refused)
    assert second.ask(WriteFile("file", b"x", None, None)) == Written(1, 0o644)


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200_000), b"\xf1mV\x9e" * 5000])
def test_garbage_before_a_hello_costs_nothing(stream: socket.socket, garbage: bytes) -> None:
    stream.sendall(garbage)
    assert Host(stream).attach().welcome.version == 1


def test_answers_to_an_earlier_session_never_reach_the_next_one(stream: socket.socket) -> None:
    first = Host(stream)
    first.attach()
    first.ask(SLEEP)
    _, waiting = first.session.ask(JobOutput("job-1", 6, 0, 100, 0.3))
    stream.sendall(waiting)
    second = Host(stream)
    second.attach()
    answer = second.ask(ListJobs(1, 1.0))
    assert not isinstance(answer, Refused)


def test_a_host_that_does_not_read_holds_up_no_job_and_is_answered_when_it_does(stream: socket.socket) -> None:
    host = Host(stream)
    host.attach()
    host.ask(WriteFile("file", bytes(131_072), None, None))
    host.ask(StartJob("job-1", "r1", "sleep 0.5; touch done", ".", Shell.PLAIN, (), None, 60, 0.0))
    asked = [host.session.ask(ReadFile("file", 0, 131_072)) for _ in range(50)]
    stream.sendall(b"".join(data for _, data in asked))
    time.sleep(1.5)
    numbers = set()
    for _ in asked:
        event = host.event()
        assert isinstance(event, Answered)
        assert isinstance(event.answer, FileContent)
        numbers.add(event.request)
    assert numbers == {number for number, _ in asked}
    assert isinstance(host.ask(ReadFile("done", 0, 0)), FileContent)


def test_requests_that_are_no_requests_are_refused_and_the_next_is_answered(stream: socket.socket) -> None:
    host = Host(stream)
    host.attach()
    number, _ = host.session.ask(ForgetJob("job-1"))
    tag = int.from_bytes(host.session._nonce[:8], "big")
    stream.sendall(encode_message(Kind.REQUEST, tag, number, {"op": "format_disk"}, b""))
    event = host.event()
    assert isinstance(event, Answered)
    assert isinstance(event.answer, Refused)
    assert host.ask(ForgetJob("job-1")) == Done()


def test_an_idle_supervisor_uses_no_cpu(stream: socket.socket) -> None:
    host = Host(stream)
    host.attach()
    host.ask(SLEEP)
    pid = int(_supervisors()[0])
    before = _cpu_ticks(pid)
    time.sleep(1)
    assert _cpu_ticks(pid) - before <= 2


def _supervisors() -> list[str]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "python3 -I -S"], capture_output=True, text=True)
    return found.stdout.split()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_the_newest_connection_to_a_listening_supervisor_counts() -> None:
    with running_supervisor() as supervisor:
        first = Host(supervisor.connect())
        first.attach()
        first.ask(SLEEP)
        second = Host(supervisor.connect())
        assert second.attach().welcome.active_jobs == 1
        assert first.stream.recv(100) == b""
        second.stream.close()
        third = Host(supervisor.connect())
        third.attach()
        report = third.ask(CancelJob("job-1"))
        assert isinstance(report, OneJob)
        assert report.job.state is JobState.CANCELLED
        first.stream.close()
        third.stream.close()


def test_the_port_is_found_by_its_name(tmp_path: Path) -> None:
    assert find_port(str(tmp_path / "none")) is None
    for device, name in (("vport1p1", "org.qemu.guest_agent.0"), ("vport1p2", PORT_NAME)):
        (tmp_path / device).mkdir()
        (tmp_path / device / "name").write_text(f"{name}\n")
    (tmp_path / "vport2p1").mkdir()
    assert find_port(str(tmp_path)) == "vport1p2"


def test_options_are_strict() -> None:
    assert parse_options(["--cgroup-root", "/x", "--fd", "3"])._asdict() | {} == {
        "workspace": "/workspace",
        "state_dir": "/var/lib/microvm",
        "home": "/home/user",
        "cgroup_root": "/x",
        "fd": "3",
        "listen": "",
        "log_limit": "67108864",
    }
    for wrong in (["--nope", "1"], ["fd", "1"], ["--fd"]):
        with pytest.raises(SystemExit):
            parse_options(wrong)


def test_it_finds_the_cgroup_that_it_was_delegated_and_moves_out_of_the_way(supervisor_cgroup: Path) -> None:
    code = (
        "import os, sys; root = sys.argv[2]; sys.path.insert(0, sys.argv[1])\n"
        "open(root + '/cgroup.procs', 'w').write('0')\n"
        "from microvm_mcp.guest.cgroup import delegated_root, open_user_subtree\n"
        "found = delegated_root(); again = delegated_root(); user = open_user_subtree(found)\n"
        "print(found, again, user.path, open('/proc/self/cgroup').read().splitlines()[-1])"
    )
    argv = [PYTHON, "-I", "-S", "-c", code, str(SOURCES), str(supervisor_cgroup)]
    out = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    root = str(supervisor_cgroup)
    assert out[:3] == [root, root, f"{root}/user"]
    assert out[3].endswith(f"{supervisor_cgroup.name}/supervisor")


@pytest.fixture
def supervisor_cgroup() -> Iterator[Path]:
    mount = needs.cgroup2_mount()
    assert mount is not None
    path = mount / f"microvm-test-{os.getpid()}-delegated"
    path.mkdir()
    yield path
    remove_cgroup(path)
