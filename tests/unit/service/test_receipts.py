"""Request ids: the same call twice takes effect once, whatever happened to the first answer."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator

import pytest

from microvm_mcp.errors import (
    Busy,
    Conflict,
    FailedPrecondition,
    Internal,
    NotFound,
    OutcomeUnknown,
    ResourceExhausted,
)
from microvm_mcp.model import JobId, Limits, Receipt, ReceiptPhase, RequestId, VmId
from microvm_mcp.service import receipts as service_receipts
from microvm_mcp.service.clock import SystemClock
from microvm_mcp.service.jsonschema import JsonObject
from microvm_mcp.service.receipts import key_of
from microvm_mcp.service.schemas import VmExec
from microvm_mcp.service.service import Service
from microvm_mcp.service.validation import parse
from microvm_mcp.store import receipts as rows
from tests.unit.service.conftest import ALICE, Rig, principal


async def receipt(rig: Rig, request_id: str) -> Receipt | None:
    return await rig.db.read(lambda tx: rows.get(tx, ALICE.workspace, RequestId(request_id)))


def digest(**arguments: object) -> str:
    parsed = parse(VmExec, {"vm_id": "v", "request_id": "r", "command": "c", **arguments}, {})
    return key_of(ALICE.workspace, "vm_exec", "r", parsed).digest


def exec_of(vm_id: str, command: str = "echo hi", request_id: str = "r", **more: object) -> dict[str, object]:
    return {"vm_id": vm_id, "request_id": request_id, "command": command, **more}


def test_defaults_count_as_if_written_and_waiting_does_not_count() -> None:
    assert digest() == digest(cwd=".", shell="login") == digest(wait_seconds=45)
    assert digest(request_id="other") == digest()
    assert digest(timeout_seconds=60.0) == digest(timeout_seconds=60)


@pytest.mark.parametrize(
    "change",
    [
        {"vm_id": "w"},
        {"command": "c "},
        {"cwd": "a"},
        {"shell": "plain"},
        {"timeout_seconds": 1},
        {"env": {}},
        {"env": {"A": "1"}},
        {"command": "é"},
    ],
)
def test_whatever_runs_differently_has_another_digest(change: dict[str, object]) -> None:
    assert digest(**change) != digest()


def test_the_order_of_the_environment_does_not_matter_and_its_content_does() -> None:
    assert digest(env={"A": "1", "B": "2"}) == digest(env={"B": "2", "A": "1"})
    assert digest(env={"A": "1", "B": "2"}) != digest(env={"A": "2", "B": "1"})


async def test_a_repeated_creation_answers_with_the_same_machine(rig: Rig) -> None:
    first = await rig.call("vm_create", {"request_id": "r"})
    again = await rig.call("vm_create", {"request_id": "r", "memory_mib": 1024.0, "network": "off"})
    assert again == first


async def test_a_replay_shows_the_present_state(rig: Rig) -> None:
    vm_id = (await rig.call("vm_create", {"request_id": "r"}))["vm_id"]
    await rig.call("vm_destroy", {"vm_id": vm_id})
    assert (await rig.call("vm_create", {"request_id": "r"}))["state"] == "destroyed"


async def test_a_repeated_command_runs_once_and_is_answered_alike(rig: Rig) -> None:
    vm_id = await rig.vm()
    first = await rig.call("vm_exec", exec_of(vm_id, wait_seconds=5))
    assert await rig.call("vm_exec", exec_of(vm_id, wait_seconds=5)) == first
    assert await rig.call("vm_exec", exec_of(vm_id)) == {"job_id": first["job_id"], "state": "completed"}
    assert rig.engine.commands == ["echo hi"]


async def test_repeating_a_running_command_joins_it_and_waits_for_its_end(rig: Rig) -> None:
    vm_id = await rig.vm()
    assert (await rig.call("vm_exec", exec_of(vm_id, "sleep 0.4")))["state"] == "running"
    joined = await rig.call("vm_exec", exec_of(vm_id, "sleep 0.4", wait_seconds=10))
    assert (joined["state"], joined["exit_code"]) == ("completed", 0)
    assert len(rig.engine.commands) == 1


async def test_joining_a_job_that_has_written_waits_for_its_end_too(rig: Rig) -> None:
    vm_id = await rig.vm()
    await rig.call("vm_exec", exec_of(vm_id, "drip 0.4"))
    joined = await rig.call("vm_exec", exec_of(vm_id, "drip 0.4", wait_seconds=10))
    assert (joined["state"], joined["stdout"]) == ("completed", "é")


async def test_a_replay_after_the_machine_has_gone_still_tells_how_the_job_ended(rig: Rig) -> None:
    vm_id = await rig.vm()
    job_id = (await rig.call("vm_exec", exec_of(vm_id, "exit 3", wait_seconds=5)))["job_id"]
    await rig.call("vm_destroy", {"vm_id": vm_id})
    again = await rig.call("vm_exec", exec_of(vm_id, "exit 3", wait_seconds=5))
    assert (again["job_id"], again["state"], again["exit_code"]) == (job_id, "completed", 3)


async def test_a_replay_after_the_record_was_displaced_says_so_and_does_not_run(rig: Rig) -> None:
    vm_id = await rig.vm()
    job_id = (await rig.call("vm_exec", exec_of(vm_id)))["job_id"]
    del rig.engine._vms[VmId(vm_id)].jobs[JobId(str(job_id))]
    with pytest.raises(NotFound, match="made room"):
        await rig.call("vm_exec", exec_of(vm_id))
    assert rig.engine.commands == ["echo hi"]


async def test_another_command_machine_or_tool_under_the_same_id_is_a_conflict(rig: Rig) -> None:
    vm_id, other = await rig.vm(), await rig.vm()
    await rig.call("vm_exec", exec_of(vm_id))
    for arguments in (exec_of(vm_id, "echo ho"), exec_of(other), exec_of(vm_id, env={"A": "1"})):
        with pytest.raises(Conflict):
            await rig.call("vm_exec", arguments)
    with pytest.raises(Conflict):
        await rig.call("vm_create", {"request_id": "r"})
    assert rig.engine.commands == ["echo hi"]


@pytest.fixture
async def held(rig: Rig) -> AsyncIterator[asyncio.Event]:
    """Jobs start when it is set; `rig.engine.commands` tells what has started."""
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    rig.engine.before_start = lambda: asyncio.ensure_future(wait())
    yield gate
    gate.set()


async def started(*calls: asyncio.Task[JsonObject]) -> None:
    """Until every call waits for something outside this loop or for the gate."""
    done, _ = await asyncio.wait(calls, timeout=0.2)
    assert not done


async def test_the_same_call_at_the_same_time_runs_once(rig: Rig, held: asyncio.Event) -> None:
    vm_id = await rig.vm()
    calls = [asyncio.create_task(rig.call("vm_exec", exec_of(vm_id, wait_seconds=5))) for _ in range(8)]
    await started(*calls)
    held.set()
    answers = await asyncio.gather(*calls)
    assert all(answer == answers[0] for answer in answers)
    assert rig.engine.commands == ["echo hi"]


async def test_another_call_with_an_id_in_progress_is_a_conflict_at_once(rig: Rig, held: asyncio.Event) -> None:
    vm_id = await rig.vm()
    first = asyncio.create_task(rig.call("vm_exec", exec_of(vm_id, wait_seconds=5)))
    await started(first)
    with pytest.raises(Conflict):
        await rig.call("vm_exec", exec_of(vm_id, "echo ho"))
    held.set()
    assert (await first)["stdout"] == "hi\n"


async def test_a_caller_that_hangs_up_half_does_nothing(rig: Rig, held: asyncio.Event) -> None:
    vm_id = await rig.vm()
    gone = asyncio.create_task(rig.call("vm_exec", exec_of(vm_id)))
    await started(gone)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    held.set()
    assert (await rig.call("vm_exec", exec_of(vm_id, wait_seconds=5)))["stdout"] == "hi\n"
    assert rig.engine.commands == ["echo hi"]


async def test_a_call_that_outlasts_its_budget_says_how_to_join_it(
    rig: Rig, held: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm_id = await rig.vm()
    monkeypatch.setattr("microvm_mcp.service.service.WORK_BUDGET_S", -0.9)  # with the grace, 0.1 s are left
    for _ in range(2):
        with pytest.raises(Busy, match="join") as caught:
            await rig.call("vm_exec", exec_of(vm_id))
        assert caught.value.retryable
    held.set()
    monkeypatch.undo()
    assert (await rig.call("vm_exec", exec_of(vm_id, wait_seconds=5)))["stdout"] == "hi\n"
    assert rig.engine.commands == ["echo hi"]


async def test_a_refusal_gives_the_id_back(rig: Rig) -> None:
    vm_id = await rig.vm()
    with pytest.raises(FailedPrecondition):
        await rig.call("vm_exec", exec_of(vm_id, "refuse"))
    assert await receipt(rig, "r") is None
    assert (await rig.call("vm_exec", exec_of(vm_id, wait_seconds=5)))["stdout"] == "hi\n"


async def test_a_refused_creation_can_be_repeated_smaller(rig: Rig) -> None:
    full = principal("alice", limits=Limits(max_vms=0))
    with pytest.raises(ResourceExhausted):
        await rig.call("vm_create", {"request_id": "r"}, full)
    assert (await rig.call("vm_create", {"request_id": "r", "memory_mib": 512}))["state"] == "running"


async def test_a_waiter_on_a_refused_call_tries_itself(rig: Rig, held: asyncio.Event) -> None:
    vm_id = await rig.vm()
    calls = [asyncio.create_task(rig.call("vm_exec", exec_of(vm_id, "refuse"))) for _ in range(3)]
    await started(*calls)
    held.set()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, FailedPrecondition) for error in errors)


async def test_a_call_cut_off_before_it_took_effect_leaves_its_id_free(rig: Rig, held: asyncio.Event) -> None:
    vm_id = await rig.vm()
    call = asyncio.create_task(rig.call("vm_exec", exec_of(vm_id)))
    await started(call)
    await rig.service.close(wait_s=0)
    with pytest.raises(Busy):
        await call
    held.set()
    later = Service(rig.db, rig.engine, rig.service.settings, SystemClock())
    assert (await later.invoke("vm_exec", exec_of(vm_id, "echo ho", wait_seconds=5), ALICE))["stdout"] == "ho\n"
    assert rig.engine.commands == ["echo ho"]


async def test_two_services_on_one_store_run_a_request_once(rig: Rig, held: asyncio.Event) -> None:
    vm_id = await rig.vm()
    other = Service(rig.db, rig.engine, rig.service.settings, SystemClock())
    calls = [
        asyncio.create_task(service.invoke("vm_exec", exec_of(vm_id, wait_seconds=5), ALICE))
        for service in (rig.service, other)
    ]
    await started(*calls)
    held.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(answer, Busy) for answer in answers) == 1
    assert rig.engine.commands == ["echo hi"]


async def test_a_lost_answer_is_unknown_for_good_and_points_at_the_jobs(rig: Rig) -> None:
    vm_id = await rig.vm()
    for _ in range(3):
        with pytest.raises(OutcomeUnknown, match=r"vm_status\.jobs") as caught:
            await rig.call("vm_exec", exec_of(vm_id, "lose"))
        assert caught.value.details["vm_id"] == vm_id
        assert str(caught.value.details["job_id"]).startswith("job-")
        assert not caught.value.retryable
    left = await receipt(rig, "r")
    assert left is not None
    assert left.phase is ReceiptPhase.SENT
    with pytest.raises(Conflict):
        await rig.call("vm_exec", exec_of(vm_id, "echo ho"))
    assert rig.engine.commands == []


async def test_a_lost_answer_is_found_when_the_machine_knows_the_job(rig: Rig) -> None:
    vm_id = await rig.vm()
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.call("vm_exec", exec_of(vm_id, "lose-but-run"))
    found = await rig.call("vm_exec", exec_of(vm_id, "lose-but-run", wait_seconds=5))
    assert found["job_id"] == caught.value.details["job_id"]
    assert found["state"] == "completed"
    assert rig.engine.commands == ["lose-but-run"]
    left = await receipt(rig, "r")
    assert left is not None
    assert left.phase is ReceiptPhase.DONE


async def test_an_unforeseen_error_before_anything_was_sent_tells_nothing_and_leaves_the_id_free(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    vm_id = await rig.vm()
    with pytest.raises(Internal) as caught:
        await rig.call("vm_exec", exec_of(vm_id, "crash"))
    assert "secret" not in str(caught.value.body())
    assert caplog.text.count("RuntimeError: a fault with a secret in it") == 1
    assert await receipt(rig, "r") is None


async def test_4096_recent_ids_leave_no_room_and_old_ones_go(rig: Rig) -> None:
    now = time.time()
    recent = [
        Receipt(ALICE.workspace, RequestId(f"old-{n}"), "vm_exec", "0" * 64, ReceiptPhase.DONE, now, now)
        for n in range(4096)
    ]

    def fill(tx: sqlite3.Connection) -> None:
        for row in recent:
            rows.insert(tx, row)

    await rig.db.write(fill)
    with pytest.raises(ResourceExhausted, match="4096"):
        await rig.call("vm_create", {"request_id": "r"})
    await rig.db.write(lambda tx: tx.execute("UPDATE receipts SET finished_at = 1 WHERE request_id = 'old-7'"))
    await rig.call("vm_create", {"request_id": "r"})
    assert await receipt(rig, "old-7") is None
    assert await receipt(rig, "old-8") is not None


async def test_calls_in_progress_are_bounded_per_workspace(
    rig: Rig, held: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_receipts, "MAX_ATTEMPTS", 2)
    vm_id = await rig.vm()
    calls = [asyncio.create_task(rig.call("vm_exec", exec_of(vm_id, request_id=f"r{n}"))) for n in range(2)]
    await started(*calls)
    with pytest.raises(Busy, match="in progress"):
        await rig.call("vm_exec", exec_of(vm_id, request_id="r2"))
    held.set()
    await asyncio.gather(*calls)
    await rig.call("vm_exec", exec_of(vm_id, request_id="r2"))


async def test_closing_waits_for_what_is_in_progress_and_then_cuts_it_off(rig: Rig, held: asyncio.Event) -> None:
    vm_id = await rig.vm()
    call = asyncio.create_task(rig.call("vm_exec", exec_of(vm_id)))
    await started(call)
    await rig.service.close(wait_s=0.05)
    with pytest.raises(Busy, match="stopping"):
        await call
    assert await receipt(rig, "r") is None


async def test_receipts_outlive_the_service(rig: Rig) -> None:
    vm_id = await rig.vm()
    first = await rig.call("vm_exec", exec_of(vm_id, wait_seconds=5))
    later = Service(rig.db, rig.engine, rig.service.settings, SystemClock())
    assert await later.invoke("vm_exec", exec_of(vm_id, wait_seconds=5), ALICE) == first
    assert rig.engine.commands == ["echo hi"]
