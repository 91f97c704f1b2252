"""Between fork and exec a child is the user's already: what the user does to it must not hold up the supervisor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from microvm_mcp.guest import spawn
from microvm_mcp.guest.cgroup import Group
from microvm_mcp.host import cgroup
from microvm_mcp.wire.messages import Shell

pytestmark = pytest.mark.needs("root", "cgroup2")


@pytest.fixture
def command(tmp_path: Path) -> Iterator[spawn.Command]:
    mount = cgroup.find_mount()
    assert mount is not None
    group = Group(str(mount / f"microvm-test-spawn-{os.getpid()}"))
    group_fd, cwd_fd = group.open(), os.open(tmp_path, os.O_PATH | os.O_CLOEXEC)
    yield spawn.Command(Shell.PLAIN, "true", (), "/", cwd_fd, group_fd)
    os.close(group_fd)
    os.close(cwd_fd)
    group.kill()
    deadline = time.monotonic() + 5
    while not group.remove() and time.monotonic() < deadline:
        time.sleep(0.01)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_child_that_is_stopped_before_its_exec_is_ended_and_leaves_nothing(
    command: spawn.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)

    monkeypatch.setattr(spawn, "_become", stop)
    monkeypatch.setattr(spawn, "EXEC_S", 0.2)
    before, started = descriptors(), time.monotonic()
    with pytest.raises(TimeoutError):
        spawn.spawn(command)
    assert time.monotonic() - started < 5
    assert descriptors() == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_an_attempt_without_descriptors_leaves_none_behind(
    command: spawn.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, made = spawn._pipe, 0

    def second_fails() -> tuple[int, int]:
        nonlocal made
        made += 1
        if made == 2:
            raise OSError(24, "Too many open files")
        return pipe()

    monkeypatch.setattr(spawn, "_pipe", second_fails)
    before = descriptors()
    with pytest.raises(OSError, match="Too many"):
        spawn.spawn(command)
    assert descriptors() == before
