"""Real commands: what comes back, what a failure says, and that nothing outlives the call."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from microvm_mcp.host.command import PLAIN_ENVIRONMENT, CommandFailed, run, run_lines


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


async def _until(condition: Callable[[], bool]) -> None:
    """Polled every 10 ms, for 10 s: there is no event for what another process does to a file or to itself."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def _pid(path: Path) -> int:
    return int(path.read_text())


async def _dies(pid_file: Path) -> None:
    pid = _pid(pid_file)
    await _until(lambda: not _alive(pid))


async def test_streams_come_back_apart_and_whole() -> None:
    done = await run(["sh", "-c", "cat; echo err >&2"], input=b"in\n", timeout_s=10)
    assert (done.status, done.stdout, done.stderr, done.text) == (0, b"in\n", b"err\n", "in\n")


async def test_words_are_never_read_by_a_shell() -> None:
    assert (await run(["printf", "%s", "$(id); *"], timeout_s=10)).stdout == b"$(id); *"


async def test_environment_is_the_plain_one_and_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK", "secret")
    lines = (await run(["env"], env={"MORE": "1"}, timeout_s=10)).text.splitlines()
    assert sorted(lines) == sorted([*(f"{k}={v}" for k, v in PLAIN_ENVIRONMENT.items()), "MORE=1"])


async def test_failure_says_argv_status_and_the_last_output() -> None:
    with pytest.raises(CommandFailed) as caught:
        await run(["sh", "-c", "echo early; echo why >&2; exit 3"], timeout_s=10)
    assert (caught.value.status, caught.value.tail) == (3, "why")
    assert caught.value.argv[:2] == ("sh", "-c")


async def test_an_accepted_status_is_no_failure() -> None:
    assert (await run(["false"], timeout_s=10, accept=frozenset({0, 1}))).status == 1


async def test_a_missing_program_is_a_failure_that_says_so() -> None:
    with pytest.raises(CommandFailed, match="cannot be started"):
        await run(["/nonexistent/program"], timeout_s=10)


async def test_a_command_that_ignores_its_input_does_not_fail() -> None:
    assert (await run(["true"], input=b"x" * (1 << 20), timeout_s=10)).status == 0


async def test_output_beyond_the_bound_ends_the_command() -> None:
    with pytest.raises(CommandFailed, match="more output"):
        await run(["yes"], timeout_s=20, max_output_bytes=100_000)


async def test_out_of_time_ends_children_too(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(CommandFailed, match="no end after"):
        await run(["sh", "-c", script], timeout_s=0.5)
    await _dies(tmp_path / "pid")


async def test_out_of_time_ends_a_background_child_that_holds_the_pipes(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="no end after"):
        await run(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid"], timeout_s=0.5)
    await _dies(tmp_path / "pid")


async def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done"
    with pytest.raises(CommandFailed):
        await run(["sh", "-c", script], timeout_s=0.5)
    await _dies(tmp_path / "pid")


async def test_cancelling_the_caller_ends_the_command(tmp_path: Path) -> None:
    task = asyncio.create_task(run(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 1000"], timeout_s=60))
    await _until(lambda: _written(tmp_path / "pid"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _dies(tmp_path / "pid")


async def test_sigterm_comes_first_so_that_a_command_can_clean_up(tmp_path: Path) -> None:
    script = f"trap 'rm {tmp_path}/lock; exit 1' TERM; touch {tmp_path}/lock; while :; do sleep 0.05; done"
    with pytest.raises(CommandFailed):
        await run(["sh", "-c", script], timeout_s=0.5)
    assert not (tmp_path / "lock").exists()


async def test_lines_come_while_the_command_runs() -> None:
    seen: list[tuple[str, float]] = []
    started = time.monotonic()
    await run_lines(
        ["sh", "-c", "echo one; sleep 0.4; printf 'two\\rthree\\n\\n'; printf four >&2"],
        lambda line: seen.append((line, time.monotonic() - started)),
        timeout_s=10,
    )
    assert {line for line, _ in seen} == {"one", "two", "three", "four"}
    assert seen[0][0] == "one"
    assert dict(seen)["two"] - dict(seen)["one"] > 0.2


async def test_lines_of_a_failing_command_end_in_its_tail() -> None:
    lines: list[str] = []
    with pytest.raises(CommandFailed) as caught:
        await run_lines(["sh", "-c", "echo a; echo b >&2; exit 9"], lines.append, timeout_s=10)
    assert caught.value.status == 9
    assert sorted(caught.value.tail.split()) == ["a", "b"]


async def test_an_endless_line_comes_in_pieces() -> None:
    lines: list[str] = []
    await run_lines(["sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x"], lines.append, timeout_s=10)
    assert sum(map(len, lines)) == 300_000
    assert len(lines) > 1


async def test_an_error_of_the_reader_of_lines_ends_the_command() -> None:
    def refuse(line: str) -> None:
        raise ValueError(line)

    with pytest.raises(ValueError, match="y"):
        await run_lines(["yes"], refuse, timeout_s=20)


async def test_a_signal_is_a_negative_status() -> None:
    with pytest.raises(CommandFailed) as caught:
        await run(["sh", "-c", "kill -KILL $$"], timeout_s=10)
    assert caught.value.status == -signal.SIGKILL
