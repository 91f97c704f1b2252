"""Every tool over the fake engine: what comes back has the promised shape and content."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from typing import cast

import jsonschema  # type: ignore[import-untyped]
import pytest

from microvm_mcp.errors import (
    Busy,
    Conflict,
    FailedPrecondition,
    InvalidArguments,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from microvm_mcp.model import Failure, Limits, VmId, VmState
from microvm_mcp.service import catalog
from microvm_mcp.service.jsonschema import JsonObject
from tests.unit.service.conftest import ALICE, BOB, Rig, principal

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


async def run(rig: Rig, vm_id: str, command: str, *, wait: int = 5, request_id: str = "") -> JsonObject:
    rig.made += 1
    arguments = {"vm_id": vm_id, "request_id": request_id or f"run-{rig.made}", "command": command}
    return await rig.call("vm_exec", {**arguments, "wait_seconds": wait})


async def test_a_created_machine_is_described_in_full(rig: Rig) -> None:
    created = await rig.call(
        "vm_create", {"request_id": "r", "memory_mib": 2048, "vcpus": 1, "disk_gib": 8, "name": "build"}
    )
    assert re.fullmatch(r"vm-[a-z2-7]{20}", str(created["vm_id"]))
    assert TIME.fullmatch(str(created["created_at"]))
    expected = {"state": "running", "started": "cold", "name": "build", "memory_mib": 2048, "vcpus": 1}
    assert {**created, **expected, "disk_gib": 8, "network": "off", "failure": None} == created
    assert "boots" in str(created["reason"])


async def test_without_disk_gib_the_image_decides(rig: Rig) -> None:
    created = await rig.call("vm_create", {"request_id": "r"})
    assert created["disk_gib"] == 3
    assert created["name"] is None


async def test_a_slow_boot_answers_creating_and_the_same_call_joins_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microvm_mcp.service.service.WORK_BUDGET_S", 0.1)
    rig.engine.boot_s = 0.25
    seen = [(await rig.call("vm_create", {"request_id": "r"})) for _ in range(4)]
    states = [answer["state"] for answer in seen]
    assert states[0] == "creating"
    assert states[-1] == "running"
    assert len({str(answer["vm_id"]) for answer in seen}) == 1


async def test_network_is_permission_first_then_not_yet(rig: Rig) -> None:
    with pytest.raises(PermissionDenied):
        await rig.call("vm_create", {"request_id": "r", "network": "on"}, ALICE)
    with pytest.raises(FailedPrecondition, match="later version"):
        await rig.call("vm_create", {"request_id": "r", "network": "on"}, BOB)
    assert (await rig.call("vm_create", {"request_id": "r", "network": "off"}, BOB))["network"] == "off"


async def test_the_quota_is_refused_with_numbers(rig: Rig) -> None:
    small = principal("alice", limits=Limits(max_vms=1))
    await rig.vm(small)
    with pytest.raises(ResourceExhausted) as caught:
        await rig.vm(small)
    assert caught.value.details == {"max_vms": 1}


async def test_a_taken_name_is_a_conflict(rig: Rig) -> None:
    await rig.call("vm_create", {"request_id": "a", "name": "n"})
    with pytest.raises(Conflict):
        await rig.call("vm_create", {"request_id": "b", "name": "n"})
    await rig.call("vm_create", {"request_id": "b", "name": "n"}, BOB)


async def test_a_listing_is_walked_by_its_cursor(rig: Rig) -> None:
    made = [await rig.vm() for _ in range(5)]
    await rig.vm(BOB)
    seen: list[str] = []
    arguments: dict[str, object] = {"limit": 2}
    for _ in range(3):
        page = await rig.call("vm_list", arguments)
        rows = cast("list[JsonObject]", page["vms"])
        seen += [str(row["vm_id"]) for row in rows]
        arguments["cursor"] = page["next_cursor"]
    assert seen == made
    assert page["next_cursor"] is None


async def test_a_forged_cursor_is_refused_by_field(rig: Rig) -> None:
    await rig.vm()
    bobs = await rig.vm(BOB)
    forged = base64.urlsafe_b64encode(bobs.encode()).decode().rstrip("=")
    unknown = base64.urlsafe_b64encode(b"vm-" + b"a" * 20).decode().rstrip("=")
    messages = set()
    for cursor in ("", "x", "é", "AAAA", "vm-" + "a" * 20, "a" * 10_000, forged, unknown):
        with pytest.raises(InvalidArguments) as caught:
            await rig.call("vm_list", {"cursor": cursor})
        messages.add(caught.value.message)
    assert len(messages) == 1


async def test_status_shows_jobs_newest_first_with_what_finds_them(rig: Rig) -> None:
    vm_id = await rig.vm()
    await run(rig, vm_id, "echo one", request_id="first")
    await run(rig, vm_id, "sleep 100", wait=0, request_id="second")
    status = await rig.call("vm_status", {"vm_id": vm_id})
    rows = cast("list[JsonObject]", status["jobs"])
    assert [(row["request_id"], row["state"], row["exit_code"]) for row in rows] == [
        ("second", "running", None),
        ("first", "completed", 0),
    ]
    assert set(rows[0]) == {
        "job_id", "request_id", "state", "frozen", "exit_code", "started_at", "finished_at", "truncated",
    }  # fmt: skip
    assert status["awake_because"] == ["1 jobs"]
    assert status["outdated"] is False
    assert status["template"] is None
    jsonschema.validate(status, catalog.BY_NAME["vm_status"].output_schema)


async def test_a_failure_says_what_is_lost_and_jobs_of_a_sleeper_are_frozen(rig: Rig) -> None:
    vm_id = await rig.vm()
    await run(rig, vm_id, "sleep 100", wait=0)
    machine = rig.engine._vms[VmId(vm_id)]
    machine.vm = replace(machine.vm, state=VmState.PAUSED)
    status = await rig.call("vm_status", {"vm_id": vm_id})
    assert [row["frozen"] for row in cast("list[JsonObject]", status["jobs"])] == [True]
    failure = Failure(at=1.5, reason="the guest panicked", lost="memory; the disk is kept", cold_boot_possible=True)
    machine.vm = replace(machine.vm, state=VmState.FAILED, failure=failure)
    status = await rig.call("vm_status", {"vm_id": vm_id})
    assert status["failure"] == {
        "at": "1970-01-01T00:00:01.500Z",
        "reason": "the guest panicked",
        "lost": "memory; the disk is kept",
        "cold_boot_possible": True,
    }
    jsonschema.validate(status, catalog.BY_NAME["vm_status"].output_schema)


async def test_a_waited_command_answers_with_output_and_exit_code(rig: Rig) -> None:
    vm_id = await rig.vm()
    ran = await run(rig, vm_id, "echo hello")
    assert (ran["stdout"], ran["stderr"], ran["exit_code"], ran["state"]) == ("hello\n", "", 0, "completed")
    assert ran["next_cursor"] == {"stdout": 6, "stderr": 0}
    assert (await run(rig, vm_id, "exit 7"))["exit_code"] == 7
    assert (await run(rig, vm_id, "err oops"))["stderr"] == "oops\n"
    jsonschema.validate(ran, catalog.BY_NAME["vm_exec"].output_schema)


async def test_without_waiting_only_the_handle_comes_back(rig: Rig) -> None:
    started = await run(rig, await rig.vm(), "sleep 100", wait=0)
    assert set(started) == {"job_id", "state"}
    assert started["state"] == "running"
    assert re.fullmatch(r"job-[a-z2-7]{20}", str(started["job_id"]))


async def test_a_wait_that_ends_first_answers_running(rig: Rig) -> None:
    ran = await run(rig, await rig.vm(), "sleep 100", wait=1)
    assert (ran["state"], ran["exit_code"]) == ("running", None)


async def test_five_jobs_at_once_are_busy(rig: Rig) -> None:
    vm_id = await rig.vm()
    for _ in range(4):
        await run(rig, vm_id, "sleep 100", wait=0)
    with pytest.raises(Busy):
        await run(rig, vm_id, "sleep 100", wait=0)


async def test_a_timeout_beyond_the_hosts_limit_is_refused_by_field(rig: Rig) -> None:
    arguments = {"vm_id": await rig.vm(), "request_id": "r", "command": "true"}
    with pytest.raises(InvalidArguments, match="86400") as caught:
        await rig.call("vm_exec", {**arguments, "timeout_seconds": 86_401})
    assert "timeout_seconds" in str(caught.value.details)
    await rig.call("vm_exec", {**arguments, "timeout_seconds": 86_400})


async def test_job_status_has_every_field(rig: Rig) -> None:
    vm_id = await rig.vm()
    job_id = (await run(rig, vm_id, "exit 3"))["job_id"]
    status = await rig.call("vm_job_status", {"vm_id": vm_id, "job_id": job_id})
    assert (status["state"], status["exit_code"], status["signal"]) == ("completed", 3, None)
    assert status["frozen"] is False
    assert TIME.fullmatch(str(status["started_at"]))
    assert TIME.fullmatch(str(status["finished_at"]))
    jsonschema.validate(status, catalog.BY_NAME["vm_job_status"].output_schema)


async def test_cancel_ends_the_job_and_repeating_is_harmless(rig: Rig) -> None:
    vm_id = await rig.vm()
    job = {"vm_id": vm_id, "job_id": (await run(rig, vm_id, "sleep 100", wait=0))["job_id"]}
    for _ in range(2):
        status = await rig.call("vm_job_cancel", job)
        assert (status["state"], status["signal"]) == ("cancelled", 9)
    output = await rig.call("vm_job_output", job)
    assert (output["state"], output["timed_out"]) == ("cancelled", False)


async def test_pages_of_a_flood_add_up_with_their_gap(rig: Rig) -> None:
    vm_id = await rig.vm()
    total = 300_000
    job = {"vm_id": vm_id, "job_id": (await run(rig, vm_id, f"flood {total}"))["job_id"]}
    whole = "".join(chr(ord("a") + index % 26) for index in range(total))
    cursor: object = {}
    seen = 0
    while True:
        page = await rig.call("vm_job_output", {**job, "cursor": cursor})
        following = cast("JsonObject", page["next_cursor"])
        text = str(page["stdout"])
        if following == cursor:
            break
        end = cast("int", following["stdout"])
        assert whole[end - len(text) : end] == text
        assert len(text) <= 16 * 1024
        seen += len(text)
        cursor = following
    omitted = cast("JsonObject", cast("JsonObject", page["omitted"])["stdout"])
    assert omitted == {"from": 65536, "bytes": total - 2 * 65536}
    assert seen + cast("int", omitted["bytes"]) == total
    assert page["truncated"] is True


async def test_a_cursor_past_the_end_is_refused_and_one_at_the_end_is_not(rig: Rig) -> None:
    vm_id = await rig.vm()
    job = {"vm_id": vm_id, "job_id": (await run(rig, vm_id, "echo hello"))["job_id"]}
    at_end = await rig.call("vm_job_output", {**job, "cursor": {"stdout": 6}})
    assert (at_end["stdout"], at_end["next_cursor"]) == ("", {"stdout": 6, "stderr": 0})
    with pytest.raises(InvalidArguments, match=r"cursor\.stdout"):
        await rig.call("vm_job_output", {**job, "cursor": {"stdout": 7}})
    with pytest.raises(InvalidArguments, match=r"cursor\.stderr"):
        await rig.call("vm_job_output", {**job, "cursor": {"stderr": 1}})


async def test_binary_output_comes_as_base64(rig: Rig) -> None:
    vm_id = await rig.vm()
    job = {"vm_id": vm_id, "job_id": (await run(rig, vm_id, "bytes 00ff80efbfbd41"))["job_id"]}
    page = await rig.call("vm_job_output", {**job, "encoding": "base64"})
    assert base64.b64decode(str(page["stdout_base64"])) == bytes.fromhex("00ff80efbfbd41")
    assert "stdout" not in page
    assert "decoding_errors" not in page
    jsonschema.validate(page, catalog.BY_NAME["vm_job_output"].output_schema)
    text = await rig.call("vm_job_output", job)
    assert text["stdout"] == "\0\ufffd\ufffd\ufffdA"
    assert text["decoding_errors"] == {"stdout": 2, "stderr": 0}
    jsonschema.validate(text, catalog.BY_NAME["vm_job_output"].output_schema)


async def test_a_wait_is_not_ended_by_half_a_character(rig: Rig) -> None:
    vm_id = await rig.vm()
    job = {"vm_id": vm_id, "job_id": (await run(rig, vm_id, "drip 0.3", wait=0))["job_id"]}
    page = await rig.call("vm_job_output", job)
    assert (page["stdout"], page["next_cursor"]) == ("", {"stdout": 0, "stderr": 0})
    page = await rig.call("vm_job_output", {**job, "wait_seconds": 10})
    assert (page["stdout"], page["state"]) == ("é", "completed")


async def test_a_wait_for_output_ends_with_the_job(rig: Rig) -> None:
    vm_id = await rig.vm()
    job = {"vm_id": vm_id, "job_id": (await run(rig, vm_id, "sleep 0.2", wait=0))["job_id"]}
    page = await rig.call("vm_job_output", {**job, "wait_seconds": 10})
    assert (page["state"], page["exit_code"]) == ("completed", 0)


async def test_files_go_in_and_come_out_in_parts(rig: Rig) -> None:
    file = {"vm_id": await rig.vm(), "path": "a/b.bin"}
    first, second = bytes(range(256)) * 512, b"tail"
    stored = await rig.call(
        "vm_write_file", {**file, "content_base64": base64.b64encode(first).decode(), "mode": "600"}
    )
    assert stored == {"size": 131072, "mode": "0600"}
    more = {**file, "content_base64": base64.b64encode(second).decode(), "offset": 131072}
    assert (await rig.call("vm_write_file", more))["size"] == 131076
    with pytest.raises(Conflict):
        await rig.call("vm_write_file", more)
    page = await rig.call("vm_read_file", file)
    assert (page["offset"], page["next_offset"], page["eof"], page["size"]) == (0, 131072, False, 131076)
    assert base64.b64decode(str(page["content_base64"])) == first
    page = await rig.call("vm_read_file", {**file, "offset": page["next_offset"], "length": 4})
    assert (page["next_offset"], page["eof"], page["mode"]) == (131076, True, "0600")
    assert base64.b64decode(str(page["content_base64"])) == second
    jsonschema.validate(page, catalog.BY_NAME["vm_read_file"].output_schema)


async def test_absolute_paths_must_lie_under_the_workspace_to_be_written(rig: Rig) -> None:
    vm_id = await rig.vm()
    for path in ("/etc/passwd", "/workspace", "/", "/workspacex/f"):
        with pytest.raises(InvalidArguments, match="workspace"):
            await rig.call("vm_write_file", {"vm_id": vm_id, "path": path, "content_base64": ""})
    await rig.call("vm_write_file", {"vm_id": vm_id, "path": "/workspace/f", "content_base64": ""})
    with pytest.raises(NotFound):
        await rig.call("vm_read_file", {"vm_id": vm_id, "path": "absent"})


@pytest.mark.parametrize("name", ["vm_suspend", "vm_resume"])
async def test_sleeping_arrives_later_and_says_so(rig: Rig, name: str) -> None:
    with pytest.raises(FailedPrecondition, match="later version"):
        await rig.call(name, {"vm_id": await rig.vm()})


async def test_destroy_is_idempotent_and_takes_the_machine_off_the_list(rig: Rig) -> None:
    vm_id = await rig.vm()
    for _ in range(2):
        assert await rig.call("vm_destroy", {"vm_id": vm_id}) == {"vm_id": vm_id, "state": "destroyed"}
    assert (await rig.call("vm_list", {}))["vms"] == []
    assert (await rig.call("vm_status", {"vm_id": vm_id}))["state"] == "destroyed"
    with pytest.raises(FailedPrecondition):
        await run(rig, vm_id, "true")
