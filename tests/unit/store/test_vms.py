from __future__ import annotations

from dataclasses import replace

import pytest

from microvm_mcp.errors import Conflict, NotFound, PermissionDenied
from microvm_mcp.model import Failure, Slot, VmId, VmState
from microvm_mcp.store import jobs, vms, workspaces
from microvm_mcp.store.database import Database
from tests.unit.store.rows import DEMO, OTHER, a_vm, add_job, add_vm, add_workspaces

FAILURE = Failure(at=5.0, reason="The guest panicked.", lost="memory and running jobs", cold_boot_possible=True)


@pytest.fixture(autouse=True)
async def _workspaces(db: Database) -> None:
    await db.write(add_workspaces)


async def test_a_row_comes_back_as_it_went_in(db: Database) -> None:
    vm = replace(
        a_vm(1, slot=7, name="builder"),
        failure=FAILURE,
        customised=True,
        vmm_pid=4242,
        vmm_started_ticks=10**10,
        template="base",
        incarnation=3,
        network="on",
        idle_mode="pause",
    )
    await db.write(lambda tx: vms.insert(tx, vm))
    assert await db.read(lambda tx: vms.get(tx, vm.vm_id)) == vm
    assert await db.read(lambda tx: vms.get_owned(tx, DEMO, vm.vm_id)) == vm


async def test_a_foreign_id_and_an_unknown_id_are_the_same_miss(db: Database) -> None:
    vm = await db.write(lambda tx: add_vm(tx, 1))
    assert await db.read(lambda tx: vms.get_owned(tx, OTHER, vm.vm_id)) is None
    assert await db.read(lambda tx: vms.get_owned(tx, DEMO, VmId("vm-unknown"))) is None


async def test_a_listing_pages_through_own_machines_in_order_of_creation(db: Database) -> None:
    await db.write(
        lambda tx: [
            add_vm(tx, number, workspace=DEMO if number % 2 else OTHER, slot=number) for number in (9, 1, 5, 2, 3)
        ]
    )
    first = await db.read(lambda tx: vms.list_owned(tx, DEMO, limit=2))
    assert [vm.vm_id for vm in first] == [a_vm(9).vm_id, a_vm(1).vm_id]
    rest = await db.read(lambda tx: vms.list_owned(tx, DEMO, limit=10, after_vm_id=first[-1].vm_id))
    assert [vm.vm_id for vm in rest] == [a_vm(5).vm_id, a_vm(3).vm_id]


async def test_a_listing_goes_on_behind_a_machine_that_was_destroyed_meanwhile(db: Database) -> None:
    await db.write(lambda tx: [add_vm(tx, number) for number in (1, 2, 3)])
    await db.write(lambda tx: vms.move(tx, a_vm(2).vm_id, expect=VmState.RUNNING, to=VmState.DESTROYED, now=9.0))
    page = await db.read(lambda tx: vms.list_owned(tx, DEMO, limit=10, after_vm_id=a_vm(2).vm_id))
    assert [vm.vm_id for vm in page] == [a_vm(3).vm_id]
    everything = await db.read(lambda tx: vms.list_owned(tx, DEMO, limit=10))
    assert [vm.vm_id for vm in everything] == [a_vm(1).vm_id, a_vm(3).vm_id]


async def test_a_foreign_cursor_is_refused_like_an_unknown_one(db: Database) -> None:
    theirs = await db.write(lambda tx: add_vm(tx, 1, workspace=OTHER))

    async def list_behind(cursor: VmId) -> None:
        await db.read(lambda tx: vms.list_owned(tx, DEMO, limit=10, after_vm_id=cursor))

    for cursor in (theirs.vm_id, VmId("vm-unknown")):
        with pytest.raises(NotFound, match="without a cursor"):
            await list_behind(cursor)


async def test_retained_are_all_that_are_not_destroyed_of_every_workspace(db: Database) -> None:
    await db.write(
        lambda tx: [
            add_vm(tx, 1, state=VmState.FAILED),
            add_vm(tx, 2, workspace=OTHER, state=VmState.DESTROYING),
            add_vm(tx, 3, state=VmState.DESTROYED),
        ]
    )
    assert [vm.vm_id for vm in await db.read(vms.retained)] == [a_vm(1).vm_id, a_vm(2).vm_id]
    assert [vm.vm_id for vm in await db.read(lambda tx: vms.destroyed_owned(tx, DEMO))] == [a_vm(3).vm_id]


async def test_a_move_sets_state_time_and_changes_together(db: Database) -> None:
    vm = await db.write(lambda tx: add_vm(tx, 1, state=VmState.CREATING, slot=0))
    moved = await db.write(
        lambda tx: vms.move(
            tx,
            vm.vm_id,
            expect=frozenset({VmState.CREATING, VmState.RUNNING}),
            to=VmState.FAILED,
            now=77.0,
            failure=FAILURE,
            vmm_pid=None,
        )
    )
    assert moved == replace(vm, state=VmState.FAILED, state_since=77.0, failure=FAILURE)
    assert await db.read(lambda tx: vms.get(tx, vm.vm_id)) == moved
    mended = await db.write(
        lambda tx: vms.move(tx, vm.vm_id, expect=VmState.FAILED, to=VmState.RUNNING, now=78.0, failure=None)
    )
    assert mended.failure is None


async def test_a_move_from_an_unexpected_state_changes_nothing_and_says_what_is(db: Database) -> None:
    vm = await db.write(lambda tx: add_vm(tx, 1, state=VmState.DESTROYING, slot=3))
    with pytest.raises(vms.StaleState) as caught:
        await db.write(
            lambda tx: vms.move(tx, vm.vm_id, expect=VmState.RUNNING, to=VmState.PAUSED, now=9.0, slot=None)
        )
    assert caught.value.actual is VmState.DESTROYING
    assert await db.read(lambda tx: vms.get(tx, vm.vm_id)) == vm
    with pytest.raises(vms.StaleState) as caught:
        await db.write(
            lambda tx: vms.move(tx, VmId("vm-unknown"), expect=VmState.RUNNING, to=VmState.PAUSED, now=9.0)
        )
    assert caught.value.actual is None


async def test_of_two_movers_from_one_state_one_wins(db: Database) -> None:
    vm = await db.write(lambda tx: add_vm(tx, 1))

    async def destroy() -> bool:
        try:
            await db.write(
                lambda tx: vms.move(tx, vm.vm_id, expect=VmState.RUNNING, to=VmState.DESTROYING, now=9.0)
            )
        except vms.StaleState:
            return False
        return True

    assert sorted([await destroy(), await destroy()]) == [False, True]


async def test_change_leaves_the_state_alone(db: Database) -> None:
    vm = await db.write(lambda tx: add_vm(tx, 1))
    changed = await db.write(lambda tx: vms.change(tx, vm.vm_id, incarnation=2, vmm_pid=9, vmm_started_ticks=8))
    assert changed == replace(vm, incarnation=2, vmm_pid=9, vmm_started_ticks=8)
    assert await db.write(lambda tx: vms.change(tx, vm.vm_id)) == changed


async def test_a_column_that_may_not_change_is_refused(db: Database) -> None:
    vm = await db.write(lambda tx: add_vm(tx, 1))
    with pytest.raises(TypeError):
        await db.write(lambda tx: vms.change(tx, vm.vm_id, workspace="other"))  # type: ignore[call-arg]


async def test_the_smallest_free_slot_is_taken_and_a_freed_one_again(db: Database) -> None:
    await db.write(lambda tx: [add_vm(tx, number, slot=number) for number in (0, 1, 3)])
    assert await db.read(lambda tx: vms.take_slot(tx, 8)) == 2
    await db.write(lambda tx: add_vm(tx, 2, slot=2))
    assert await db.read(lambda tx: vms.take_slot(tx, 8)) == 4
    assert await db.read(lambda tx: vms.take_slot(tx, 4)) is None
    await db.write(lambda tx: vms.change(tx, a_vm(0).vm_id, slot=None))
    assert await db.read(lambda tx: vms.take_slot(tx, 4)) == Slot(0)


async def test_a_revoked_workspace_gets_no_further_machine(db: Database) -> None:
    await db.write(lambda tx: add_vm(tx, 1))
    await db.write(lambda tx: workspaces.revoke(tx, DEMO, now=5.0))
    with pytest.raises(PermissionDenied, match="revoked"):
        await db.write(lambda tx: add_vm(tx, 2))
    await db.write(lambda tx: add_vm(tx, 3, workspace=OTHER))
    assert [vm.vm_id for vm in await db.read(vms.retained)] == [a_vm(1).vm_id, a_vm(3).vm_id]


async def test_a_slot_never_belongs_to_two_machines(db: Database) -> None:
    await db.write(lambda tx: add_vm(tx, 1, slot=5))
    with pytest.raises(Exception, match="UNIQUE"):
        await db.write(lambda tx: add_vm(tx, 2, slot=5, workspace=OTHER))


async def test_a_name_is_taken_within_its_workspace_until_its_machine_is_destroyed(db: Database) -> None:
    first = await db.write(lambda tx: add_vm(tx, 1, name="builder"))
    await db.write(lambda tx: add_vm(tx, 2, name="builder", workspace=OTHER))
    with pytest.raises(Conflict) as caught:
        await db.write(lambda tx: add_vm(tx, 3, name="builder"))
    assert "builder" not in caught.value.message
    third = await db.write(lambda tx: add_vm(tx, 3))
    with pytest.raises(Conflict):
        await db.write(lambda tx: vms.change(tx, third.vm_id, name="builder"))
    await db.write(lambda tx: vms.move(tx, first.vm_id, expect=VmState.RUNNING, to=VmState.DESTROYED, now=9.0))
    await db.write(lambda tx: vms.change(tx, third.vm_id, name="builder"))


async def test_pruning_forgets_old_destroyed_machines_with_their_jobs_and_keeps_the_last_ones(db: Database) -> None:
    await db.write(
        lambda tx: [add_vm(tx, number, state=VmState.DESTROYED, since=float(number)) for number in range(1, 7)]
    )
    await db.write(lambda tx: add_vm(tx, 8, state=VmState.DESTROYED, since=1.0, workspace=OTHER))
    old = await db.write(lambda tx: add_vm(tx, 9, state=VmState.FAILED, since=1.0))
    await db.write(lambda tx: [add_job(tx, 1, a_vm(1)), add_job(tx, 2, old)])
    assert await db.write(lambda tx: vms.prune_destroyed(tx, older_than=5.0, keep=1)) == 4
    left = await db.read(lambda tx: vms.destroyed_owned(tx, DEMO))
    assert [vm.vm_id for vm in left] == [a_vm(5).vm_id, a_vm(6).vm_id]
    assert len(await db.read(lambda tx: vms.destroyed_owned(tx, OTHER))) == 1
    assert await db.read(lambda tx: (jobs.count(tx, a_vm(1).vm_id), jobs.count(tx, old.vm_id))) == (0, 1)
    assert await db.write(lambda tx: vms.prune_destroyed(tx, older_than=5.0, keep=1)) == 0
