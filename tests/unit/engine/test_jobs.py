"""Jobs: places, receipts, lost answers, guests that refuse, fall silent, lie or flood; and what a restart keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.errors import (
    Busy,
    FailedPrecondition,
    InvalidArguments,
    NotFound,
    OutcomeUnknown,
    ResourceExhausted,
    Unavailable,
)
from microvm_mcp.model import JobId, JobRequest, JobState, ReceiptPhase, RequestId, VmId, VmState
from tests.support.engine_rig import CLAIM, OTHER, WORKSPACE, Rig, rig
from tests.support.world import SETTINGS, Guest, World


async def running(r: Rig) -> VmId:
    view = await r.create()
    assert view.vm.state is VmState.RUNNING
    return view.vm.vm_id


async def holds(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(2):
        while not condition():
            await asyncio.sleep(0.005)


async def phase(r: Rig, request_id: str) -> ReceiptPhase | None:
    receipt = await r.receipt(request_id)
    return None if receipt is None else receipt.phase


def state_of(r: Rig, job_id: JobId) -> JobState:
    return next(job.state for job in r.view().jobs if job.job_id == job_id)


async def test_a_short_command_costs_two_commits_and_one_round_trip(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        before = len(r.life.trace)
        job, page = await r.exec(vm_id, "a")
        assert (job.state, job.exit_code) == (JobState.COMPLETED, 0)
        assert page is not None
        assert page.stdout.data == b"true"
        assert r.life.trace[before:] == ["store.write", "link.start_job", "store.write"]
        assert await phase(r, "exec-a") is ReceiptPhase.DONE


async def test_a_long_command_is_recorded_before_its_end_is_waited_for(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        call = asyncio.create_task(r.exec(vm_id, "a", "sleep", wait_s=1.5))
        await holds(lambda: len(r.view().jobs) == 1)
        job_id = r.view().jobs[0].job_id
        async with asyncio.timeout(1):
            while await phase(r, "exec-a") is not ReceiptPhase.DONE:
                await asyncio.sleep(0.01)
        assert not call.done()
        r.world.only_guest().end_job(job_id, exit_code=3)
        job, page = await call
        assert (job.state, job.exit_code) == (JobState.COMPLETED, 3)
        assert page is not None
        assert page.report.exit_code == 3


async def test_the_end_of_a_job_shows_without_being_asked_for(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        assert r.view().awake_because == (f"job {job.job_id}",)
        r.world.only_guest().end_job(job.job_id, exit_code=7)
        await holds(lambda: state_of(r, job.job_id) is JobState.COMPLETED)
        assert r.view().jobs[0].exit_code == 7
        assert r.view().awake_because == ()


async def test_a_fifth_active_job_is_refused_naming_the_four(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        jobs = [(await r.exec(vm_id, str(n), "sleep", wait_s=0))[0] for n in range(4)]
        with pytest.raises(Busy) as refused:
            await r.exec(vm_id, "five")
        assert refused.value.details["active_jobs"] == sorted(job.job_id for job in jobs)
        assert await phase(r, "exec-five") is None
        r.world.only_guest().end_job(jobs[0].job_id)
        assert (await r.exec(vm_id, "five"))[0].state is JobState.COMPLETED


async def test_five_at_once_share_four_places(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        results = await asyncio.gather(
            *(r.exec(vm_id, str(n), "sleep", wait_s=0) for n in range(6)), return_exceptions=True
        )
        assert sum(isinstance(result, Busy) for result in results) == 2
        assert len(r.world.ran) == 4


async def test_a_further_job_displaces_the_oldest_finished_record_here_and_in_the_guest(tmp_path: Path) -> None:
    few = replace(SETTINGS, max_job_records=3)
    async with rig(tmp_path, settings=few) as r:
        vm_id = await running(r)
        ids = [(await r.exec(vm_id, str(n), "sleep" if n == 0 else "true", wait_s=0))[0].job_id for n in range(4)]
        assert [job.job_id for job in r.view().jobs] == [ids[0], ids[2], ids[3]]
        assert set(r.world.only_guest().jobs) == {ids[0], ids[2], ids[3]}
        with pytest.raises(NotFound):
            await r.fleet.job(WORKSPACE, vm_id, ids[1])


async def test_records_whose_processes_live_on_are_not_displaced(tmp_path: Path) -> None:
    few = replace(SETTINGS, max_job_records=1)
    async with rig(tmp_path, settings=few) as r:
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        guest = r.world.only_guest()
        guest.jobs[job.job_id].report = replace(guest.jobs[job.job_id].report, detached=2)
        guest.end_job(job.job_id)
        await holds(lambda: state_of(r, job.job_id) is JobState.COMPLETED)
        assert r.view().awake_because == (f"2 processes left running by job {job.job_id}",)
        with pytest.raises(ResourceExhausted):
            await r.exec(vm_id, "b")


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("invalid", InvalidArguments, "cwd"),
        ("not_found", InvalidArguments, "cwd"),
        ("busy", Busy, "as many jobs"),
        ("no_space", ResourceExhausted, "machine's own disk"),
        ("failed", FailedPrecondition, "could not start"),
        ("words nobody knows", FailedPrecondition, "could not start"),
    ],
)
async def test_a_refusal_takes_row_and_receipt_back_and_shows_no_words_of_the_guest(
    tmp_path: Path, code: str, error: type[Exception], words: str
) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        guest = r.world.only_guest()
        guest.refuses = code
        with pytest.raises(error, match=words) as refused:
            await r.exec(vm_id, "a")
        assert "script" not in str(refused.value)
        assert await phase(r, "exec-a") is None
        assert r.view().jobs == ()
        guest.refuses = None
        assert (await r.exec(vm_id, "a"))[0].state is JobState.COMPLETED


async def test_a_lost_answer_is_asked_for_again_and_the_command_runs_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        r.world.only_guest().losses = 2
        job, _ = await r.exec(vm_id, "a")
        assert job.state is JobState.COMPLETED
        assert r.world.ran == ["exec-a"]
        assert await phase(r, "exec-a") is ReceiptPhase.DONE


async def test_a_start_that_stays_unanswered_is_unknown_and_settled_by_a_later_report(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        guest = r.world.only_guest()
        guest.losses = 1000
        with pytest.raises(OutcomeUnknown):
            await r.exec(vm_id, "a", "sleep", wait_s=0)
        guest.losses = 0
        job, _ = await r.exec(vm_id, "a", "sleep")
        assert (job.state, r.world.ran) == (JobState.RUNNING, ["exec-a"])
        assert await phase(r, "exec-a") is ReceiptPhase.DONE


async def test_a_start_that_never_arrived_stays_unknown_for_its_request(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        guest = r.world.only_guest()
        guest.silent = True
        with pytest.raises(OutcomeUnknown):
            await r.exec(vm_id, "a", wait_s=0)
        guest.silent = False
        with pytest.raises(OutcomeUnknown):
            await r.exec(vm_id, "a", wait_s=0)
        assert r.world.ran == []
        assert [job.state for job in r.view().jobs] == [JobState.LOST]
        assert await phase(r, "exec-a") is ReceiptPhase.SENT
        assert (await r.exec(vm_id, "b"))[0].state is JobState.COMPLETED


async def test_a_start_that_was_never_sent_may_be_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        r.world.only_guest().unsent = 1000
        with pytest.raises(Unavailable):
            await r.exec(vm_id, "a")
        assert await phase(r, "exec-a") is None
        r.world.only_guest().unsent = 0
        assert (await r.exec(vm_id, "a"))[0].state is JobState.COMPLETED


async def test_two_calls_of_one_request_start_it_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        requests = [JobRequest(JobId(f"job-{n}"), RequestId("exec-a"), "true") for n in range(2)]
        results = await asyncio.gather(
            *(r.fleet.start_job(WORKSPACE, vm_id, one, CLAIM, wait_s=1) for one in requests), return_exceptions=True
        )
        assert sum(isinstance(result, Busy) for result in results) == 1
        assert r.world.ran == ["exec-a"]


async def test_a_caller_that_hangs_up_does_not_stop_its_command(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        call = asyncio.create_task(r.exec(vm_id, "a", "sleep", wait_s=1))
        await holds(lambda: bool(r.world.ran))
        call.cancel()
        await asyncio.wait({call})
        async with asyncio.timeout(2):
            while await phase(r, "exec-a") is not ReceiptPhase.DONE:
                await asyncio.sleep(0.01)
        assert r.view().jobs[0].state is JobState.RUNNING


async def test_work_waits_for_a_machine_that_is_being_created(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create(wait_s=0)).vm.vm_id
        assert r.view().vm.state is VmState.CREATING
        assert (await r.exec(vm_id, "a"))[0].state is JobState.COMPLETED


async def test_work_is_unavailable_while_a_creation_outlasts_the_call(tmp_path: Path) -> None:
    slow = replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, call_s=0.8, boot_hello_s=30))
    async with rig(tmp_path, World(new_guest=lambda: Guest(silent=True)), settings=slow) as r:
        vm_id = (await r.create(wait_s=0)).vm.vm_id
        with pytest.raises(Unavailable, match="still creating"):
            await r.exec(vm_id, "a")
        with pytest.raises(Unavailable, match="still creating"):
            await r.fleet.read_file(WORKSPACE, vm_id, "x", offset=0, length=1)
        assert await phase(r, "exec-a") is None
        await r.fleet.destroy(WORKSPACE, vm_id, wait_s=1)


async def test_output_and_cancel_of_a_foreign_job_are_not_found(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: r.fleet.cancel_job(OTHER, vm_id, job.job_id),
            lambda: r.fleet.cancel_job(WORKSPACE, vm_id, JobId("job-none")),
            lambda: r.fleet.job(OTHER, vm_id, job.job_id),
            lambda: r.fleet.job_output(OTHER, vm_id, job.job_id, stdout=0, stderr=0, limit=1, wait_s=0),
            lambda: r.fleet.resolve_job(OTHER, vm_id, job.job_id),
        ]
        for call in calls:
            with pytest.raises(NotFound):
                await call()
        assert state_of(r, job.job_id) is JobState.RUNNING


async def test_cancel_is_durable_and_repeatable(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        for _ in range(2):
            assert (await r.fleet.cancel_job(WORKSPACE, vm_id, job.job_id)).state is JobState.CANCELLED


async def test_output_that_tells_of_the_end_records_it_first(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        r.world.only_guest().end_job(job.job_id, exit_code=1)
        told, page = await r.fleet.job_output(WORKSPACE, vm_id, job.job_id, stdout=2, stderr=0, limit=99, wait_s=0)
        assert (told.state, told.exit_code) == (JobState.COMPLETED, 1)
        assert (page.stdout.offset, page.stdout.data) == (2, b"eep")


async def test_a_guest_that_falls_silent_costs_its_callers_bounded_time_and_nobody_else(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.create("other")
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        mute = next(process.guest for process in r.world.alive() if job.job_id in process.guest.jobs)
        mute.silent = True
        async with asyncio.timeout(2):
            with pytest.raises(Unavailable):
                await r.fleet.job_output(WORKSPACE, vm_id, job.job_id, stdout=0, stderr=0, limit=1, wait_s=0)
            with pytest.raises(OutcomeUnknown):
                await r.fleet.cancel_job(WORKSPACE, vm_id, job.job_id)
            with pytest.raises(OutcomeUnknown):
                await r.fleet.write_file(WORKSPACE, vm_id, "f", b"", offset=None, mode=None)
            with pytest.raises(Unavailable):
                await r.fleet.read_file(WORKSPACE, vm_id, "f", offset=0, length=1)
        assert (await r.exec(VmId("vm-other"), "b"))[0].state is JobState.COMPLETED
        assert r.view().vm.state is VmState.RUNNING
        mute.silent = False
        mute.end_job(job.job_id)
        await holds(lambda: state_of(r, job.job_id) is JobState.COMPLETED)


async def test_a_wait_for_the_end_stays_within_the_call_though_the_guest_falls_silent(tmp_path: Path) -> None:
    brief = replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, call_s=2.5))
    async with rig(tmp_path, settings=brief) as r:
        vm_id = await running(r)
        call = asyncio.create_task(r.exec(vm_id, "a", "sleep", wait_s=60))
        await holds(lambda: bool(r.world.ran))
        async with asyncio.timeout(2):
            while await phase(r, "exec-a") is not ReceiptPhase.DONE:
                await asyncio.sleep(0.01)
        r.world.only_guest().silent = True
        async with asyncio.timeout(2.9):
            job, page = await call
        assert job.state is JobState.RUNNING
        assert page is not None


async def test_a_lost_start_stays_unknown_through_restarts(tmp_path: Path) -> None:
    world = World()
    async with rig(tmp_path, world) as r:
        vm_id = await running(r)
        world.only_guest().silent = True
        with pytest.raises(OutcomeUnknown):
            await r.exec(vm_id, "a", wait_s=0)
    for _ in range(2):
        async with rig(tmp_path, world) as r:
            with pytest.raises(OutcomeUnknown):
                await r.exec(vm_id, "a", wait_s=0)
            assert [job.state for job in r.view().jobs] == [JobState.LOST]


async def test_a_guest_that_lies_is_ended_and_its_disk_kept(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.create("other")
        vm_id = await running(r)
        r.world.alive()[1].guest.lies = True
        with pytest.raises(OutcomeUnknown):
            await r.exec(vm_id, "a")
        await holds(lambda: r.view().vm.state is VmState.FAILED)
        await r.fleet.settle(WORKSPACE, vm_id, wait_s=2)
        assert [process.pid for process in r.world.alive()] == [r.view("other").vm.vmm_pid]
        assert set(r.world.disks) == {"vm-1", "vm-other"}
        assert (await r.exec(VmId("vm-other"), "b"))[0].state is JobState.COMPLETED


async def test_a_guest_that_reports_changes_without_end_does_not_occupy_the_store(tmp_path: Path) -> None:
    floody = replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, poll_pause_s=0.02))
    async with rig(tmp_path, settings=floody) as r:
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        guest = r.world.only_guest()
        before = r.life.trace.count("store.write")
        for number in range(200):
            guest.jobs[job.job_id].report = replace(guest.jobs[job.job_id].report, detached=number)
            guest.change()
            await asyncio.sleep(0.001)
        assert r.life.trace.count("store.write") - before < 10


async def test_reports_of_jobs_that_nobody_started_change_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        guest = r.world.only_guest()
        invented = replace(guest.jobs[job.job_id].report, job_id=JobId("job-invented"), request_id=RequestId("zzz"))
        guest.jobs[JobId("job-invented")] = replace(guest.jobs[job.job_id], report=invented)
        guest.change()
        await asyncio.sleep(0.05)
        assert [one.job_id for one in r.view().jobs] == [job.job_id]


async def test_a_job_that_the_supervisor_forgot_is_lost(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        guest = r.world.only_guest()
        guest.jobs.clear()
        guest.change()
        await holds(lambda: state_of(r, job.job_id) is JobState.LOST)
        told, page = await r.fleet.job_output(WORKSPACE, vm_id, job.job_id, stdout=0, stderr=0, limit=9, wait_s=0)
        assert (told.state, page.stdout.data, page.report.truncated) == (JobState.LOST, b"sleep", True)


async def test_a_restarted_service_adopts_the_machine_and_learns_what_its_jobs_did(tmp_path: Path) -> None:
    world = World()
    async with rig(tmp_path, world) as r:
        vm_id = await running(r)
        ended, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        going, _ = await r.exec(vm_id, "b", "sleep", wait_s=0)
    world.only_guest().end_job(ended.job_id, exit_code=4)
    async with rig(tmp_path, world) as r:
        jobs = {job.job_id: job for job in r.view().jobs}
        assert r.view().vm.state is VmState.RUNNING
        assert (jobs[ended.job_id].state, jobs[ended.job_id].exit_code) == (JobState.COMPLETED, 4)
        assert jobs[going.job_id].state is JobState.RUNNING
        assert (await r.exec(vm_id, "c"))[0].state is JobState.COMPLETED


async def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = await running(r)
        assert (await r.fleet.write_file(WORKSPACE, vm_id, "f", b"abc", offset=None, mode=None)).size == 3
        assert (await r.fleet.read_file(WORKSPACE, vm_id, "f", offset=1, length=9)).data == b"bc"
        with pytest.raises(NotFound):
            await r.fleet.read_file(WORKSPACE, vm_id, "none", offset=0, length=9)
