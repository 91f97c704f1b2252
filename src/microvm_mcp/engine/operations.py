"""What changes one machine, each a straight sequence of effects: boot, stop, destroy, and the end nobody asked for.

The row says what is about to happen before it happens, success is reported after it is durable, and whatever a
failed boot made on the host is undone in reverse. Removal is by derived names and idempotent, so that any of these
can be cut off anywhere and finished by recovery.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Unpack

from microvm_mcp.engine.certain import certainly, finished, first_of
from microvm_mcp.engine.context import Context
from microvm_mcp.engine.host_port import HostFailure
from microvm_mcp.engine.machine import Machine
from microvm_mcp.errors import MicrovmError
from microvm_mcp.lifecycle import MEMORY_LOST, NOTHING_LOST, TRANSITIONS, Operation
from microvm_mcp.link.port import GuestLied, GuestRefused, Link, LinkLost
from microvm_mcp.model import Failure, GuestInfo, Job, Vm, VmState
from microvm_mcp.store import jobs as job_rows
from microvm_mcp.store import vms as vm_rows
from microvm_mcp.store.vms import VmChanges
from microvm_mcp.vmm.driver import ExitInfo, Vmm, VmmError

logger = logging.getLogger(__name__)

_MAX_RETRY_S = 30.0


class _EndedEarly(Exception):
    """The VMM ended before the supervisor answered."""


async def boot(machine: Machine) -> None:
    """From the durable row in CREATING, with its slot, to RUNNING; or to FAILED with everything given back."""
    context, vm = machine.context, machine.vm
    host, slot = context.host, vm.slot
    assert slot is not None
    left_behind: list[str] = []
    try:
        async with AsyncExitStack() as stack:

            def undo(what: str, effect: Callable[[], Coroutine[Any, Any, None]]) -> None:
                stack.push_async_callback(_undo, vm, what, effect, left_behind)

            # Armed on the line before: removal is by name and idempotent, and so covers what fails halfway.
            undo("disk", lambda: host.remove_disk(vm.vm_id))
            await certainly(host.create_disk(vm.vm_id, vm.disk_bytes))
            undo("runtime directory", lambda: host.remove_runtime_dir(slot))
            await certainly(host.ensure_runtime_dir(slot))
            undo("network", lambda: host.remove_network(slot))
            await certainly(host.ensure_network(slot))
            undo("cgroup", lambda: host.end_cgroup(slot))
            await certainly(host.ensure_cgroup(slot, memory_mib=vm.memory_mib, vcpus=vm.vcpus))
            vmm = await certainly(context.driver.boot(context.boot_spec(vm, slot)))
            undo("VMM", vmm.kill)
            # Durable as soon as it exists. Before that, an orphan is found by the cgroup it sits in.
            machine.vm = await certainly(
                context.db.write(
                    lambda tx: vm_rows.change(
                        tx,
                        vm.vm_id,
                        vmm_pid=vmm.identity.pid,
                        vmm_started_ticks=vmm.identity.started_ticks,
                        host_boot_id=host.boot_id(),
                    )
                )
            )
            link = context.dial(vmm.channel)
            undo("link", link.close)
            guest = await _greet(context, vmm, link)
            await link.set_clock(int(context.now() * 1e9), deadline_s=context.settings.timeouts.answer_s)
            machine.vm = await certainly(_move(context, vm, VmState.CREATING, VmState.RUNNING))
            machine.attach(vmm, link, guest)
            stack.pop_all()
    except (Exception, asyncio.CancelledError) as error:
        _log_failed_boot(vm, error)
        failure = Failure(context.now(), _why_boot_failed(error), NOTHING_LOST, cold_boot_possible=False)
        gone: VmChanges = {"vmm_pid": None, "vmm_started_ticks": None, "failure": failure}
        if not left_behind:
            gone["slot"] = None
        await _record(machine, VmState.CREATING, VmState.FAILED, **gone)
        if isinstance(error, asyncio.CancelledError):
            raise


async def destroy(machine: Machine) -> None:
    """From anywhere to DESTROYED, with nothing of it left. What failed halfway is done again from the start."""
    context, vm = machine.context, machine.vm
    host, slot = context.host, vm.slot
    if vm.state is not VmState.DESTROYING:
        await certainly(_lose_memory(machine, TRANSITIONS[Operation.DESTROY].sources, VmState.DESTROYING))
    await _end_vmm(machine)
    if slot is not None:
        await certainly(host.remove_network(slot))
        await certainly(host.remove_runtime_dir(slot))
    await certainly(host.remove_disk(vm.vm_id))
    machine.vm = await certainly(
        _move(context, vm, VmState.DESTROYING, VmState.DESTROYED, slot=None, vmm_pid=None, vmm_started_ticks=None)
    )


async def stop(machine: Machine) -> None:
    """Ask the guest to shut down, end it if it does not. STOPPED is a clean end only."""
    context, vm = machine.context, machine.vm
    machine.vm = await certainly(_move(context, vm, TRANSITIONS[Operation.STOP].sources, VmState.STOPPING))
    clean = False
    vmm = await machine.detach()
    if vmm is not None:
        clean = await _shut_down(vmm, context.settings.timeouts.stop_grace_s)
    await _end_vmm(machine)
    changes: VmChanges = {"vmm_pid": None, "vmm_started_ticks": None}
    if not clean:
        changes["failure"] = Failure(
            context.now(),
            "The guest did not shut down when asked and was ended.",
            MEMORY_LOST,
            cold_boot_possible=True,
        )
    await certainly(
        _lose_memory(
            machine, frozenset({VmState.STOPPING}), VmState.STOPPED if clean else VmState.FAILED, **changes
        )
    )
    await _remove_surroundings(machine)


async def record_end(machine: Machine, info: ExitInfo | None) -> None:
    """The VMM ended by itself (`info`), or its guest broke the protocol (None) and is ended here."""
    if info is None:
        await _end_vmm(machine)
    state, reason = _end_of(info)
    changes: VmChanges = {"vmm_pid": None, "vmm_started_ticks": None}
    if state is VmState.FAILED:
        changes["failure"] = Failure(machine.context.now(), reason, MEMORY_LOST, cold_boot_possible=True)
    await _until_recorded(machine, lambda: _lose_memory(machine, frozenset({VmState.RUNNING}), state, **changes))
    await _end_vmm(machine)
    await _remove_surroundings(machine)


def _end_of(info: ExitInfo | None) -> tuple[VmState, str]:
    if info is None:
        return VmState.FAILED, "The machine's supervisor broke the protocol and the machine was ended."
    if info.guest_panicked:
        return VmState.FAILED, "The guest's kernel panicked."
    if info.guest_shutdown:
        return VmState.STOPPED, ""
    return VmState.FAILED, "The machine's VMM ended unexpectedly."


# Steps.


async def _greet(context: Context, vmm: Vmm, link: Link) -> GuestInfo:
    """The supervisor's first answer, unless the VMM ends before it."""
    hello = link.hello(deadline_s=context.settings.timeouts.boot_hello_s)
    guest = await first_of(hello, vmm.wait_exit())
    if guest is None:
        info = await vmm.wait_exit()
        raise _EndedEarly(f"exit_status={info.exit_status} last_output={info.last_output[-2000:]!r}")
    return guest


async def _shut_down(vmm: Vmm, grace_s: float) -> bool:
    """Whether the guest powered off by itself within the grace."""
    try:
        await vmm.request_shutdown()
    except VmmError as error:
        logger.warning("no shutdown was requested: %s evidence=%r", error, error.evidence[-2000:])
    waiting = asyncio.create_task(vmm.wait_exit())
    try:
        if await finished(waiting, grace_s):
            info = waiting.result()
            return info.guest_shutdown and not info.guest_panicked
        return False
    finally:
        waiting.cancel()
        await vmm.kill()


async def _end_vmm(machine: Machine) -> None:
    """Nothing of the machine runs afterwards, proven: by the VMM's own process and by the cgroup."""
    vmm = await machine.detach()
    if vmm is not None:
        await certainly(vmm.kill())
    if machine.vm.slot is not None:
        await certainly(machine.context.host.end_cgroup(machine.vm.slot))


async def _remove_surroundings(machine: Machine) -> None:
    """Names that only matter while a VMM runs. What fails here is tried again at the next start or destruction."""
    host, slot = machine.context.host, machine.vm.slot
    if slot is None:
        return
    for what, remove in (("network", host.remove_network), ("runtime directory", host.remove_runtime_dir)):
        try:
            await certainly(remove(slot))
        except HostFailure:
            logger.exception("left behind vm=%s what=%s", machine.vm.vm_id, what)


async def _undo(vm: Vm, what: str, effect: Callable[[], Coroutine[Any, Any, None]], left_behind: list[str]) -> None:
    try:
        await certainly(effect())
    except asyncio.CancelledError:
        left_behind.append(what)
        raise
    except Exception:
        # The rest is undone all the same; the row keeps its slot, so that the names are not used again.
        logger.exception("undo failed vm=%s what=%s", vm.vm_id, what)
        left_behind.append(what)


# Rows.


async def _move(
    context: Context, vm: Vm, expect: frozenset[VmState] | VmState, to: VmState, **changes: Unpack[VmChanges]
) -> Vm:
    now = context.now()
    return await context.db.write(lambda tx: vm_rows.move(tx, vm.vm_id, expect=expect, to=to, now=now, **changes))


async def _lose_memory(
    machine: Machine, expect: frozenset[VmState], to: VmState, **changes: Unpack[VmChanges]
) -> None:
    """Move the row, and with it every running job to `lost`, in one transaction; then show both."""
    now, vm_id = machine.context.now(), machine.vm.vm_id

    def lose(tx: sqlite3.Connection) -> tuple[Vm, list[Job]]:
        moved = vm_rows.move(tx, vm_id, expect=expect, to=to, now=now, **changes)
        job_rows.mark_lost(tx, vm_id, now)
        return moved, job_rows.of_vm(tx, vm_id)

    machine.vm, jobs = await machine.context.db.write(lose)
    machine.book.reload(jobs)


async def _record(machine: Machine, expect: VmState, to: VmState, **changes: Unpack[VmChanges]) -> None:
    async def move() -> None:
        machine.vm = await _move(machine.context, machine.vm, frozenset({expect, to}), to, **changes)

    await _until_recorded(machine, move)


async def _until_recorded(machine: Machine, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """What has happened must get into the store, however long that is full or held by somebody else."""
    pause = machine.context.settings.timeouts.retry_s
    while True:
        try:
            await certainly(write())
        except MicrovmError:
            logger.exception("not recorded, trying again vm=%s", machine.vm.vm_id)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _MAX_RETRY_S)
        else:
            return


# Words.


def _why_boot_failed(error: BaseException) -> str:
    match error:
        case asyncio.CancelledError():
            return "The creation was cut off."
        case HostFailure():
            return f"The host {error.reason}."
        case VmmError():
            return "The machine's VMM did not start; the operator finds the cause in the service log."
        case _EndedEarly():
            return "The machine's VMM ended during its boot; the operator finds the cause in the service log."
        case LinkLost():
            return "The guest did not answer in time after its boot."
        case GuestLied() | GuestRefused():
            return "The machine's supervisor broke the protocol after its boot."
        case MicrovmError():
            return error.message
        case _:
            return "The service failed to create it; the operator finds the cause in the service log."


def _log_failed_boot(vm: Vm, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        logger.info("creation cut off vm=%s", vm.vm_id)
        return
    evidence = error.evidence if isinstance(error, VmmError) else ""
    logger.error("boot failed vm=%s evidence=%r", vm.vm_id, evidence[-4000:], exc_info=error)
