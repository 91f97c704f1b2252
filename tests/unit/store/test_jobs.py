from __future__ import annotations

from dataclasses import replace

import pytest

from microvm_mcp.model import JobId, JobState, Vm
from microvm_mcp.store import jobs
from microvm_mcp.store.database import Database
from tests.unit.store.rows import DEMO, OTHER, a_job, add_job, add_vm, add_workspaces


@pytest.fixture
async def vm(db: Database) -> Vm:
    await db.write(add_workspaces)
    return await db.write(lambda tx: add_vm(tx, 1))


async def test_a_row_comes_back_as_it_went_in_and_as_it_was_updated(db: Database, vm: Vm) -> None:
    job = replace(a_job(1, vm), timeout_seconds=60, log_path="/run/x.log")
    await db.write(lambda tx: jobs.insert(tx, job))
    assert await db.read(lambda tx: jobs.get_owned(tx, DEMO, vm.vm_id, job.job_id)) == job
    over = replace(
        job, state=JobState.COMPLETED, finished_at=9.5, exit_code=143, signal=15, truncated=True, detached=2
    )
    assert await db.write(lambda tx: jobs.update(tx, over))
    assert await db.read(lambda tx: jobs.of_vm(tx, vm.vm_id)) == [over]


async def test_foreign_workspace_foreign_machine_and_unknown_job_are_the_same_miss(db: Database, vm: Vm) -> None:
    job = await db.write(lambda tx: add_job(tx, 1, vm))
    other = await db.write(lambda tx: add_vm(tx, 2))
    assert await db.read(lambda tx: jobs.get_owned(tx, OTHER, vm.vm_id, job.job_id)) is None
    assert await db.read(lambda tx: jobs.get_owned(tx, DEMO, other.vm_id, job.job_id)) is None
    assert await db.read(lambda tx: jobs.get_owned(tx, DEMO, vm.vm_id, JobId("job-unknown"))) is None


async def test_an_update_of_a_displaced_row_does_not_bring_it_back(db: Database, vm: Vm) -> None:
    job = await db.write(lambda tx: add_job(tx, 1, vm))
    await db.write(lambda tx: jobs.delete(tx, job.job_id))
    assert not await db.write(lambda tx: jobs.update(tx, job))
    assert await db.read(lambda tx: jobs.count(tx, vm.vm_id)) == 0


async def test_jobs_are_listed_in_the_order_in_which_they_were_recorded(db: Database, vm: Vm) -> None:
    await db.write(lambda tx: [add_job(tx, number, vm) for number in (3, 1, 2)])
    listed = await db.read(lambda tx: jobs.of_vm(tx, vm.vm_id))
    assert [job.job_id for job in listed] == [a_job(number, vm).job_id for number in (3, 1, 2)]
    assert await db.read(lambda tx: jobs.count(tx, vm.vm_id)) == 3


async def test_lost_memory_loses_running_jobs_and_detached_processes_of_this_machine_only(
    db: Database, vm: Vm
) -> None:
    other = await db.write(lambda tx: add_vm(tx, 2))
    over = replace(a_job(3, vm, state=JobState.COMPLETED), detached=2, exit_code=0, finished_at=7.0)
    await db.write(lambda tx: jobs.insert(tx, over))
    await db.write(lambda tx: [add_job(tx, 1, vm), add_job(tx, 2, other), add_job(tx, 4, vm)])
    lost = await db.write(lambda tx: jobs.mark_lost(tx, vm.vm_id, 50.0))
    assert {(job.job_id, job.state, job.finished_at) for job in lost} == {
        (a_job(1, vm).job_id, JobState.LOST, 50.0),
        (a_job(4, vm).job_id, JobState.LOST, 50.0),
    }
    finished = await db.read(lambda tx: jobs.get_owned(tx, DEMO, vm.vm_id, a_job(3, vm).job_id))
    assert finished is not None
    assert (finished.state, finished.detached, finished.finished_at) == (JobState.COMPLETED, 0, 7.0)
    assert [job.state for job in await db.read(lambda tx: jobs.of_vm(tx, other.vm_id))] == [JobState.RUNNING]
    assert await db.write(lambda tx: jobs.mark_lost(tx, vm.vm_id, 60.0)) == []


async def test_a_job_of_an_unknown_machine_is_refused(db: Database, vm: Vm) -> None:
    with pytest.raises(Exception, match="FOREIGN KEY"):
        await db.write(lambda tx: add_job(tx, 1, replace(vm, vm_id=type(vm.vm_id)("vm-unknown"))))
