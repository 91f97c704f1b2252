"""An engine in memory, for tests of the service and the doors: the port's promises without a machine.

Receipts are kept in the real database as the port says. Commands are a small script language:

    echo TEXT | err TEXT | exit N       output on either stream, exit status
    bytes HEX | flood N                 raw bytes; N bytes on stdout with the middle forgotten
    sleep [S] | drip S                  runs S seconds (or for ever); drip writes half a character at each end
    refuse                              the guest refuses, nothing runs
    lose | lose-but-run                 the answer is lost; the second is found when it is asked for
    crash                               an error that nobody foresaw
anything else prints itself and exits 0. Time is the event loop's; nothing runs in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from microvm_mcp.errors import Busy, Conflict, FailedPrecondition, NotFound, OutcomeUnknown, ResourceExhausted
from microvm_mcp.model import (
    FINAL_JOB_STATES,
    CreateRequest,
    FilePage,
    FileWritten,
    Job,
    JobId,
    JobReport,
    JobRequest,
    JobState,
    MachineView,
    OutputPage,
    ReceiptClaim,
    ReceiptPhase,
    RequestId,
    Slot,
    StreamPage,
    Vm,
    VmId,
    VmState,
    WorkspaceName,
)
from microvm_mcp.service.clock import Clock, SystemClock
from microvm_mcp.store import receipts
from microvm_mcp.store.database import Database
from microvm_mcp.store.fetched import page_of

KEPT_BYTES = 64 * 1024
"""Head and tail of a flood, each."""
MAX_ACTIVE_JOBS = 4


@dataclass
class _FakeJob:
    row: Job
    stdout: bytes = b""
    stderr: bytes = b""
    code: int = 0
    ends_at: float = 0.0
    last_words: bytes = b""
    """Written to stdout at the end."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    fetched: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    """Bytes of both streams that callers have seen, by offset."""
    told: tuple[int, int, bool] = (0, 0, False)
    """What was written then, and whether that was all."""


@dataclass
class _FakeVm:
    vm: Vm
    ready_at: float
    jobs: dict[JobId, _FakeJob] = field(default_factory=dict)
    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)


class FakeEngine:
    def __init__(self, db: Database, clock: Clock | None = None) -> None:
        self._db = db
        self._clock = clock or SystemClock()
        self._vms: dict[VmId, _FakeVm] = {}
        self.boot_s = 0.0
        """How long later creations take."""
        self.commands: list[str] = []
        """What really ran, in order."""
        self.before_start: Callable[[], asyncio.Future[None]] | None = None
        """Awaited before a job is sent; a test holds a call in progress with it."""

    # What the port asks for.

    def view(self, workspace: WorkspaceName, vm_id: VmId) -> MachineView:
        machine = self._find(workspace, vm_id)
        jobs = tuple(self._seen(job) for job in machine.jobs.values())
        active = [job for job in jobs if job.state is JobState.RUNNING]
        because = (f"{len(active)} jobs",) if active else ()
        return MachineView(vm=machine.vm, jobs=jobs, awake_because=because, outdated=False)

    def views(self, workspace: WorkspaceName, *, limit: int, after: VmId | None) -> tuple[list[MachineView], bool]:
        ids = [vm_id for vm_id, machine in self._vms.items() if machine.vm.workspace == workspace]
        if after is not None:
            self._find(workspace, after)
            ids = ids[ids.index(after) + 1 :]
        alive = [vm_id for vm_id in ids if self._vms[vm_id].vm.state is not VmState.DESTROYED]
        return [self.view(workspace, vm_id) for vm_id in alive[:limit]], len(alive) > limit

    async def create(self, request: CreateRequest, receipt: ReceiptClaim, *, wait_s: float) -> MachineView:
        mine = [
            machine.vm
            for machine in self._vms.values()
            if machine.vm.workspace == request.workspace and machine.vm.state is not VmState.DESTROYED
        ]
        if request.limits.max_vms is not None and len(mine) >= request.limits.max_vms:
            raise ResourceExhausted("The workspace's quota of VMs is used up.", details={"max_vms": len(mine)})
        if request.name is not None and any(vm.name == request.name for vm in mine):
            raise Conflict("A VM of this workspace has that name; choose another one.")
        await self._claim(request.workspace, request.request_id, receipt, ReceiptPhase.DONE, request.vm_id)
        now = self._clock.wall()
        vm = Vm(
            vm_id=request.vm_id,
            workspace=request.workspace,
            state=VmState.CREATING,
            slot=Slot(len(self._vms)),
            memory_mib=request.memory_mib,
            vcpus=request.vcpus,
            disk_bytes=request.disk_bytes or 3 * 1024**3,
            network=request.network,
            idle_seconds=request.idle_seconds,
            idle_mode=request.idle_mode,
            created_at=now,
            state_since=now,
            driver="fake",
            image_digest="0" * 64,
            name=request.name,
        )
        self._vms[vm.vm_id] = _FakeVm(vm, ready_at=self._now() + self.boot_s)
        return await self.settle(request.workspace, vm.vm_id, wait_s=wait_s)

    async def settle(self, workspace: WorkspaceName, vm_id: VmId, *, wait_s: float) -> MachineView:
        machine = self._find(workspace, vm_id)
        if machine.vm.state is VmState.CREATING:
            await asyncio.sleep(max(0.0, min(wait_s, machine.ready_at - self._now())))
        return self.view(workspace, vm_id)

    async def destroy(self, workspace: WorkspaceName, vm_id: VmId, *, wait_s: float) -> MachineView:
        machine = self._find(workspace, vm_id)
        machine.vm = replace(machine.vm, state=VmState.DESTROYED, slot=None)
        for job in machine.jobs.values():
            if self._seen(job).state is JobState.RUNNING:
                job.row = replace(job.row, state=JobState.LOST, finished_at=self._clock.wall())
                job.cancelled.set()
        return self.view(workspace, vm_id)

    async def start_job(
        self, workspace: WorkspaceName, vm_id: VmId, job: JobRequest, receipt: ReceiptClaim, *, wait_s: float
    ) -> tuple[Job, OutputPage]:
        machine = self._running(workspace, vm_id)
        if self.before_start is not None:
            await self.before_start()
        if sum(self._seen(one).state is JobState.RUNNING for one in machine.jobs.values()) >= MAX_ACTIVE_JOBS:
            raise Busy("Four jobs are active on this VM; wait for one or cancel it.")
        verb, _, rest = job.command.partition(" ")
        if verb == "refuse":
            raise FailedPrecondition("The machine refused the job.")
        if verb == "crash":
            raise RuntimeError("a fault with a secret in it")
        await self._claim(workspace, job.request_id, receipt, ReceiptPhase.SENT, vm_id, job.job_id)
        if verb == "lose":
            raise OutcomeUnknown("The machine did not answer.")
        started = self._run(job, vm_id, workspace, verb, rest)
        machine.jobs[job.job_id] = started
        self.commands.append(job.command)
        if verb == "lose-but-run":
            raise OutcomeUnknown("The machine did not answer.")
        now = self._clock.wall()
        await self._db.write(lambda tx: receipts.finish(tx, workspace, job.request_id, job.job_id, now=now))
        await self._wait(started, wait_s)
        return self._page(started, 0, 0, 16 * 1024)

    async def resolve_job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job | None:
        found = self._find(workspace, vm_id).jobs.get(job_id)
        return None if found is None else self._seen(found)

    async def job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job:
        return self._seen(self._job(workspace, vm_id, job_id))

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
        found = self._job(workspace, vm_id, job_id)
        if self._find(workspace, vm_id).vm.state is not VmState.RUNNING:
            return self._kept(found, stdout, stderr, limit)
        if stdout >= len(self._stdout(found)) and stderr >= len(found.stderr):
            await self._wait(found, wait_s)
        return self._page(found, stdout, stderr, limit)

    async def cancel_job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job:
        found = self._job(workspace, vm_id, job_id)
        if self._seen(found).state is JobState.RUNNING:
            found.row = replace(found.row, state=JobState.CANCELLED, signal=9, finished_at=self._clock.wall())
            found.cancelled.set()
        return self._seen(found)

    async def read_file(
        self, workspace: WorkspaceName, vm_id: VmId, path: str, *, offset: int, length: int
    ) -> FilePage:
        content = self._running(workspace, vm_id).files.get(_under_workspace(path))
        if content is None:
            raise NotFound("There is no such file.")
        data, mode = content
        return FilePage(data=data[offset : offset + length], offset=offset, size=len(data), mode=mode)

    async def write_file(
        self, workspace: WorkspaceName, vm_id: VmId, path: str, data: bytes, *, offset: int | None, mode: int | None
    ) -> FileWritten:
        files = self._running(workspace, vm_id).files
        name = _under_workspace(path)
        old, old_mode = files.get(name, (b"", 0o644))
        if offset is not None and offset != len(old):
            raise Conflict(f"The file has {len(old)} bytes; append at that offset.")
        content = (old if offset is not None else b"") + data
        files[name] = (content, old_mode if mode is None else mode)
        return FileWritten(size=len(content), mode=files[name][1])

    async def stop_workspace(self, workspace: WorkspaceName, *, wait_s: float) -> int:
        running = [
            machine
            for machine in self._vms.values()
            if machine.vm.workspace == workspace and machine.vm.state is VmState.RUNNING
        ]
        for machine in running:
            machine.vm = replace(machine.vm, state=VmState.STOPPED)
        return len(running)

    # What makes it tick.

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _find(self, workspace: WorkspaceName, vm_id: VmId) -> _FakeVm:
        machine = self._vms.get(vm_id)
        if machine is None or machine.vm.workspace != workspace:
            raise NotFound("There is no such VM in this workspace; vm_list shows those there are.")
        if machine.vm.state is VmState.CREATING and self._now() >= machine.ready_at:
            machine.vm = replace(machine.vm, state=VmState.RUNNING, state_since=self._clock.wall())
        return machine

    def _running(self, workspace: WorkspaceName, vm_id: VmId) -> _FakeVm:
        machine = self._find(workspace, vm_id)
        if machine.vm.state is not VmState.RUNNING:
            raise FailedPrecondition(f"The VM is {machine.vm.state}; this needs a running one.")
        return machine

    def _job(self, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> _FakeJob:
        found = self._find(workspace, vm_id).jobs.get(job_id)
        if found is None:
            raise NotFound("There is no such job on this VM; vm_status lists those there are.")
        return found

    async def _claim(
        self,
        workspace: WorkspaceName,
        request_id: RequestId,
        receipt: ReceiptClaim,
        phase: ReceiptPhase,
        vm_id: VmId,
        job_id: JobId | None = None,
    ) -> None:
        now = self._clock.wall()
        try:
            await self._db.write(
                lambda tx: receipts.claim(
                    tx, workspace, request_id, receipt, phase, now=now, vm_id=vm_id, job_id=job_id
                )
            )
        except receipts.ReceiptTaken as error:
            raise Busy("Another call with this request_id is in progress; repeat it to join it.") from error

    def _run(self, job: JobRequest, vm_id: VmId, workspace: WorkspaceName, verb: str, rest: str) -> _FakeJob:
        row = Job(
            job_id=job.job_id,
            vm_id=vm_id,
            workspace=workspace,
            request_id=job.request_id,
            state=JobState.RUNNING,
            started_at=self._clock.wall(),
            timeout_seconds=job.timeout_seconds,
            log_path=f"/var/lib/microvm/jobs/{job.job_id}/output.log",
        )
        out = _FakeJob(row, ends_at=self._now())
        if verb == "echo":
            out.stdout = f"{rest}\n".encode()
        elif verb == "err":
            out.stderr = f"{rest}\n".encode()
        elif verb == "exit":
            out.code = int(rest)
        elif verb == "bytes":
            out.stdout = bytes.fromhex(rest)
        elif verb == "flood":
            out.stdout = bytes(ord("a") + index % 26 for index in range(int(rest)))
            out.row = replace(out.row, truncated=int(rest) > 2 * KEPT_BYTES)
        elif verb == "sleep":
            out.ends_at += float(rest or "inf")
        elif verb == "drip":
            out.ends_at += float(rest)
            out.stdout, out.last_words = "é".encode()[:1], "é".encode()[1:]
        else:
            out.stdout = f"{job.command}\n".encode()
        return out

    def _seen(self, job: _FakeJob) -> Job:
        if job.row.state is JobState.RUNNING and self._now() >= job.ends_at:
            job.stdout += job.last_words
            job.last_words = b""
            job.row = replace(job.row, state=JobState.COMPLETED, exit_code=job.code, finished_at=self._clock.wall())
        return job.row

    def _stdout(self, job: _FakeJob) -> bytes:
        self._seen(job)
        return job.stdout

    async def _wait(self, job: _FakeJob, wait_s: float) -> None:
        if self._seen(job).state in FINAL_JOB_STATES or wait_s <= 0:
            return
        try:
            async with asyncio.timeout(min(wait_s, max(0.0, job.ends_at - self._now()) + 0.001)):
                await job.cancelled.wait()
        except TimeoutError:
            pass

    def _page(self, job: _FakeJob, stdout: int, stderr: int, limit: int) -> tuple[Job, OutputPage]:
        row = self._seen(job)
        report = JobReport(
            job_id=row.job_id,
            request_id=row.request_id,
            state=row.state,
            started_at=row.started_at,
            finished_at=row.finished_at,
            exit_code=row.exit_code,
            signal=row.signal,
            truncated=row.truncated,
            detached=row.detached,
            log_path=row.log_path,
        )
        page = OutputPage(report, _slice(job.stdout, stdout, limit), _slice(job.stderr, stderr, limit))
        for seen, one in zip(job.fetched, (page.stdout, page.stderr), strict=True):
            seen.update(enumerate(one.data, one.offset))
        job.told = (page.stdout.written, page.stderr.written, row.state in FINAL_JOB_STATES)
        return row, page

    def _kept(self, job: _FakeJob, stdout: int, stderr: int, limit: int) -> tuple[Job, OutputPage]:
        """The machine is gone: what was fetched before."""
        fetched, told = job.fetched, job.told
        row, live = self._page(job, 0, 0, 0)
        job.told = told
        pages = [
            page_of([(at, bytes([seen[at]])) for at in sorted(seen)], written, offset, limit)
            for seen, written, offset in zip(fetched, told, (stdout, stderr), strict=False)
        ]
        whole = told[2] and not any(page.gap_bytes for page in pages)
        return row, OutputPage(replace(live.report, truncated=row.truncated or not whole), *pages)


def _slice(data: bytes, offset: int, limit: int) -> StreamPage:
    gap_bytes = max(0, len(data) - 2 * KEPT_BYTES)
    gap_end = KEPT_BYTES + gap_bytes
    if gap_bytes and KEPT_BYTES <= offset < gap_end:
        offset = gap_end
    end = min(len(data), offset + limit)
    if gap_bytes and offset < KEPT_BYTES:
        end = min(end, KEPT_BYTES)
    return StreamPage(
        offset=offset,
        data=data[offset:end],
        written=len(data),
        gap_from=KEPT_BYTES if gap_bytes else len(data),
        gap_bytes=gap_bytes,
    )


def _under_workspace(path: str) -> str:
    return path.removeprefix("/workspace/")
