"""Creating, looking, limits and destroying, on the fake world and a real store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.engine.host_port import HostFailure
from microvm_mcp.errors import Busy, FailedPrecondition, InvalidArguments, NotFound, ResourceExhausted, Unavailable
from microvm_mcp.model import Limits, ReceiptPhase, VmId, VmState
from microvm_mcp.policy import GIB
from microvm_mcp.vmm.driver import ExitInfo, VmmError
from tests.support.engine_rig import OTHER, WORKSPACE, Rig, rig
from tests.support.world import IMAGE_BYTES, SETTINGS, Guest, World, host_full


def silent() -> Guest:
    return Guest(silent=True)


async def until(rig: Rig, state: VmState, name: str = "1") -> None:
    async with asyncio.timeout(2):
        while rig.view(name).vm.state is not state:
            await asyncio.sleep(0.005)


def nothing_left(world: World) -> bool:
    return not (world.alive() or world.disks or world.networks or world.cgroups or world.runtime_dirs)


async def test_a_created_machine_runs_with_a_right_clock_and_a_receipt_that_is_done(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        view = await r.create()
        receipt = await r.receipt("create-1")
        assert view.vm.state is VmState.RUNNING
        assert (view.vm.slot, view.vm.disk_bytes, view.vm.vmm_pid) == (0, IMAGE_BYTES, 101)
        assert r.world.only_guest().clock_ns > 0
        assert receipt is not None
        assert (receipt.phase, receipt.vm_id) == (ReceiptPhase.DONE, view.vm.vm_id)


async def test_create_answers_creating_when_the_wait_is_over_and_goes_on(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        view = await r.create(wait_s=0)
        assert view.vm.state is VmState.CREATING
        joined = await r.create(wait_s=2)
        assert joined.vm.state is VmState.RUNNING
        assert len(r.world.processes) == 1


async def test_looking_makes_no_call_to_any_port(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.create()
        await asyncio.sleep(0)
        before = list(r.life.trace)
        for _ in range(100):
            r.view()
            r.fleet.views(WORKSPACE, limit=10, after=None)
        assert r.life.trace == before


async def test_a_foreign_machine_is_as_unknown_as_one_that_never_was(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        with pytest.raises(NotFound) as foreign:
            r.fleet.view(OTHER, vm_id)
        with pytest.raises(NotFound) as unknown:
            r.fleet.view(WORKSPACE, VmId("vm-none"))
        with pytest.raises(NotFound):
            await r.fleet.destroy(OTHER, vm_id, wait_s=1)
        assert foreign.value.message == unknown.value.message
        assert r.fleet.views(OTHER, limit=10, after=None) == ([], False)


async def test_pages_of_machines_are_in_order_of_creation_and_skip_destroyed_ones(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        for name in "abcd":
            await r.create(name)
        await r.fleet.destroy(WORKSPACE, VmId("vm-b"), wait_s=2)
        first, more = r.fleet.views(WORKSPACE, limit=2, after=None)
        assert ([view.vm.vm_id for view in first], more) == (["vm-a", "vm-c"], True)
        second, more = r.fleet.views(WORKSPACE, limit=2, after=VmId("vm-c"))
        assert ([view.vm.vm_id for view in second], more) == (["vm-d"], False)
        behind_destroyed, _ = r.fleet.views(WORKSPACE, limit=1, after=VmId("vm-b"))
        assert [view.vm.vm_id for view in behind_destroyed] == ["vm-c"]
        with pytest.raises(NotFound):
            r.fleet.views(WORKSPACE, limit=1, after=VmId("vm-none"))


async def test_destroying_gives_everything_back_and_stays_visible_and_repeatable(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        for _ in range(2):
            view = await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
            assert (view.vm.state, view.vm.slot) == (VmState.DESTROYED, None)
            assert nothing_left(r.world)
        assert r.view().vm.state is VmState.DESTROYED


async def test_two_callers_share_one_destruction(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        views = await asyncio.gather(*(r.fleet.destroy(WORKSPACE, vm_id, wait_s=2) for _ in range(3)))
        assert {view.vm.state for view in views} == {VmState.DESTROYED}
        assert r.life.trace.count("vmm.kill") == 1


async def test_destroying_cuts_a_creation_off(tmp_path: Path) -> None:
    async with rig(tmp_path, World(new_guest=silent)) as r:
        vm_id = (await r.create(wait_s=0.05)).vm.vm_id
        assert r.world.alive()
        view = await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
        assert view.vm.state is VmState.DESTROYED
        assert nothing_left(r.world)


async def test_slots_are_used_again_after_destruction(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.create("a")
        await r.create("b")
        await r.fleet.destroy(WORKSPACE, VmId("vm-a"), wait_s=2)
        assert (await r.create("c")).vm.slot == 0


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("host.create_disk", host_full()),
        ("host.ensure_network", host_full()),
        ("driver.boot", VmmError("no", evidence="argv")),
        ("driver.boot", RuntimeError("a bug")),
    ],
)
async def test_a_boot_that_fails_on_the_host_gives_everything_back(
    tmp_path: Path, step: str, error: Exception
) -> None:
    async with rig(tmp_path) as r:
        r.world.fails[step] = error
        view = await r.create()
        assert (view.vm.state, view.vm.slot) == (VmState.FAILED, None)
        assert view.vm.failure is not None
        assert view.vm.failure.reason.endswith(".")
        assert not view.vm.failure.cold_boot_possible
        assert "argv" not in view.vm.failure.reason
        assert nothing_left(r.world)


async def test_a_guest_that_never_answers_fails_its_own_machine_only(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.create("good")
        r.world.new_guest = silent
        view = await r.create("mute")
        assert view.vm.state is VmState.FAILED
        assert "did not answer" in (view.vm.failure.reason if view.vm.failure else "")
        assert r.view("good").vm.state is VmState.RUNNING
        assert len(r.world.alive()) == 1


async def test_a_vmm_that_ends_during_boot_is_noticed_at_once(tmp_path: Path) -> None:
    slow = replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, boot_hello_s=30))
    async with rig(tmp_path, World(new_guest=silent), settings=slow) as r:
        await r.create(wait_s=0.05)
        r.world.alive()[0].end()
        await until(r, VmState.FAILED)
        assert nothing_left(r.world)


async def test_a_failed_machine_refuses_work_with_the_way_out_and_can_be_destroyed(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        r.world.alive()[0].end(ExitInfo(None, "", guest_shutdown=False, guest_panicked=True))
        await until(r, VmState.FAILED)
        with pytest.raises(FailedPrecondition, match="destroy it and create a new one"):
            await r.exec(vm_id, "x")
        assert await r.receipt("exec-x") is None
        assert list(r.world.disks) == [vm_id]
        await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
        assert nothing_left(r.world)


@pytest.mark.parametrize(
    ("info", "state"),
    [
        (ExitInfo(0, "", guest_shutdown=True, guest_panicked=False), VmState.STOPPED),
        (ExitInfo(0, "", guest_shutdown=True, guest_panicked=True), VmState.FAILED),
        (ExitInfo(1, "", guest_shutdown=False, guest_panicked=False), VmState.FAILED),
    ],
)
async def test_the_end_of_a_vmm_is_recorded_and_its_disk_kept(
    tmp_path: Path, info: ExitInfo, state: VmState
) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        job, _ = await r.exec(vm_id, "long", "sleep", wait_s=0)
        r.world.alive()[0].end(info)
        await until(r, state)
        await r.fleet.settle(WORKSPACE, vm_id, wait_s=2)
        view = r.view()
        assert (view.vm.failure is None) == (state is VmState.STOPPED)
        assert [one.state.value for one in view.jobs if one.job_id == job.job_id] == ["lost"]
        assert view.awake_because == ()
        assert list(r.world.disks) == [vm_id]
        assert (r.world.networks, r.world.cgroups, r.world.runtime_dirs) == (set(), {}, set())


async def test_limits_are_admitted_under_one_lock(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        quota = Limits(max_vms=2)
        results = await asyncio.gather(
            *(r.create(str(number), limits=quota) for number in range(5)), return_exceptions=True
        )
        assert sum(isinstance(result, ResourceExhausted) for result in results) == 3
        assert len(r.world.alive()) == 2


async def test_a_refused_creation_leaves_no_receipt(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.world.free = 3 * GIB
        with pytest.raises(ResourceExhausted) as refused:
            await r.create()
        assert refused.value.details["free"] == 3.0
        assert await r.receipt("create-1") is None
        r.world.free = 100 * GIB
        assert (await r.create()).vm.state is VmState.RUNNING


async def test_what_has_nothing_on_the_host_counts_against_no_limit(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.world.fails["driver.boot"] = VmmError("no")
        assert (await r.create("a", limits=Limits(max_vms=1))).vm.state is VmState.FAILED
        r.world.fails.clear()
        assert (await r.create("b", limits=Limits(max_vms=1))).vm.state is VmState.RUNNING


async def test_a_disk_smaller_than_the_image_is_refused_by_field(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        with pytest.raises(InvalidArguments, match="disk_gib"):
            await r.create(disk_bytes=IMAGE_BYTES - 1)
        assert (await r.create(disk_bytes=2 * IMAGE_BYTES)).vm.disk_bytes == 2 * IMAGE_BYTES


async def test_a_removal_that_fails_keeps_the_slot_and_is_done_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        vm_id = (await r.create()).vm.vm_id
        r.world.fails["host.remove_network"] = host_full()
        with pytest.raises(Exception, match="Internal error"):
            await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
        assert (r.view().vm.state, r.view().vm.slot) == (VmState.DESTROYING, 0)
        assert (await r.create("other")).vm.slot == 1
        r.world.fails.clear()
        assert (await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)).vm.state is VmState.DESTROYED


async def test_an_undo_that_fails_keeps_the_slot_so_that_its_names_are_not_used_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.world.fails |= {"driver.boot": VmmError("no"), "host.remove_network": host_full()}
        view = await r.create("a")
        assert (view.vm.state, view.vm.slot) == (VmState.FAILED, 0)
        r.world.fails.clear()
        assert (await r.create("b")).vm.slot == 1
        await r.fleet.destroy(WORKSPACE, VmId("vm-a"), wait_s=2)
        assert r.world.networks == {1}


async def test_stopping_a_workspace_ends_its_vmms_and_keeps_its_disks(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.create("clean")
        await r.create("stubborn")
        r.world.alive()[1].heeds_shutdown = False
        r.world.new_guest = silent
        await r.create("creating", wait_s=0.05)
        assert await r.fleet.stop_workspace(WORKSPACE, wait_s=5) == 3
        assert r.world.alive() == []
        assert r.view("clean").vm.state is VmState.STOPPED
        assert r.view("stubborn").vm.state is VmState.FAILED
        assert r.view("creating").vm.state is VmState.FAILED
        assert set(r.world.disks) == {"vm-clean", "vm-stubborn"}
        assert await r.fleet.stop_workspace(WORKSPACE, wait_s=5) == 0
        assert await r.fleet.stop_workspace(OTHER, wait_s=5) == 0


async def test_a_vmm_that_cannot_be_ended_is_never_reported_as_ended(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.create()
        r.world.alive()[0].heeds_shutdown = False
        r.world.fails["host.end_cgroup"] = HostFailure("could not end the machine's processes")
        for _cycle in range(3):
            with pytest.raises(Unavailable, match="still being ended"):
                await r.fleet.stop_workspace(WORKSPACE, wait_s=5)
        r.world.fails.clear()
        await r.fleet.stop_workspace(WORKSPACE, wait_s=5)
        assert r.world.alive() == []


async def test_another_operation_in_progress_is_named(tmp_path: Path) -> None:
    patient = replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, stop_grace_s=0.5))
    async with rig(tmp_path, settings=patient) as r:
        vm_id = (await r.create()).vm.vm_id
        r.world.alive()[0].heeds_shutdown = False
        stopping = asyncio.create_task(r.fleet.stop_workspace(WORKSPACE, wait_s=5))
        await until(r, VmState.STOPPING)
        with pytest.raises(Busy, match="being stopped"):
            await r.fleet.destroy(WORKSPACE, vm_id, wait_s=1)
        await stopping


async def test_a_service_that_stops_leaves_vmms_running_and_refuses_calls(tmp_path: Path) -> None:
    world = World()
    async with rig(tmp_path, world) as r:
        vm_id = (await r.create()).vm.vm_id
    with pytest.raises(Unavailable):
        await r.fleet.destroy(WORKSPACE, vm_id, wait_s=1)
    assert len(world.alive()) == 1


async def test_destroyed_machines_are_forgotten_after_their_time(tmp_path: Path) -> None:
    short = replace(SETTINGS, keep_destroyed=1, keep_destroyed_s=0)
    async with rig(tmp_path, settings=short) as r:
        for name in "ab":
            await r.create(name)
            await r.fleet.destroy(WORKSPACE, VmId(f"vm-{name}"), wait_s=2)
        await r.fleet.prune()
        with pytest.raises(NotFound):
            r.view("a")
        assert r.view("b").vm.state is VmState.DESTROYED
