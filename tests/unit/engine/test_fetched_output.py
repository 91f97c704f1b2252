"""Output that was fetched stays readable when the guest that held it is gone; what was not fetched is a gap."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.errors import ResourceExhausted
from microvm_mcp.model import JobId, JobState, OutputPage, VmId, VmState
from tests.support.engine_rig import WORKSPACE, Rig, rig
from tests.support.world import SETTINGS, World


async def output(r: Rig, vm_id: VmId, job_id: JobId, at: int = 0, limit: int = 99) -> OutputPage:
    _, page = await r.fleet.job_output(WORKSPACE, vm_id, job_id, stdout=at, stderr=0, limit=limit, wait_s=0)
    return page


async def lose_vmm(r: Rig, vm_id: VmId) -> None:
    r.world.alive()[-1].end()
    async with asyncio.timeout(2):
        while r.fleet.view(WORKSPACE, vm_id).vm.state is not VmState.FAILED:
            await asyncio.sleep(0.005)
    await r.fleet.settle(WORKSPACE, vm_id, wait_s=2)


async def test_three_times_what_was_fetched_outlives_its_guest_and_the_service(tmp_path: Path) -> None:
    world = World()
    for cycle in "abc":
        async with rig(tmp_path, world) as r:
            vm_id = (await r.create(cycle)).vm.vm_id
            job, _ = await r.exec(vm_id, cycle, "sleep", wait_s=0)
            world.alive()[-1].guest.jobs[job.job_id].stdout += b" and more"
            assert (await output(r, vm_id, job.job_id, 5)).stdout.data == b" and more"
            world.alive()[-1].guest.jobs[job.job_id].stdout += b" that nobody fetched"
            await lose_vmm(r, vm_id)
        async with rig(tmp_path, world) as r:
            page = await output(r, vm_id, job.job_id)
            assert (page.report.state, page.report.truncated) == (JobState.LOST, True)
            assert (page.stdout.offset, page.stdout.data) == (0, b"sleep and more")
            end = await output(r, vm_id, job.job_id, 14)
            assert (end.stdout.offset, end.stdout.data, end.stdout.gap_bytes) == (14, b"", 0)
            await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
            assert await output(r, vm_id, job.job_id) == page


async def test_a_finished_job_that_was_read_to_its_end_is_whole(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        job, live = await r.exec(vm_id, "a", "true")
        assert live is not None
        await lose_vmm(r, vm_id)
        page = await output(r, vm_id, job.job_id)
        assert (page.stdout.data, page.report.state, page.report.exit_code) == (b"true", JobState.COMPLETED, 0)
        assert not page.report.truncated


async def test_looking_again_writes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        job, _ = await r.exec(vm_id, "a", "true")
        before = len(r.life.trace)
        for at in (0, 4, 0, 4):
            await output(r, vm_id, job.job_id, at)
        assert r.life.trace[before:] == ["link.job_output"] * 4


async def test_a_full_store_costs_the_copy_and_not_the_answer(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        r.world.fails["store.write_lazily"] = ResourceExhausted("full")
        r.world.only_guest().jobs[job.job_id].stdout += b" more"
        assert (await output(r, vm_id, job.job_id)).stdout.data == b"sleep more"


async def test_kept_output_goes_with_the_record_of_its_job(tmp_path: Path) -> None:
    few = replace(SETTINGS, max_job_records=1, keep_destroyed=0, keep_destroyed_s=0)
    async with rig(tmp_path, settings=few) as r:
        vm_id = (await r.create()).vm.vm_id
        await r.exec(vm_id, "a", "first")
        job, _ = await r.exec(vm_id, "b", "second")
        kept = "SELECT job_id, data FROM fetched_pieces"
        assert await r.db.read(lambda tx: [tuple(row) for row in tx.execute(kept)]) == [(job.job_id, b"second")]
        await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
        await r.fleet.prune()
        assert await r.db.read(lambda tx: tx.execute(kept).fetchall()) == []


@pytest.mark.parametrize("limit", [1, 2, 99])
async def test_pages_fetched_out_of_order_leave_gaps_at_their_true_places(tmp_path: Path, limit: int) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        job, _ = await r.exec(vm_id, "a", "sleep", wait_s=0)
        stdout = r.world.only_guest().jobs[job.job_id]
        stdout.stdout += b"0123456789"
        await output(r, vm_id, job.job_id, 12)
        await lose_vmm(r, vm_id)
        at, seen = 0, b""
        while True:
            page = (await output(r, vm_id, job.job_id, at, limit)).stdout
            assert (page.gap_from, page.gap_bytes, page.written) == (5, 7, 15)
            seen += page.data
            if page.offset + len(page.data) == at:
                break
            at = page.offset + len(page.data)
        assert seen == b"sleep789"
