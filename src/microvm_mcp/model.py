"""Plain frozen data that every layer shares: ids, rows, requests and reports. No I/O, no behaviour.

Times are seconds since the epoch (`float`) unless the name says otherwise; sizes carry their unit in the name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NewType

VmId = NewType("VmId", str)
"""`vm-` and 96 random bits; opaque, never reused."""
JobId = NewType("JobId", str)
"""`job-` and 96 random bits; chosen by the host before the guest hears of the job."""
WorkspaceName = NewType("WorkspaceName", str)
TokenId = NewType("TokenId", str)
"""Names a token without opening anything; safe to print and to log."""
RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
"""128 random bits as hex, made once per state directory; the first 8 digits go into host names."""
Slot = NewType("Slot", int)
"""Small integer from which UID, names, addresses and cgroup of a machine on the host derive."""

Network = Literal["off", "on"]
IdleMode = Literal["hibernate", "pause"]
Shell = Literal["login", "plain"]


class VmState(StrEnum):
    """Stable states, and the transitions between them (whose names end in `ing` and which an operation owns)."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    HIBERNATING = "hibernating"
    HIBERNATED = "hibernated"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    DESTROYING = "destroying"
    DESTROYED = "destroyed"


class JobState(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    LOST = "lost"


FINAL_JOB_STATES = frozenset({JobState.COMPLETED, JobState.CANCELLED, JobState.TIMED_OUT, JobState.LOST})


@dataclass(frozen=True, slots=True)
class Limits:
    """A workspace's quota. None: only the host's limits apply."""

    max_vms: int | None = None
    max_memory_mib: int | None = None
    max_storage_gib: int | None = None


@dataclass(frozen=True, slots=True)
class Workspace:
    name: WorkspaceName
    allow_network: bool
    limits: Limits
    created_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request acts as. Made by the service from a token; nothing in a request can name it."""

    workspace: WorkspaceName
    token_id: TokenId
    allow_network: bool
    limits: Limits


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a machine failed, as its owner sees it: no host paths, no addresses."""

    at: float
    reason: str
    lost: str
    """What is lost, in words: "memory and running jobs; the disk is kept"."""
    cold_boot_possible: bool


@dataclass(frozen=True, slots=True)
class Vm:
    """One durable row. The live object that owns its operations is `engine.machine.Machine`."""

    vm_id: VmId
    workspace: WorkspaceName
    state: VmState
    slot: Slot | None
    """None once nothing on the host belongs to the machine any more."""
    memory_mib: int
    vcpus: int
    disk_bytes: int
    """Virtual size."""
    network: Network
    idle_seconds: int
    idle_mode: IdleMode
    created_at: float
    state_since: float
    driver: str
    image_digest: str
    incarnation: int = 1
    """Counts boots and wakes; evidence from another incarnation is void."""
    host_boot_id: str = ""
    """Boot id of the host on which the VMM was started."""
    name: str | None = None
    template: str | None = None
    failure: Failure | None = None
    customised: bool = False
    vmm_pid: int | None = None
    vmm_started_ticks: int | None = None
    """Start time of the VMM's process in clock ticks since host boot: with the pid, an identity."""


@dataclass(frozen=True, slots=True)
class Job:
    """One durable row per job. The guest holds the output; this row outlives the guest."""

    job_id: JobId
    vm_id: VmId
    workspace: WorkspaceName
    request_id: RequestId
    state: JobState
    started_at: float
    finished_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    truncated: bool = False
    detached: int = 0
    timeout_seconds: int | None = None
    log_path: str = ""


class ReceiptPhase(StrEnum):
    """No receipt: nothing was sent, a retry runs. sent: unknown if lost. done: answered from the ids."""

    SENT = "sent"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Receipt:
    workspace: WorkspaceName
    request_id: RequestId
    tool: str
    arguments_digest: str
    """SHA-256 of the validated arguments as canonical JSON."""
    phase: ReceiptPhase
    created_at: float
    finished_at: float | None = None
    vm_id: VmId | None = None
    job_id: JobId | None = None


@dataclass(frozen=True, slots=True)
class Token:
    token_id: TokenId
    workspace: WorkspaceName
    digest: str
    """SHA-256 of the token, hex."""
    created_at: float
    expires_at: float
    revoked_at: float | None = None


# What crosses between engine and guest, as plain data. The wire's own messages are `wire.messages`.


@dataclass(frozen=True, slots=True)
class JobRequest:
    job_id: JobId
    request_id: RequestId
    command: str
    cwd: str = "."
    shell: Shell = "login"
    env: dict[str, str] = field(default_factory=dict)
    timeout_seconds: int | None = None
    """As the caller gave it: also ends detached processes. None: only `max_seconds` bounds the job."""
    max_seconds: int = 86_400


@dataclass(frozen=True, slots=True)
class JobReport:
    """What the supervisor says of one job. Untrusted: the link has checked types, ranges and ids."""

    job_id: JobId
    request_id: RequestId
    state: JobState
    started_at: float
    finished_at: float | None
    exit_code: int | None
    signal: int | None
    truncated: bool
    detached: int
    log_path: str
    service_time_us: int | None = None
    """Start requests only: from request decoded to child reaped, as the supervisor measured it."""


@dataclass(frozen=True, slots=True)
class StreamPage:
    """Raw bytes of one stream of one job."""

    offset: int
    """Where `data` really begins: the asked offset, or the end of the gap if that lay inside it."""
    data: bytes
    written: int
    """Bytes that the job has written to this stream in all."""
    gap_from: int
    gap_bytes: int
    """The forgotten middle, 0 bytes if none. kept + gap_bytes == written, always."""


@dataclass(frozen=True, slots=True)
class OutputPage:
    report: JobReport
    stdout: StreamPage
    stderr: StreamPage


@dataclass(frozen=True, slots=True)
class FilePage:
    data: bytes
    offset: int
    size: int
    mode: int


@dataclass(frozen=True, slots=True)
class FileWritten:
    size: int
    mode: int


@dataclass(frozen=True, slots=True)
class GuestInfo:
    """Answer to the hello. `boot_id` tells one boot of the guest from the next."""

    wire_version: int
    supervisor_version: str
    boot_id: str
    active_jobs: int


@dataclass(frozen=True, slots=True)
class JobsReport:
    """All jobs the supervisor holds. `generation` rises with every change of any job's state."""

    generation: int
    jobs: tuple[JobReport, ...]


# What crosses between service and engine.


@dataclass(frozen=True, slots=True)
class ReceiptClaim:
    """What a request says of itself besides its id, for the transaction in which it takes effect."""

    tool: str
    arguments_digest: str
    keep_s: int = 86_400
    """Receipts younger than that are never dropped to make room."""
    max_rows: int = 4096
    """Per workspace."""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    vm_id: VmId
    workspace: WorkspaceName
    request_id: RequestId
    limits: Limits
    memory_mib: int
    vcpus: int
    disk_bytes: int | None
    """None: the size of the image."""
    network: Network
    idle_seconds: int
    idle_mode: IdleMode
    name: str | None = None


@dataclass(frozen=True, slots=True)
class MachineView:
    """One machine as its owner may see it, from memory: looking costs nothing and wakes nothing."""

    vm: Vm
    jobs: tuple[Job, ...]
    awake_because: tuple[str, ...]
    outdated: bool
    """The service's image is newer than the one this machine was made from."""
