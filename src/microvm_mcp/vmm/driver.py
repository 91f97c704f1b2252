"""The driver port: what the engine asks of a VMM, and what every driver promises.

A `Driver` starts, loads or adopts one VMM process for one machine and hands back a `Vmm`. It is no policy: it
does what it is told or raises `VmmError`.

    boot ──────────────▶ running ──pause──▶ paused ──snapshot──▶ paused
    load ──▶ paused ──run──▶ running          ▲ └──run──▶ running
    adopt ──▶ running or paused               └─────────────┘
    kill, from anywhere, any number of times ──▶ dead

* `boot` returns when the VMM runs the guest's CPUs; whether the guest answers is the link's business.
* `load` leaves the CPUs stopped. The caller marks the image spent, durably, and only then calls `run`.
* `snapshot` is legal only while paused; when it returns, its files are complete and fsynced, and the machine is
  still paused. It may be called again after `run` and `pause`.
* `kill` returns only when the process is proven dead (pidfd), and may be called at any time, twice, concurrently.
* `wait_exit` returns once the process is gone, for whatever reason; any number of waiters.
* The VMM outlives the service: nothing here ends it when the service's process ends. `adopt` finds it again by
  pid and start time, or returns None when that very process is gone.
* Calls that fail leave nothing behind that `kill` does not remove.

Every driver, and the fake, passes `tests/contract/driver_suite.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


class VmmError(Exception):
    """A VMM refused or failed. `evidence`: argv, exit status and last output, for the log only."""

    def __init__(self, message: str, *, evidence: str = "") -> None:
        super().__init__(message)
        self.evidence = evidence


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a driver can do, as data; `doctor` and the engine read it, nobody asks for a driver's class."""

    name: str
    hardware_virtualisation: bool
    snapshot: bool
    jail: bool
    """True: an empty root of its own. False: the VMM's own sandbox stands in its place."""
    machine_type: str
    vmm_version: str
    vmm_digest: str
    """SHA-256 of the VMM binary."""


@dataclass(frozen=True, slots=True)
class BootSpec:
    """Everything one VMM process needs. Host objects (namespace, TAP, cgroup, disk) exist before the call."""

    unit: str
    """Name of the machine on this host, `mvm-<instance tag>-<slot>`; derives process title and log names."""
    uid: int
    gid: int
    netns: str
    """Name of an existing network namespace (under /run/netns) with `tap` in it."""
    tap: str
    mac: str
    cgroup: Path
    """Existing cgroup v2 directory that the VMM is placed in before it runs anything."""
    runtime_dir: Path
    """Existing, root's, 0700: sockets and logs. The VMM gets descriptors, not access to it."""
    kernel: Path
    initramfs: Path
    kernel_arguments: str
    disk: Path
    """Raw image, private to this machine."""
    memory_mib: int
    vcpus: int
    memory_file: Path | None = None
    """Guest RAM as a shared file (what makes a snapshot cost only what is dirty). None: anonymous memory."""


@dataclass(frozen=True, slots=True)
class SnapshotPaths:
    """Where a snapshot goes or comes from. Neither file names a path, UID, slot or address of this host."""

    memory: Path
    state: Path


@dataclass(frozen=True, slots=True)
class Channel:
    """How the link reaches the supervisor of a running machine."""

    kind: Literal["unix", "vsock_uds"]
    """unix: connect and talk (virtio-serial). vsock_uds: connect, then Firecracker's CONNECT handshake."""
    path: Path
    port: int = 1024


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    pid: int
    started_ticks: int


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """`exit_status` is None where the process was not our child (adopted) and nobody can know it."""

    exit_status: int | None
    last_output: str
    """Tail of the VMM's own output, for the log."""
    guest_shutdown: bool
    """The guest powered off or rebooted by itself."""
    guest_panicked: bool


class Vmm(Protocol):
    """One live VMM process."""

    @property
    def identity(self) -> ProcessIdentity: ...
    @property
    def channel(self) -> Channel: ...
    async def run(self) -> None: ...
    async def pause(self) -> None: ...
    async def snapshot(self, paths: SnapshotPaths) -> None: ...
    async def request_shutdown(self) -> None:
        """Ask the guest to power off (Ctrl-Alt-Del or ACPI); returns at once. `wait_exit` tells when it did."""

    async def kill(self) -> None: ...
    async def wait_exit(self) -> ExitInfo: ...
    async def close(self) -> None:
        """Let go of the process without ending it: what the service does when it stops."""


class Driver(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...
    async def boot(self, spec: BootSpec) -> Vmm: ...
    async def load(self, spec: BootSpec, paths: SnapshotPaths) -> Vmm: ...
    async def adopt(self, spec: BootSpec, identity: ProcessIdentity) -> Vmm | None: ...
