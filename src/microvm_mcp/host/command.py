"""Run a command of the host: argv in, output or `CommandFailed` out.

Never a shell, never an inherited environment, always a deadline. A command that runs out of time, floods, or whose
caller is cancelled is ended with its whole process group before the call returns. A failure is logged once, here,
with its argv; so secrets go through `input`, a file or a descriptor, never into argv.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

PLAIN_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/nonexistent",
}
"""What every command gets, before the caller's own additions."""

MAX_OUTPUT_BYTES = 16 << 20
TAIL_BYTES = 4096
TERM_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL: long enough to unmount and to remove temporary files."""
_CHUNK = 64 << 10


class CommandFailed(Exception):
    """`status` as `subprocess` has it (negative: the signal), None where the command was ended by us."""

    def __init__(self, argv: Sequence[str], status: int | None, tail: str, reason: str | None = None) -> None:
        self.argv = tuple(argv)
        self.status = status
        self.tail = tail
        self.reason = reason or f"exit status {status}"
        super().__init__(f"{shlex.join(self.argv)}: {self.reason}" + (f": {tail}" if tail else ""))


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended with one of the accepted statuses."""

    argv: tuple[str, ...]
    status: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")


class _Flooded(Exception):
    pass


async def run(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    input: bytes | None = None,  # noqa: A002 - as subprocess calls it
    cwd: Path | None = None,
    accept: frozenset[int] = frozenset({0}),
    max_output_bytes: int = MAX_OUTPUT_BYTES,
) -> Completed:
    """Both streams whole, up to `max_output_bytes` each. `env` is added to `PLAIN_ENVIRONMENT`."""
    out, err = bytearray(), bytearray()

    def keep(into: bytearray) -> Callable[[bytes], None]:
        def add(chunk: bytes) -> None:
            if len(into) + len(chunk) > max_output_bytes:
                raise _Flooded
            into.extend(chunk)

        return add

    words = tuple(str(word) for word in argv)
    status = await _run(words, keep(out), keep(err), timeout_s, env, input, cwd, lambda: bytes(err or out))
    return _judge(Completed(words, status, bytes(out), bytes(err)), accept)


async def run_lines(
    argv: Sequence[str | Path],
    on_line: Callable[[str], None],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    input: bytes | None = None,  # noqa: A002 - as subprocess calls it
    cwd: Path | None = None,
    accept: frozenset[int] = frozenset({0}),
) -> Completed:
    """Hands over each line of both streams as it comes; the result holds only the tail, as `stderr`.

    A carriage return ends a line too (progress meters), an over-long line comes in pieces, empty lines don't come.
    """
    tail = bytearray()

    def feeder() -> tuple[Callable[[bytes], None], Callable[[], None]]:
        pending = bytearray()

        def flush() -> None:
            line = pending.decode("utf-8", "replace").rstrip()
            pending.clear()
            if line:
                on_line(line)

        def feed(chunk: bytes) -> None:
            tail.extend(chunk)
            del tail[:-TAIL_BYTES]
            for piece in chunk.replace(b"\r", b"\n").splitlines(keepends=True):
                pending.extend(piece)
                if piece.endswith(b"\n") or len(pending) >= _CHUNK:
                    flush()

        return feed, flush

    words = tuple(str(word) for word in argv)
    (feed_out, flush_out), (feed_err, flush_err) = feeder(), feeder()
    status = await _run(words, feed_out, feed_err, timeout_s, env, input, cwd, lambda: bytes(tail))
    flush_out()
    flush_err()
    return _judge(Completed(words, status, b"", bytes(tail)), accept)


def _judge(done: Completed, accept: frozenset[int]) -> Completed:
    if done.status not in accept:
        raise _failed(CommandFailed(done.argv, done.status, _tail(done.stderr or done.stdout)))
    return done


def _tail(output: bytes) -> str:
    return output[-TAIL_BYTES:].decode("utf-8", "replace").strip()


def _failed(error: CommandFailed) -> CommandFailed:
    logger.warning("command failed argv=%s reason=%s tail=%r", shlex.join(error.argv), error.reason, error.tail)
    return error


async def _run(
    argv: tuple[str, ...],
    on_stdout: Callable[[bytes], None],
    on_stderr: Callable[[bytes], None],
    timeout_s: float,
    env: Mapping[str, str] | None,
    stdin: bytes | None,
    cwd: Path | None,
    so_far: Callable[[], bytes],
) -> int:
    started = time.monotonic()
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**PLAIN_ENVIRONMENT, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise _failed(CommandFailed(argv, 127, "", f"cannot be started ({error.strerror})")) from error
    clean = False
    try:
        async with asyncio.timeout(timeout_s):
            status = await _converse(process, on_stdout, on_stderr, stdin)
        clean = True
    except TimeoutError as error:
        raise _failed(CommandFailed(argv, None, _tail(so_far()), f"no end after {timeout_s:g} s")) from error
    except _Flooded as error:
        raise _failed(CommandFailed(argv, None, "", "more output than is kept")) from error
    finally:
        if not clean:
            await _end(process)
    logger.debug("command argv=%s status=%d seconds=%.3f", shlex.join(argv), status, time.monotonic() - started)
    return status


async def _converse(
    process: asyncio.subprocess.Process,
    on_stdout: Callable[[bytes], None],
    on_stderr: Callable[[bytes], None],
    stdin: bytes | None,
) -> int:
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_drain(process.stdout, on_stdout))
            group.create_task(_drain(process.stderr, on_stderr))
            group.create_task(_feed(process.stdin, stdin))
            return await process.wait()
    except ExceptionGroup as several:
        # A sink raised: its caller wants that very exception, not the group around it.
        raise several.exceptions[0] from None


async def _drain(reader: asyncio.StreamReader, sink: Callable[[bytes], None]) -> None:
    while chunk := await reader.read(_CHUNK):
        sink(chunk)


async def _feed(writer: asyncio.StreamWriter | None, data: bytes | None) -> None:
    if writer is None or data is None:
        return
    # A command may end without reading its input; its status says what that meant.
    with suppress(BrokenPipeError, ConnectionResetError):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Nothing of the process group is left when this returns, even if we are cancelled once more meanwhile."""
    try:
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            await _gone(process)
    finally:
        # The group may outlive its leader: whoever is left in it holds our pipes.
        _signal_group(process.pid, signal.SIGKILL)
    await _gone(process)


async def _gone(process: asyncio.subprocess.Process) -> None:
    # Unread pipes are paused by flow control and then never see their end, so they are read empty. A process that
    # left the group may hold them for ever: hence the deadline.
    assert process.stdout is not None
    assert process.stderr is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(TERM_GRACE_S):
            await asyncio.gather(process.wait(), _drain(process.stdout, _discard), _drain(process.stderr, _discard))


def _discard(chunk: bytes) -> None:
    pass


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
