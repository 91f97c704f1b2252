"""The engine port: what the service asks of the machines of this host (later: of a host).

Plain data in and out, waits and deadlines as numbers, no callbacks, handles or paths, so that a remote engine can
stand behind the same calls. The workspace is part of every key: a foreign id and an unknown id raise the same
NotFound. All calls raise only the public errors of `microvm_mcp.errors`: Unavailable means certainly not executed,
OutcomeUnknown that it may have been.

Operations belong to the machine: a caller that is cancelled or stops waiting half-does nothing. `wait_s` bounds how
long a call waits for the operation that it started or joined; then it returns the state reached.
"""

from __future__ import annotations

from typing import Protocol

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
    VmId,
    WorkspaceName,
)


class Engine(Protocol):
    def view(self, workspace: WorkspaceName, vm_id: VmId) -> MachineView:
        """From memory, no I/O. Destroyed machines stay visible for as long as their rows are kept."""

    def views(self, workspace: WorkspaceName, *, limit: int, after: VmId | None) -> tuple[list[MachineView], bool]:
        """Up to `limit` machines that are not destroyed, oldest first, behind `after`; and whether more follow."""

    async def create(self, request: CreateRequest, receipt: ReceiptClaim, *, wait_s: float) -> MachineView:
        """Admission, the durable row and the receipt `done` are one transaction; booting goes on by itself.

        Busy if (workspace, request_id) has a receipt already. ResourceExhausted and other refusals leave none.
        """

    async def settle(self, workspace: WorkspaceName, vm_id: VmId, *, wait_s: float) -> MachineView:
        """Wait up to `wait_s` until no operation is in progress."""

    async def destroy(self, workspace: WorkspaceName, vm_id: VmId, *, wait_s: float) -> MachineView:
        """Idempotent. Ends jobs and VMM, proves it dead, gives everything back."""

    async def start_job(
        self, workspace: WorkspaceName, vm_id: VmId, job: JobRequest, receipt: ReceiptClaim, *, wait_s: float
    ) -> tuple[Job, OutputPage]:
        """Wakes, sends, records. The receipt is made `sent` together with the job's row, then moved to `done`.

        Busy if the request has a receipt already. A refusal by the guest takes row and receipt back; a lost answer
        is asked for again by job id, and only what then stays unknown raises OutcomeUnknown with the receipt left
        `sent`.
        """

    async def resolve_job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job | None:
        """For a receipt left `sent`: ask the machine. The job if it exists, None if that cannot be known."""

    async def job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job:
        """The job's present state; never wakes."""

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
        """Up to `limit` bytes of each stream. Once the guest's memory is gone: what was fetched before."""

    async def cancel_job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job: ...

    async def read_file(
        self, workspace: WorkspaceName, vm_id: VmId, path: str, *, offset: int, length: int
    ) -> FilePage: ...

    async def write_file(
        self, workspace: WorkspaceName, vm_id: VmId, path: str, data: bytes, *, offset: int | None, mode: int | None
    ) -> FileWritten: ...

    async def stop_workspace(self, workspace: WorkspaceName, *, wait_s: float) -> int:
        """Destroy nothing, end every VMM of the workspace and prove it dead; returns how many."""
