"""A new service on what an earlier one left: adopted, ended, given back, never another instance's business."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.errors import FailedPrecondition
from microvm_mcp.link.port import LinkLost
from microvm_mcp.model import GuestInfo, JobState, Slot, VmId, VmState
from microvm_mcp.vmm.driver import ExitInfo
from tests.support.engine_rig import WORKSPACE, Rig, rig
from tests.support.world import SETTINGS, Life, World, WorldLink, host_full


async def leave_running(directory: Path, world: World) -> VmId:
    async with rig(directory, world) as r:
        vm_id = (await r.create()).vm.vm_id
        await r.exec(vm_id, "long", "sleep", wait_s=0)
        return vm_id


def failure_of(r: Rig) -> str:
    failure = r.view().vm.failure
    return "" if failure is None else failure.reason


async def test_a_guest_that_does_not_answer_the_hello_is_ended_and_its_disk_kept(tmp_path: Path) -> None:
    world = World()
    vm_id = await leave_running(tmp_path, world)
    world.only_guest().silent = True
    async with rig(tmp_path, world) as r:
        assert r.view().vm.state is VmState.FAILED
        assert "did not answer" in failure_of(r)
        assert [job.state for job in r.view().jobs] == [JobState.LOST]
        assert world.alive() == []
        assert list(world.disks) == [vm_id]
        assert (world.networks, world.cgroups, world.runtime_dirs) == (set(), {}, set())


async def test_a_guest_that_lies_at_the_hello_costs_only_itself(tmp_path: Path) -> None:
    world = World()
    async with rig(tmp_path, world) as r:
        await r.create("1")
        await r.create("2")
    world.alive()[0].guest.lies = True
    async with rig(tmp_path, world) as r:
        assert (r.view("1").vm.state, r.view("2").vm.state) == (VmState.FAILED, VmState.RUNNING)


@pytest.mark.parametrize(
    ("info", "state"),
    [
        (ExitInfo(None, "", guest_shutdown=True, guest_panicked=False), VmState.STOPPED),
        (ExitInfo(None, "", guest_shutdown=False, guest_panicked=True), VmState.FAILED),
    ],
)
async def test_a_vmm_that_waited_to_tell_why_its_guest_ended_is_heard(
    tmp_path: Path, info: ExitInfo, state: VmState
) -> None:
    world = World()
    await leave_running(tmp_path, world)
    process = world.alive()[0]
    # Found alive by the adoption, it tells and ends before the supervisor could have answered.
    process.guest.silent = True
    process.ends_when_adopted = info
    async with rig(tmp_path, world) as r:
        assert r.view().vm.state is state
        assert world.alive() == []


async def test_a_process_with_the_pid_of_a_vmm_from_an_earlier_boot_of_the_host_is_left_alone(
    tmp_path: Path,
) -> None:
    world = World()
    await leave_running(tmp_path, world)
    world.reboot()
    async with rig(tmp_path, world) as r:
        assert "host was restarted" in failure_of(r)
        assert "driver.adopt" not in r.life.trace


async def test_what_sits_under_our_names_without_a_row_is_ended(tmp_path: Path) -> None:
    world = World(networks={Slot(7)}, cgroups={Slot(9): set()}, runtime_dirs={Slot(7)})
    async with rig(tmp_path, world):
        assert (world.networks, world.cgroups, world.runtime_dirs) == (set(), {}, set())


async def test_a_service_does_not_start_over_orphans_that_it_cannot_end(tmp_path: Path) -> None:
    world = World(networks={Slot(7)}, fails={"host.remove_network": host_full()})
    with pytest.raises(FailedPrecondition, match="start again"):
        async with rig(tmp_path, world):
            pytest.fail("it started")


async def test_a_disk_without_a_row_is_not_ours_to_remove(tmp_path: Path) -> None:
    world = World(disks={VmId("vm-unknown"): 1})
    async with rig(tmp_path, world):
        assert list(world.disks) == ["vm-unknown"]


async def test_one_machine_that_cannot_be_cleaned_up_keeps_its_slot_and_no_other_from_being_served(
    tmp_path: Path,
) -> None:
    world = World()
    async with rig(tmp_path, world) as r:
        await r.create("1")
        await r.create("2")
    world.alive()[0].guest.silent = True
    world.fails["host.remove_network"] = host_full()
    async with rig(tmp_path, world) as r:
        assert (r.view("1").vm.state, r.view("1").vm.slot) == (VmState.FAILED, 0)
        assert r.view("2").vm.state is VmState.RUNNING
        world.fails.clear()
        await r.fleet.destroy(WORKSPACE, VmId("vm-1"), wait_s=2)
        assert world.networks == {1}


async def test_a_destruction_that_cannot_be_finished_at_the_start_can_be_asked_for_again(tmp_path: Path) -> None:
    world = World()
    vm_id = await leave_running(tmp_path, world)
    world.fails["host.remove_network"] = host_full()
    async with rig(tmp_path, world) as r:
        with pytest.raises(Exception, match="Internal"):
            await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
    async with rig(tmp_path, world) as r:
        assert r.view().vm.state is VmState.DESTROYING
        with pytest.raises(FailedPrecondition, match="being destroyed"):
            await r.exec(vm_id, "x")
        world.fails.clear()
        await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
        assert (world.disks, world.networks) == ({}, set())


async def test_destroyed_machines_stay_visible_after_a_restart(tmp_path: Path) -> None:
    world = World()
    vm_id = await leave_running(tmp_path, world)
    async with rig(tmp_path, world) as r:
        await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)
    async with rig(tmp_path, world) as r:
        assert r.view().vm.state is VmState.DESTROYED
        assert [job.state for job in r.view().jobs] == [JobState.LOST]
        assert r.fleet.views(WORKSPACE, limit=9, after=None) == ([], False)


async def test_many_machines_are_recovered_within_the_bound_though_none_answers(tmp_path: Path) -> None:
    world = World()
    async with rig(tmp_path, world) as r:
        for number in range(40):
            await r.create(str(number))
    for process in world.alive():
        process.guest.silent = True
    life = Life(world)
    async with rig(tmp_path, world, life=life, settings=SETTINGS) as r:
        views, _ = r.fleet.views(WORKSPACE, limit=100, after=None)
        assert {view.vm.state for view in views} == {VmState.FAILED}
        assert [view.vm.vm_id for view in views] == [f"vm-{number}" for number in range(40)]


async def test_a_guest_is_heard_however_long_others_took_that_were_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    await leave_running(tmp_path, world)
    hello = WorldLink.hello

    async def slow_hello(link: WorldLink, *, deadline_s: float) -> GuestInfo:
        if deadline_s <= 0.2:
            raise LinkLost("no answer", sent=True)
        return await hello(link, deadline_s=deadline_s)

    monkeypatch.setattr(WorldLink, "hello", slow_hello)
    timeouts = replace(SETTINGS.timeouts, recovery_s=0.0)
    async with rig(tmp_path, world, settings=replace(SETTINGS, timeouts=timeouts)) as r:
        assert r.view().vm.state is VmState.RUNNING
