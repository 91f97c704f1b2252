"""Commands in a real machine, over both doors: streams, exact output, programs, ends."""

from __future__ import annotations

import asyncio
import base64

import pytest

from tests.support.running import Door, ToolError, execute, finished, request_id, write_file

pytestmark = [pytest.mark.needs("root", "qemu", "image", "reflink", "netns", "cgroup2"), pytest.mark.timeout(300)]

KEPT_BYTES = 256 * 1024


async def test_fibonacci_arrives_through_separate_streams(door: Door, vm: str) -> None:
    program = (
        "import sys\n"
        "a, b = 0, 1\n"
        "for n in range(40):\n"
        "    print(a, file=sys.stderr if n % 2 else sys.stdout)\n"
        "    a, b = b, a + b\n"
    )
    await write_file(door, vm, "fib.py", program.encode())
    answer = await execute(door, vm, "python3 fib.py")
    numbers = [0, 1]
    while len(numbers) < 40:
        numbers.append(numbers[-1] + numbers[-2])
    assert answer["state"] == "completed"
    assert answer["exit_code"] == 0
    assert [int(line) for line in answer["stdout"].split()] == numbers[::2]
    assert [int(line) for line in answer["stderr"].split()] == numbers[1::2]


async def test_c_program_is_written_compiled_and_run(door: Door, vm: str) -> None:
    source = b'#include <stdio.h>\nint main(int c, char **v) { printf("%d:%s\\n", c, v[1]); return 7; }\n'
    await write_file(door, vm, "src/deep/args.c", source)
    answer = await execute(door, vm, "gcc -Wall -Werror -o args args.c && ./args 'a b'", cwd="src/deep")
    assert (answer["stdout"], answer["exit_code"]) == ("2:a b\n", 7)


async def test_python_git_and_node_of_the_image_work(door: Door, vm: str) -> None:
    command = (
        "set -e; rm -rf r; git init -q r; cd r;"
        " git -c user.name=u -c user.email=u@e commit -q --allow-empty -m one; git log --oneline | wc -l;"
        " node -e 'console.log(6*7)'; npm --version >/dev/null; pnpm --version >/dev/null;"
        " python3 -m venv --without-pip v; v/bin/python -c 'print(6*7)'; id -un; pwd"
    )
    answer = await execute(door, vm, command)
    if answer["state"] == "running":
        await finished(door, vm, answer["job_id"])
        answer |= await door.call("vm_job_output", vm_id=vm, job_id=answer["job_id"])
    assert answer["stdout"].split() == ["1", "42", "42", "user", "/workspace/r"], answer


async def test_characters_cut_at_page_edges_arrive_whole(door: Door, vm: str) -> None:
    # 3-byte characters after one byte of offset: no page of 16 KiB ends on a boundary.
    text = "x" + "€" * 20_000
    await write_file(door, vm, "euro.txt", text.encode())
    answer = await execute(door, vm, "cat euro.txt")
    await finished(door, vm, answer["job_id"])
    read, cursor = "", {"stdout": 0, "stderr": 0}
    pages = 0
    while True:
        page = await door.call("vm_job_output", vm_id=vm, job_id=answer["job_id"], cursor=cursor)
        assert page["decoding_errors"] == {"stdout": 0, "stderr": 0}
        read += page["stdout"]
        if page["next_cursor"] == cursor:
            break
        cursor = page["next_cursor"]
        pages += 1
    assert read == text
    assert pages >= 4


async def test_a_megabyte_keeps_true_offsets_around_its_gap(door: Door, vm: str) -> None:
    # Every line is 16 bytes and names its own offset, so each delivered byte proves where it belongs.
    total = 1 << 20
    command = "python3 -c \"import sys; [sys.stdout.write(f'{n*16:015d}\\n') for n in range(65536)]\""
    answer = await execute(door, vm, command)
    status = await finished(door, vm, answer["job_id"])
    assert status["state"] == "completed"
    assert status["truncated"] is True
    whole = b"".join(b"%015d\n" % (n * 16) for n in range(65536))
    cursor, kept, gaps = {"stdout": 0, "stderr": 0}, 0, set()
    while True:
        page = await door.call("vm_job_output", vm_id=vm, job_id=answer["job_id"], cursor=cursor, encoding="base64")
        data = base64.b64decode(page["stdout_base64"])
        end = page["next_cursor"]["stdout"]
        assert whole[end - len(data) : end] == data
        kept += len(data)
        gaps.add((page["omitted"]["stdout"]["from"], page["omitted"]["stdout"]["bytes"]))
        if page["next_cursor"] == cursor:
            break
        cursor = page["next_cursor"]
    assert len(gaps) == 1
    ((start, omitted),) = gaps
    assert start >= 64 * 1024
    assert omitted > 0
    assert kept + omitted == total
    assert kept <= KEPT_BYTES
    log = await door.call("vm_read_file", vm_id=vm, path=page["log_path"], offset=total - 16)
    assert base64.b64decode(log["content_base64"]) == whole[-16:]
    assert log["size"] == total


async def test_cancel_ends_a_double_forked_child_in_its_own_session(door: Door, vm: str) -> None:
    command = "(setsid sh -c 'sleep 3000 & echo $! > pid; wait' &) ; sleep 3000"
    answer = await door.call("vm_exec", vm_id=vm, request_id=request_id(), command="rm -f pid; " + command)
    pid = (await execute(door, vm, "for i in $(seq 100); do [ -s pid ] && break; sleep 0.1; done; cat pid"))[
        "stdout"
    ]
    assert (await execute(door, vm, f"kill -0 {int(pid)} && echo alive"))["stdout"] == "alive\n"
    cancelled = await door.call("vm_job_cancel", vm_id=vm, job_id=answer["job_id"])
    assert cancelled["state"] == "cancelled"
    assert (await execute(door, vm, f"kill -0 {int(pid)} 2>/dev/null || echo gone"))["stdout"] == "gone\n"
    again = await door.call("vm_job_cancel", vm_id=vm, job_id=answer["job_id"])
    assert again["state"] == "cancelled"


async def test_timeout_ends_what_the_shell_left_behind(door: Door, vm: str) -> None:
    command = "setsid sh -c 'echo $$ > tpid; exec sleep 3000' </dev/null >/dev/null 2>&1 & sleep 0.5; echo left"
    answer = await execute(door, vm, "rm -f tpid; " + command, timeout_seconds=6)
    assert (answer["state"], answer["stdout"]) == ("completed", "left\n")
    pid = int((await execute(door, vm, "cat tpid"))["stdout"])
    for _ in range(60):
        if (await execute(door, vm, f"kill -0 {pid} 2>/dev/null || echo gone"))["stdout"] == "gone\n":
            break
        await asyncio.sleep(0.5)
    else:
        pytest.fail("the detached process outlived the timeout of its job")


async def test_timeout_of_a_running_job_is_its_state(door: Door, vm: str) -> None:
    answer = await execute(door, vm, "echo before; sleep 3000", timeout_seconds=1)
    status = await finished(door, vm, answer["job_id"])
    assert status["state"] == "timed_out"
    page = await door.call("vm_job_output", vm_id=vm, job_id=answer["job_id"])
    assert page["stdout"] == "before\n"
    assert page["timed_out"] is True


async def test_fork_bomb_costs_only_its_job(door: Door, vm: str) -> None:
    bomb = await door.call("vm_exec", vm_id=vm, request_id=request_id(), command="b() { b | b & }; b; sleep 3000")
    await asyncio.sleep(2)
    cancelled = await door.call("vm_job_cancel", vm_id=vm, job_id=bomb["job_id"])
    assert cancelled["state"] in {"cancelled", "completed"}
    answer = await execute(door, vm, "echo still here")
    assert answer["stdout"] == "still here\n"


async def test_fifth_job_at_once_is_busy_and_says_which_are_running(door: Door, vm: str) -> None:
    jobs = [
        (await door.call("vm_exec", vm_id=vm, request_id=request_id(), command="sleep 3000"))["job_id"]
        for _ in range(4)
    ]
    fifth = request_id()
    try:
        with pytest.raises(ToolError) as refused:
            await door.call("vm_exec", vm_id=vm, request_id=fifth, command="true")
        assert refused.value.code == "busy"
        assert all(job in refused.value.message or job in str(refused.value.details) for job in jobs)
    finally:
        for job in jobs:
            await door.call("vm_job_cancel", vm_id=vm, job_id=job)
    answer = await door.call("vm_exec", vm_id=vm, request_id=fifth, command="true", wait_seconds=45)
    assert answer["exit_code"] == 0


async def test_repeated_request_finds_the_same_job_and_runs_nothing(door: Door, vm: str) -> None:
    key = request_id()
    await execute(door, vm, "rm -f once")
    first = await execute(door, vm, "echo x >> once; wc -l < once", request_id=key)
    again = await execute(door, vm, "echo x >> once; wc -l < once", request_id=key)
    assert (again["job_id"], again["stdout"]) == (first["job_id"], "1\n")
    jobs = (await door.call("vm_status", vm_id=vm))["jobs"]
    assert [job["request_id"] for job in jobs].count(key) == 1


async def test_environment_and_plain_shell_reach_the_command(door: Door, vm: str) -> None:
    await execute(door, vm, "echo 'echo BROKEN; exit 3' > ~/.bash_profile")
    try:
        broken = await execute(door, vm, "echo unreachable")
        assert broken["exit_code"] == 3
        plain = await execute(door, vm, 'echo "$A-$B"', env={"A": "1 2", "B": "ü"}, shell="plain")
        assert plain["stdout"] == "1 2-ü\n"
    finally:
        await execute(door, vm, "rm ~/.bash_profile", shell="plain")
