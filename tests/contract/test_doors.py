"""Every behaviour over every door: one fixture puts the same service behind HTTP and each mode of MCP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from microvm_mcp.service.catalog import TOOLS
from tests.support.door_rig import ALICE, BOB, DOORS, DoorName, JsonDict, Rig, rig


@pytest.fixture(params=DOORS)
async def behind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    door: DoorName = request.param
    async with rig(tmp_path, door) as made:
        yield made


async def test_create_run_and_read_ends_with_the_commands_output(behind: Rig) -> None:
    vm_id = await behind.vm()
    run = await behind.call(
        "vm_exec", {"vm_id": vm_id, "request_id": "run-1", "command": "echo Grüße 🙂", "wait_seconds": 5}
    )
    assert (run.error_code, run.body["stdout"], run.body["exit_code"]) == (None, "Grüße 🙂\n", 0)
    again = await behind.call("vm_job_output", {"vm_id": vm_id, "job_id": run.body["job_id"]})
    assert again.body["stdout"] == "Grüße 🙂\n"


async def test_every_tool_answers_its_success_in_the_shape_it_advertises(behind: Rig) -> None:
    vm_id = await behind.vm()
    target: JsonDict = {"vm_id": vm_id}
    job = (await behind.call("vm_exec", {**target, "request_id": "r1", "command": "sleep 60"})).body["job_id"]
    content = base64.b64encode(b"\x00\xffdata").decode()
    calls: dict[str, JsonDict] = {
        "vm_create": {"request_id": "make"},
        "vm_list": {},
        "vm_status": target,
        "vm_exec": {**target, "request_id": "r2", "command": "echo x", "wait_seconds": 1},
        "vm_job_status": {**target, "job_id": job},
        "vm_job_output": {**target, "job_id": job, "encoding": "base64"},
        "vm_job_cancel": {**target, "job_id": job},
        "vm_write_file": {**target, "path": "f.bin", "content_base64": content},
        "vm_read_file": {**target, "path": "f.bin"},
        "vm_suspend": target,
        "vm_resume": target,
        "vm_destroy": target,
    }
    assert set(calls) == {tool.name for tool in TOOLS}
    for tool, arguments in calls.items():
        answer = await behind.call(tool, arguments)
        expected = "failed_precondition" if tool in {"vm_suspend", "vm_resume"} else None
        assert answer.error_code == expected, answer.text


BAD: list[tuple[str, JsonDict, str]] = [
    ("vm_create", {}, "invalid_arguments"),
    ("vm_create", {"request_id": "bad id SECRET"}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "memory_mib": 1}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "memory_mib": "1024"}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "memory_mib": 1024.5}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "vcpus": True}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "name": None}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "workspace": "bob"}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "token": "SECRET"}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "SECRET": 1}, "invalid_arguments"),
    ("vm_create", {"request_id": "a", "template": "t"}, "failed_precondition"),
    ("vm_list", {"limit": 0}, "invalid_arguments"),
    ("vm_status", {"vm_id": "vm-SECRET"}, "not_found"),
    ("vm_status", {"vm_id": ["SECRET"]}, "invalid_arguments"),
    ("vm_exec", {"vm_id": "vm-x", "request_id": "a", "command": "x" * 65_537}, "too_large"),
    ("vm_exec", {"vm_id": "vm-x", "request_id": "a", "command": "a\x00b"}, "invalid_arguments"),
    ("vm_write_file", {"vm_id": "vm-x", "path": "f", "content_base64": "SECRET!"}, "invalid_arguments"),
    ("vm_read_file", {"vm_id": "vm-x", "path": "../SECRET"}, "invalid_arguments"),
    ("vm_no_such_tool", {}, "not_found"),
]


@pytest.mark.parametrize(("tool", "arguments", "code"), BAD)
async def test_bad_calls_get_their_code_without_echo(
    behind: Rig, tool: str, arguments: JsonDict, code: str
) -> None:
    answer = await behind.call(tool, arguments)
    assert answer.error_code == code, answer.text
    if tool != "vm_create" or "SECRET" not in arguments:
        assert "SECRET" not in answer.text


async def test_the_text_of_every_door_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    texts: dict[str, list[str]] = {}
    for number, door in enumerate(DOORS):
        directory = tmp_path / str(number)
        directory.mkdir()
        async with rig(directory, door) as behind:
            texts[door] = [(await behind.call(tool, arguments)).text for tool, arguments, _ in BAD[:-1]]
            texts[door].append((await behind.call("vm_list", {})).text)
    assert len({tuple(one) for one in texts.values()}) == 1


async def test_a_foreign_machine_and_an_unknown_one_are_the_same_miss(behind: Rig) -> None:
    vm_id = await behind.vm()
    foreign = await behind.call("vm_status", {"vm_id": vm_id}, BOB)
    unknown = await behind.call("vm_status", {"vm_id": "vm-aaaaaaaaaaaaaaaaaaaa"}, BOB)
    assert (foreign.error_code, foreign.body) == ("not_found", unknown.body)
    assert (await behind.call("vm_list", {}, BOB)).body["vms"] == []


async def test_a_repeated_request_id_runs_once_and_with_other_arguments_is_a_conflict(behind: Rig) -> None:
    vm_id = await behind.vm()
    run: JsonDict = {"vm_id": vm_id, "request_id": "once", "command": "echo once", "wait_seconds": 1}
    first, second = await behind.call("vm_exec", run), await behind.call("vm_exec", run)
    assert first.body["job_id"] == second.body["job_id"]
    assert behind.engine.commands == ["echo once"]
    assert (await behind.call("vm_exec", {**run, "command": "echo twice"})).error_code == "conflict"


async def test_an_integral_float_is_an_integer(behind: Rig) -> None:
    answer = await behind.call("vm_create", {"request_id": "f", "memory_mib": 2048.0})
    assert (answer.error_code, answer.body["memory_mib"]) == (None, 2048)


async def test_a_bug_below_is_internal_without_detail(behind: Rig, caplog: pytest.LogCaptureFixture) -> None:
    vm_id = await behind.vm()
    answer = await behind.call("vm_exec", {"vm_id": vm_id, "request_id": "r", "command": "crash"})
    assert answer.error_code == "internal"
    assert "Traceback" not in answer.text
    assert "Traceback" in caplog.text


async def test_a_caller_that_goes_away_half_does_nothing(behind: Rig) -> None:
    """The call is cut off while the engine holds it; it ends by itself and its receipt has the answer."""
    vm_id = await behind.vm()
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    entered = asyncio.Event()

    def hold() -> asyncio.Future[None]:
        entered.set()
        return gate

    behind.engine.before_start = hold
    run: JsonDict = {"vm_id": vm_id, "request_id": "cut", "command": "echo whole", "wait_seconds": 1}
    caller = asyncio.create_task(behind.call("vm_exec", run))
    await asyncio.wait_for(entered.wait(), 10)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    behind.engine.before_start = None
    gate.set_result(None)
    again = await behind.call("vm_exec", run, ALICE)
    assert (again.error_code, again.body["stdout"]) == (None, "whole\n")
    assert behind.engine.commands == ["echo whole"]
