"""What is true of each machine when the service starts, found out within a bound, and acted upon before it serves.

Evidence is gathered for all machines at once; `lifecycle.recover` decides. A live VMM is adopted only if its
supervisor answers; whatever else runs under this instance's names is ended by the cgroup it sits in. Nothing that
carries another instance's name is looked at, and no disk is removed that a guest has ever used, except where its
destruction had begun.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from microvm_mcp.engine.certain import first_of
from microvm_mcp.engine.context import Context
from microvm_mcp.engine.host_port import HostFailure
from microvm_mcp.engine.machine import Machine
from microvm_mcp.lifecycle import Decision, Evidence, Remedy, recover
from microvm_mcp.link.port import GuestLied, GuestRefused, Link, LinkLost
from microvm_mcp.model import Failure, GuestInfo, Job, Vm, VmState
from microvm_mcp.store import jobs as job_rows
from microvm_mcp.store import vms as vm_rows
from microvm_mcp.store import workspaces as workspace_rows
from microvm_mcp.store.vms import VmChanges
from microvm_mcp.vmm.driver import ProcessIdentity, Vmm, VmmError

logger = logging.getLogger(__name__)

_AT_ONCE = 16
"""Machines that are looked at at the same time."""
_LAST_WORDS_S = 0.5
_LEAST_HELLO_S = 5.0
"""For each machine's answer, however long others that are silent took: who gets none loses its memory."""


@dataclass(frozen=True, slots=True)
class _Found:
    evidence: Evidence
    vmm: Vmm | None = None
    link: Link | None = None
    guest: GuestInfo | None = None


async def recover_all(context: Context, build: Callable[[Vm, list[Job]], Machine]) -> list[Machine]:
    """All machines that have rows, in order of creation, each in a stable state, destroyed ones first."""
    rows, destroyed = await context.db.read(_all_rows)
    machines = [build(vm, jobs) for vm, jobs in destroyed]
    await _sweep(context, [vm for vm, _ in rows])
    gate = asyncio.Semaphore(_AT_ONCE)
    until = asyncio.get_running_loop().time() + context.settings.timeouts.recovery_s

    async def one(vm: Vm, jobs: list[Job]) -> Machine:
        async with gate:
            machine = build(vm, jobs)
            await _recover_one(context, machine, until)
            return machine

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(vm, jobs), name=f"recover:{vm.vm_id}") for vm, jobs in rows]
    return machines + [task.result() for task in tasks]


def _all_rows(tx: sqlite3.Connection) -> tuple[list[tuple[Vm, list[Job]]], list[tuple[Vm, list[Job]]]]:
    retained = vm_rows.retained(tx)
    destroyed = [vm for one in workspace_rows.list_all(tx) for vm in vm_rows.destroyed_owned(tx, one.name)]
    return (
        [(vm, job_rows.of_vm(tx, vm.vm_id)) for vm in retained],
        [(vm, job_rows.of_vm(tx, vm.vm_id)) for vm in destroyed],
    )


async def _sweep(context: Context, rows: list[Vm]) -> None:
    """End what sits under our names in slots that no row holds."""
    held = {vm.slot for vm in rows}
    for slot in sorted(await context.host.leftovers() - held):
        logger.warning("orphans ended slot=%s", slot)
        await context.host.end_cgroup(slot)
        await context.host.remove_network(slot)
        await context.host.remove_runtime_dir(slot)


async def _recover_one(context: Context, machine: Machine, until: float) -> None:
    row = machine.vm
    found = await _look(context, row, until)
    decision = recover(row, found.evidence)
    logger.info(
        "vm=%s op=recover state=%s to=%s remedy=%s evidence=%s",
        row.vm_id,
        row.state.value,
        decision.state.value,
        decision.remedy.value,
        found.evidence,
    )
    if decision.remedy is Remedy.ADOPT and found.vmm is not None and found.link is not None:
        machine.attach(found.vmm, found.link, found.guest)
        await _learn_jobs(machine, found.link)
        return
    if found.link is not None:
        await found.link.close()
    try:
        await _apply(context, row, found.vmm, decision)
    except (HostFailure, VmmError):
        # One machine that cannot be cleaned up keeps its slot and its state, and does not keep the others from
        # being served; destroying it tries again.
        logger.exception("recovery left something behind vm=%s", row.vm_id)
        decision = _stuck(row, decision)
    await _record(context, machine, row, decision)


async def _look(context: Context, row: Vm, until: float) -> _Found:
    same_boot = row.host_boot_id == context.host.boot_id()
    vmm = await _find_vmm(context, row) if same_boot else None
    if vmm is None:
        return _Found(Evidence(same_boot, vmm_alive=False, answered=False))
    link = context.dial(vmm.channel)
    within_s = min(context.settings.timeouts.adopt_hello_s, _left(until))
    if row.state is not VmState.RUNNING:
        return _Found(Evidence(same_boot, vmm_alive=True, answered=False), vmm, link)
    guest = None
    try:
        guest = await first_of(link.hello(deadline_s=within_s), vmm.wait_exit())
    except (LinkLost, GuestRefused, GuestLied) as error:
        logger.warning("no answer to the hello vm=%s: %s", row.vm_id, error)
    if guest is not None:
        return _Found(Evidence(same_boot, vmm_alive=True, answered=True), vmm, link, guest)
    # A guest that ended while nobody watched is told of by its VMM, which waits for that and then ends.
    info = await first_of(vmm.wait_exit(), asyncio.sleep(_LAST_WORDS_S))
    powered_off = info is not None and info.guest_shutdown and not info.guest_panicked
    return _Found(Evidence(same_boot, vmm_alive=info is None, answered=False, powered_off=powered_off), vmm, link)


async def _find_vmm(context: Context, row: Vm) -> Vmm | None:
    if row.slot is None or row.vmm_pid is None or row.vmm_started_ticks is None:
        return None
    identity = ProcessIdentity(row.vmm_pid, row.vmm_started_ticks)
    try:
        return await context.driver.adopt(context.boot_spec(row, row.slot), identity)
    except VmmError as error:
        logger.warning("not adopted vm=%s: %s evidence=%r", row.vm_id, error, error.evidence[-2000:])
        return None


async def _learn_jobs(machine: Machine, link: Link) -> None:
    """What became of the jobs meanwhile, before anybody looks; the watcher catches up if the guest is slow."""
    try:
        await machine.poll_jobs(link, -1, 0)
    except (LinkLost, GuestRefused, GuestLied) as error:
        logger.warning("no report of jobs vm=%s: %s", machine.vm.vm_id, error)


async def _apply(context: Context, row: Vm, vmm: Vmm | None, decision: Decision) -> None:
    host, slot = context.host, row.slot
    if vmm is not None:
        await vmm.kill()
    if slot is not None:
        await host.end_cgroup(slot)
        await host.remove_network(slot)
        await host.remove_runtime_dir(slot)
    if decision.remedy is Remedy.GIVE_BACK:
        await host.remove_disk(row.vm_id)


def _stuck(row: Vm, decision: Decision) -> Decision:
    if row.state is VmState.DESTROYING:
        return Decision(VmState.DESTROYING, Remedy.END_VMM)
    return Decision(decision.state, Remedy.END_VMM, decision.reason, decision.lost, decision.cold_boot_possible)


async def _record(context: Context, machine: Machine, row: Vm, decision: Decision) -> None:
    now = context.now()
    changes: VmChanges = {"vmm_pid": None, "vmm_started_ticks": None}
    if decision.remedy is Remedy.GIVE_BACK:
        changes["slot"] = None
    if decision.reason:
        changes["failure"] = Failure(now, decision.reason, decision.lost, decision.cold_boot_possible)

    def record(tx: sqlite3.Connection) -> tuple[Vm, list[Job]]:
        if decision.state is row.state:
            moved = vm_rows.change(tx, row.vm_id, **changes)
        else:
            moved = vm_rows.move(tx, row.vm_id, expect=row.state, to=decision.state, now=now, **changes)
        job_rows.mark_lost(tx, row.vm_id, now)
        return moved, job_rows.of_vm(tx, row.vm_id)

    machine.vm, jobs = await context.db.write(record)
    machine.book.reload(jobs)


def _left(until: float) -> float:
    return max(_LEAST_HELLO_S, until - asyncio.get_running_loop().time())
