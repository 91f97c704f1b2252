"""Start one command as the guest's user: in its own cgroup and session before it runs anything.

The child is forked from this small, single-threaded process straight into its group, so nothing of the command
ever runs outside. It keeps no descriptor but /dev/null and its two pipes (all others are close-on-exec), no group
but its own, no capability. NoNewPrivs stays off: it would break ping and whatever set-user-id tools an operator
installs; the image has no way up for an account without a password.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
from typing import NamedTuple, NoReturn

from microvm_mcp.guest.clone import fork_into
from microvm_mcp.guest.options import GID, UID
from microvm_mcp.wire.messages import Shell

PIPE_BYTES = 262_144
"""Larger than the default 64 KiB: fewer turns of our loop while a command floods."""
EXEC_S = 5.0
"""From fork to exec; some ten milliseconds in an emulated guest."""
_OOM_SCORE = "500"
"""When the guest's memory runs out a job goes, not the supervisor."""
_OPEN_FILES = (1024, 524_288)
"""Soft and hard, as systemd gives to services; where we may not raise the hard one, what was inherited stays."""
_ARGUMENTS = {
    Shell.LOGIN: ("bash", "-l", "-c", "--"),
    Shell.PLAIN: ("bash", "--noprofile", "--norc", "-c", "--"),
}


class Spawned(NamedTuple):
    pid: int
    stdout: int
    stderr: int


class Command(NamedTuple):
    shell: Shell
    text: str
    env: tuple[tuple[str, str], ...]
    home: str
    cwd_fd: int
    group_fd: int
    """Directory of the cgroup to be born in."""


def spawn(command: Command) -> Spawned:
    """Returns once the shell has been executed. OSError: nothing is left of the attempt."""
    out_read = out_write = err_read = err_write = report_read = report_write = -1
    try:
        out_read, out_write = _pipe()
        err_read, err_write = _pipe()
        report_read, report_write = os.pipe()
        pid = fork_into(command.group_fd)
        if pid == 0:
            _become(command, out_write, err_write, report_write)
        os.close(report_write)
        report_write = -1
        number = _failure(report_read)
        if number:
            # Not yet reaped, so the number is still its own; stopped by another of the user's processes, maybe.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise OSError(number, os.strerror(number))
    except OSError:
        for fd in (out_read, err_read):
            if fd >= 0:
                os.close(fd)
        raise
    finally:
        for fd in (out_write, err_write, report_read, report_write):
            if fd >= 0:
                os.close(fd)
    return Spawned(pid, out_read, err_read)


def _failure(report: int) -> int:
    """An errno, or 0 once the shell has been executed.

    Bounded: as soon as the child is the user's, another process of the user can stop it, before its exec.
    """
    waiting = select.poll()
    waiting.register(report, select.POLLIN)
    if not waiting.poll(EXEC_S * 1000):
        return errno.ETIMEDOUT
    return int(os.read(report, 16) or b"0")


def environment(command: Command) -> dict[str, str]:
    return {
        "HOME": command.home,
        "USER": "user",
        "LOGNAME": "user",
        "SHELL": "/bin/bash",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **dict(command.env),
    }


def capacity(pipe: int) -> int:
    """Most bytes that can be in it. Its writer may have enlarged it."""
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


def _pipe() -> tuple[int, int]:
    """Read end non-blocking; owned by the user, who could not open /dev/stdout by name otherwise."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.fchown(write, UID, GID)
    fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read, write


def _become(command: Command, stdout: int, stderr: int, report: int) -> NoReturn:
    """In the child. Every failure goes through `report` as an errno."""
    try:
        os.setsid()
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, _OOM_SCORE.encode())
        # Python ignores these two, and ignored signals outlive exec: a writer whose reader went would never end.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.umask(0o022)
        _, hard_core = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard_core))
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, _OPEN_FILES)
        os.setgroups([])
        os.setresgid(GID, GID, GID)
        os.setresuid(UID, UID, UID)
        os.fchdir(command.cwd_fd)
        arguments = [*_ARGUMENTS[command.shell], command.text]
        env = {name.encode(): value.encode() for name, value in environment(command).items()}
        os.execve("/bin/bash", [argument.encode() for argument in arguments], env)  # noqa: S606
    except BaseException as error:  # noqa: BLE001 - this is a forked copy: nothing may unwind into the loop
        os.write(report, str(getattr(error, "errno", None) or errno.EIO).encode())
    finally:
        os._exit(127)
