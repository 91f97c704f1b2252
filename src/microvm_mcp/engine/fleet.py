"""All machines of this host: who owns which, what may be promised, and the engine port that the service speaks to.

The only lock across machines is held for admission: the arithmetic on what is in memory and the durable row that
makes it true. Everything else is one machine's business. Views are pure memory.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterable, Iterator

from microvm_mcp.engine import calls, operations, starts
from microvm_mcp.engine.certain import certainly, deadline, finished, left
from microvm_mcp.engine.context import Context
from microvm_mcp.engine.host_port import HostFailure
from microvm_mcp.engine.machine import Machine
from microvm_mcp.engine.recovery import recover_all
from microvm_mcp.errors import (
    Busy,
    FailedPrecondition,
    Internal,
    InvalidArguments,
    MicrovmError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from microvm_mcp.lifecycle import WITHOUT_VMM, Operation
from microvm_mcp.model import (
    CreateRequest,
    FilePage,
    FileWritten,
    Job,
    JobId,
    JobRequest,
    MachineView,
    OutputPage,
    ReceiptClaim,
    ReceiptPhase,
    Vm,
    VmId,
    VmState,
    WorkspaceName,
)
from microvm_mcp.policy import Reservation, admit, usage
from microvm_mcp.store import receipts as receipt_rows
from microvm_mcp.store import vms as vm_rows

logger = logging.getLogger(__name__)


class Fleet:
    """Implements `engine.port.Engine`. `start` before the first call, `close` after the last."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._machines: dict[WorkspaceName, dict[VmId, Machine]] = {}
        """In order of creation within a workspace; destroyed ones stay until they are pruned."""
        self._admission = asyncio.Lock()
        self._closing = False

    async def start(self) -> None:
        """Recover every machine. When it returns, each is in a stable state and nothing of ours runs unowned."""
        await self.prune()
        try:
            machines = await recover_all(self._context, self._build)
        except HostFailure as error:
            # Names that are not free cannot be given to new machines.
            logger.exception("recovery failed")
            raise FailedPrecondition(
                f"The host {error.reason}, left by an earlier service; mend what the log names and start again."
            ) from error
        for machine in machines:
            self._keep(machine)

    async def close(self) -> None:
        """Let go of all machines; VMMs run on."""
        self._closing = True
        async with self._admission:
            machines = list(self._all())
        await asyncio.gather(*(machine.close() for machine in machines))

    # Looking.

    def view(self, workspace: WorkspaceName, vm_id: VmId) -> MachineView:
        return self._owned(workspace, vm_id).view()

    def views(self, workspace: WorkspaceName, *, limit: int, after: VmId | None) -> tuple[list[MachineView], bool]:
        owned = self._machines.get(workspace, {})
        if after is not None and after not in owned:
            raise NotFound("The cursor names no machine of this workspace; list again without a cursor.")
        behind = after is None
        page: list[MachineView] = []
        for vm_id, machine in owned.items():
            if behind and machine.vm.state is not VmState.DESTROYED:
                if len(page) == limit:
                    return page, True
                page.append(machine.view())
            behind = behind or vm_id == after
        return page, False

    async def settle(self, workspace: WorkspaceName, vm_id: VmId, *, wait_s: float) -> MachineView:
        machine = self._owned(workspace, vm_id)
        await machine.settle(self._bounded(wait_s))
        return machine.view()

    # Machines.

    async def create(self, request: CreateRequest, receipt: ReceiptClaim, *, wait_s: float) -> MachineView:
        until = deadline(self._bounded(wait_s))
        # Between the durable row and the machine that owns it there is nothing a caller's going away could cut.
        machine = await certainly(self._admit(request, receipt))
        await machine.settle(left(until))
        return machine.view()

    async def _admit(self, request: CreateRequest, receipt: ReceiptClaim) -> Machine:
        context, settings = self._context, self._context.settings
        disk_bytes = settings.image_bytes if request.disk_bytes is None else request.disk_bytes
        if disk_bytes < settings.image_bytes:
            gib = -(-settings.image_bytes // (1 << 30))
            raise InvalidArguments.field(
                "disk_gib", f"is less than the image's size; at least {gib} or leave it out"
            )
        async with self._admission:
            if self._closing:
                raise Unavailable("The service is stopping; repeat the call when it runs again.")
            await self._refuse_over_limits(request, disk_bytes)
            vm = await context.db.write(lambda tx: self._insert(tx, request, receipt, disk_bytes))
            machine = self._build(vm, [])
            self._keep(machine)
            machine.begin_create(operations.boot)
        return machine

    async def _refuse_over_limits(self, request: CreateRequest, disk_bytes: int) -> None:
        limits = self._context.settings.limits
        try:
            free_bytes = await self._context.host.free_bytes()
        except HostFailure as error:
            raise Unavailable("The host does not tell its free space; retry, then ask the operator.") from error
        refusal = admit(
            Reservation(request.memory_mib, disk_bytes),
            limits=limits,
            quota=request.limits,
            on_host=usage(_holding(self._all()), limits.disk_reserve),
            in_workspace=usage(_holding(self._machines.get(request.workspace, {}).values()), limits.disk_reserve),
            free_bytes=free_bytes,
        )
        if refusal is not None:
            raise refusal.error()

    def _insert(self, tx: sqlite3.Connection, request: CreateRequest, receipt: ReceiptClaim, disk_bytes: int) -> Vm:
        context, now = self._context, self._context.now()
        slot = vm_rows.take_slot(tx, context.settings.slots)
        if slot is None:
            raise ResourceExhausted(
                f"All {context.settings.slots} places for machines on this host are taken: destroy a machine.",
                details={"limit": "slots", "scope": "host", "allowed": context.settings.slots},
            )
        vm = Vm(
            vm_id=request.vm_id,
            workspace=request.workspace,
            state=VmState.CREATING,
            slot=slot,
            memory_mib=request.memory_mib,
            vcpus=request.vcpus,
            disk_bytes=disk_bytes,
            network=request.network,
            idle_seconds=request.idle_seconds,
            idle_mode=request.idle_mode,
            created_at=now,
            state_since=now,
            driver=context.driver.capabilities.name,
            image_digest=context.settings.image_digest,
            host_boot_id=context.host.boot_id(),
            name=request.name,
        )
        vm_rows.insert(tx, vm)
        try:
            receipt_rows.claim(
                tx, request.workspace, request.request_id, receipt, ReceiptPhase.DONE, now=now, vm_id=vm.vm_id
            )
        except receipt_rows.ReceiptTaken as error:
            raise Busy(
                "Another call with this request_id is being executed; repeat the call to join it."
            ) from error
        return vm

    async def destroy(self, workspace: WorkspaceName, vm_id: VmId, *, wait_s: float) -> MachineView:
        machine = self._owned(workspace, vm_id)
        if machine.vm.state is not VmState.DESTROYED:
            task = machine.operate(Operation.DESTROY, operations.destroy)
            if await finished(task, self._bounded(wait_s)):
                _raise_what_went_wrong(task)
        return machine.view()

    async def stop_workspace(self, workspace: WorkspaceName, *, wait_s: float) -> int:
        until = deadline(wait_s)
        owned = list(self._machines.get(workspace, {}).values())
        stopped = await asyncio.gather(*(self._stop(machine, until) for machine in owned))
        # A stop that failed halfway leaves its machine in a transition, whatever became of the VMM.
        alive = sum(not machine.is_settled() or machine.vm.state not in WITHOUT_VMM for machine in owned)
        if alive:
            raise Unavailable(f"{alive} machines of the workspace are still being ended; repeat the call.")
        return sum(stopped)

    async def _stop(self, machine: Machine, until: float) -> bool:
        """Whether a VMM was ended for it."""
        creating = machine.vm.state is VmState.CREATING
        if creating:
            await machine.cut_off(Operation.CREATE)
        await machine.settle(left(until))
        if machine.vm.state not in {VmState.RUNNING, VmState.STOPPING}:
            return creating
        try:
            await finished(machine.operate(Operation.STOP, operations.stop), left(until))
        except Busy:
            return False
        return True

    # Work in machines.

    async def start_job(
        self, workspace: WorkspaceName, vm_id: VmId, job: JobRequest, receipt: ReceiptClaim, *, wait_s: float
    ) -> tuple[Job, OutputPage]:
        return await starts.start_job(self._owned(workspace, vm_id), job, receipt, wait_s=wait_s)

    async def resolve_job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job | None:
        return await starts.resolve_job(self._owned(workspace, vm_id), job_id)

    async def job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job:
        return calls.job_of(self._owned(workspace, vm_id), job_id)

    async def job_output(
        self,
        workspace: WorkspaceName,
        vm_id: VmId,
        job_id: JobId,
        *,
        stdout: int,
        stderr: int,
        limit: int,
        wait_s: float,
    ) -> tuple[Job, OutputPage]:
        machine = self._owned(workspace, vm_id)
        return await calls.job_output(machine, job_id, stdout=stdout, stderr=stderr, limit=limit, wait_s=wait_s)

    async def cancel_job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job:
        return await calls.cancel_job(self._owned(workspace, vm_id), job_id)

    async def read_file(
        self, workspace: WorkspaceName, vm_id: VmId, path: str, *, offset: int, length: int
    ) -> FilePage:
        return await calls.read_file(self._owned(workspace, vm_id), path, offset=offset, length=length)

    async def write_file(
        self, workspace: WorkspaceName, vm_id: VmId, path: str, data: bytes, *, offset: int | None, mode: int | None
    ) -> FileWritten:
        return await calls.write_file(self._owned(workspace, vm_id), path, data, offset=offset, mode=mode)

    # The table of machines.

    def _owned(self, workspace: WorkspaceName, vm_id: VmId) -> Machine:
        machine = self._machines.get(workspace, {}).get(vm_id)
        if machine is None:
            raise NotFound("Unknown machine; vm_list shows those of this workspace.")
        return machine

    def _build(self, vm: Vm, jobs: list[Job]) -> Machine:
        return Machine(self._context, vm, jobs, record_end=operations.record_end)

    def _keep(self, machine: Machine) -> None:
        self._machines.setdefault(machine.vm.workspace, {})[machine.vm.vm_id] = machine

    def _all(self) -> Iterator[Machine]:
        return (machine for owned in self._machines.values() for machine in owned.values())

    async def prune(self) -> None:
        """Forget destroyed machines that are old, but the last of each workspace. To be called now and then."""
        settings = self._context.settings
        older_than, keep = self._context.now() - settings.keep_destroyed_s, settings.keep_destroyed
        await self._context.db.write(lambda tx: vm_rows.prune_destroyed(tx, older_than=older_than, keep=keep))
        for owned in self._machines.values():
            gone = [machine.vm for machine in owned.values() if machine.vm.state is VmState.DESTROYED]
            gone.sort(key=lambda vm: vm.state_since, reverse=True)
            for vm in gone[keep:]:
                if vm.state_since < older_than:
                    del owned[vm.vm_id]

    def _bounded(self, wait_s: float) -> float:
        return min(wait_s, self._context.settings.timeouts.call_s)


def _holding(machines: Iterable[Machine]) -> Iterator[Reservation]:
    """What is reserved: by every machine that may have something on the host."""
    return (
        Reservation(machine.vm.memory_mib, machine.vm.disk_bytes)
        for machine in machines
        if machine.vm.slot is not None
    )


def _raise_what_went_wrong(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        raise Unavailable("The service is stopping; repeat the call when it runs again.")
    error = task.exception()
    if isinstance(error, MicrovmError):
        raise error
    if error is not None:
        raise Internal from error
