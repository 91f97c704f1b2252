"""What callers get back: one open model per tool, made from the engine's plain data.

Times are RFC 3339 strings in UTC with milliseconds. Open means that later versions add fields; the ones here keep
name, type and meaning. States are plain strings, so that a new one breaks no client that validates what it gets.
A field that does not apply is null; a field without a default in its model is always there.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from microvm_mcp.model import FINAL_JOB_STATES, Failure, FilePage, FileWritten, Job, JobState, MachineView, VmState

_GIB = 1024**3
_ASLEEP = frozenset({VmState.PAUSED, VmState.HIBERNATED})

# The advertised schemas name fields and types and stop there: they are read by programs, and cost a model tokens.
OptionalInt = Annotated[int | None, WithJsonSchema({"type": ["integer", "null"]})]
OptionalText = Annotated[str | None, WithJsonSchema({"type": ["string", "null"]})]
Number = Annotated[int | float, WithJsonSchema({"type": "number"})]
PerStream = Annotated[dict[str, int], WithJsonSchema({"type": "object"})]
GapPerStream = Annotated[dict[str, dict[str, int]], WithJsonSchema({"type": "object"})]
Texts = Annotated[list[str], WithJsonSchema({"type": "array"})]


class Result(BaseModel):
    model_config = ConfigDict(frozen=True)


class FailureResult(Result):
    at: str
    reason: str
    lost: str
    cold_boot_possible: bool


OptionalFailure = Annotated[FailureResult | None, WithJsonSchema({"type": ["object", "null"]})]


class VmCreated(Result):
    vm_id: str
    state: str
    started: str
    reason: str
    name: OptionalText
    memory_mib: int
    vcpus: int
    disk_gib: Number
    network: str
    created_at: str
    failure: OptionalFailure


class VmSummary(Result):
    vm_id: str
    name: str | None
    state: str
    memory_mib: int
    vcpus: int
    disk_gib: int | float
    network: str
    created_at: str
    active_jobs: int


class VmPage(Result):
    vms: Annotated[list[VmSummary], WithJsonSchema({"type": "array"})]
    next_cursor: OptionalText


class JobSummary(Result):
    job_id: str
    request_id: str
    state: str
    frozen: bool
    exit_code: OptionalInt
    started_at: str
    finished_at: OptionalText
    truncated: bool


class JobStatus(JobSummary):
    signal: OptionalInt
    timeout_seconds: OptionalInt
    detached: int
    log_path: str


class VmDetails(Result):
    vm_id: str
    name: OptionalText
    state: str
    state_since: str
    created_at: str
    memory_mib: int
    vcpus: int
    disk_gib: Number
    network: str
    template: OptionalText
    awake_because: Texts
    failure: OptionalFailure
    outdated: bool
    jobs: Annotated[list[JobSummary], WithJsonSchema({"type": "array"})]


class VmGone(Result):
    vm_id: str
    state: str


class JobStarted(Result):
    """The fields of the second half are there when the call waited."""

    job_id: str
    state: str
    exit_code: OptionalInt = None
    encoding: str = ""
    stdout: str = ""
    stderr: str = ""
    next_cursor: PerStream = {}
    decoding_errors: PerStream = {}
    omitted: GapPerStream = {}
    truncated: bool = False
    timed_out: bool = False
    log_path: str = ""
    service_time_us: int = 0


class JobOutput(Result):
    """Text under `stdout` and `stderr`, or base64 under the names that say so."""

    job_id: str
    state: str
    exit_code: OptionalInt
    encoding: str
    stdout: str = ""
    stderr: str = ""
    stdout_base64: str = ""
    stderr_base64: str = ""
    next_cursor: PerStream
    decoding_errors: PerStream = {}
    omitted: GapPerStream
    truncated: bool
    timed_out: bool
    log_path: str


class FileContent(Result):
    content_base64: str
    size: int
    offset: int
    next_offset: int
    eof: bool
    mode: str


class FileStored(Result):
    size: int
    mode: str


def timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def vm_created(view: MachineView, *, reason: str) -> VmCreated:
    vm = view.vm
    return VmCreated(
        vm_id=vm.vm_id,
        state=vm.state,
        started="cold",
        reason=reason,
        name=vm.name,
        memory_mib=vm.memory_mib,
        vcpus=vm.vcpus,
        disk_gib=_gib(vm.disk_bytes),
        network=vm.network,
        created_at=timestamp(vm.created_at),
        failure=_failure(vm.failure),
    )


def vm_summary(view: MachineView) -> VmSummary:
    vm = view.vm
    return VmSummary(
        vm_id=vm.vm_id,
        name=vm.name,
        state=vm.state,
        memory_mib=vm.memory_mib,
        vcpus=vm.vcpus,
        disk_gib=_gib(vm.disk_bytes),
        network=vm.network,
        created_at=timestamp(vm.created_at),
        active_jobs=sum(job.state is JobState.RUNNING for job in view.jobs),
    )


def vm_details(view: MachineView) -> VmDetails:
    """Jobs newest first: a client that reads only the head of a long answer sees what it did last."""
    vm = view.vm
    newest_first = sorted(view.jobs, key=lambda job: job.started_at, reverse=True)
    return VmDetails(
        vm_id=vm.vm_id,
        name=vm.name,
        state=vm.state,
        state_since=timestamp(vm.state_since),
        created_at=timestamp(vm.created_at),
        memory_mib=vm.memory_mib,
        vcpus=vm.vcpus,
        disk_gib=_gib(vm.disk_bytes),
        network=vm.network,
        template=vm.template,
        awake_because=list(view.awake_because),
        failure=_failure(vm.failure),
        outdated=view.outdated,
        jobs=[_job_summary(job, vm.state) for job in newest_first],
    )


def job_status(job: Job, vm_state: VmState) -> JobStatus:
    return JobStatus(
        **dict(_job_summary(job, vm_state)),
        signal=job.signal,
        timeout_seconds=job.timeout_seconds,
        detached=job.detached,
        log_path=job.log_path,
    )


def file_content(page: FilePage, content_base64: str) -> FileContent:
    end = page.offset + len(page.data)
    return FileContent(
        content_base64=content_base64,
        size=page.size,
        offset=page.offset,
        next_offset=end,
        eof=end >= page.size,
        mode=_mode(page.mode),
    )


def file_stored(written: FileWritten) -> FileStored:
    return FileStored(size=written.size, mode=_mode(written.mode))


def _job_summary(job: Job, vm_state: VmState) -> JobSummary:
    return JobSummary(
        job_id=job.job_id,
        request_id=job.request_id,
        state=job.state,
        frozen=vm_state in _ASLEEP and job.state not in FINAL_JOB_STATES,
        exit_code=job.exit_code,
        started_at=timestamp(job.started_at),
        finished_at=None if job.finished_at is None else timestamp(job.finished_at),
        truncated=job.truncated,
    )


def _failure(failure: Failure | None) -> FailureResult | None:
    if failure is None:
        return None
    return FailureResult(
        at=timestamp(failure.at),
        reason=failure.reason,
        lost=failure.lost,
        cold_boot_possible=failure.cold_boot_possible,
    )


def _gib(size_bytes: int) -> int | float:
    """Whole where it is whole, so that what was asked for comes back as it was written."""
    whole, rest = divmod(size_bytes, _GIB)
    return whole if rest == 0 else round(size_bytes / _GIB, 3)


def _mode(mode: int) -> str:
    return format(mode & 0o7777, "04o")
