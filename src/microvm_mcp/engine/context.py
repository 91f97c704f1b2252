"""What every part of the engine is built from: ports, clock and settings, handed down as one value."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from microvm_mcp.engine.host_port import Host
from microvm_mcp.link.port import Link
from microvm_mcp.model import Slot, Vm
from microvm_mcp.policy import HostLimits
from microvm_mcp.vmm.driver import BootSpec, Channel, Driver

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. No call lasts longer than `call_s`, whatever it waits for."""

    call_s: float = 44.0
    """Below the 45 s that a client is promised."""
    boot_hello_s: float = 120.0
    """From the VMM's start to the supervisor's first answer: a guest under emulation needs 20 to 40."""
    adopt_hello_s: float = 20.0
    recovery_s: float = 60.0
    """For the evidence of all machines together."""
    answer_s: float = 10.0
    """For an answer that the guest does not delay on purpose."""
    cancel_s: float = 30.0
    file_s: float = 20.0
    first_wait_s: float = 2.0
    """A command that ends within it is answered in one round trip; a longer one is recorded first."""
    fetch_s: float = 2.0
    """Left of a call for the output, once it has waited for the job's end."""
    poll_s: float = 30.0
    """How long the job watcher's request is parked in the guest."""
    poll_pause_s: float = 0.05
    """Least time between two of them, however often a guest reports changes."""
    retry_s: float = 1.0
    """Between attempts of the job watcher and of writes that must succeed in the end."""
    stop_grace_s: float = 15.0
    """For a guest that was asked to shut down."""
    close_s: float = 10.0
    """For operations in progress when the service stops."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    limits: HostLimits
    slots: int
    """How many machines can have a place on the host at once."""
    kernel: Path
    initramfs: Path
    kernel_arguments: str
    image_digest: str
    image_bytes: int
    """Virtual size of the image's disk."""
    max_active_jobs: int = 4
    max_job_records: int = 256
    max_parked_calls: int = 40
    """Waits of callers that may be parked in one guest at once (the wire allows 64 requests); more don't wait."""
    keep_destroyed: int = 100
    """Per workspace, at least."""
    keep_destroyed_s: float = 86_400.0
    timeouts: Timeouts = field(default_factory=Timeouts)


class Store(Protocol):
    """What the engine needs of `store.database.Database`."""

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T: ...
    async def write_lazily(self, fn: Callable[[sqlite3.Connection], T]) -> T: ...
    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class Context:
    db: Store
    driver: Driver
    host: Host
    dial: Callable[[Channel], Link]
    now: Callable[[], float]
    settings: EngineSettings

    def boot_spec(self, vm: Vm, slot: Slot) -> BootSpec:
        place = self.host.place(slot, vm.vm_id)
        return BootSpec(
            unit=place.unit,
            uid=place.uid,
            gid=place.gid,
            netns=place.netns,
            tap=place.tap,
            mac=place.mac,
            cgroup=place.cgroup,
            runtime_dir=place.runtime_dir,
            kernel=self.settings.kernel,
            initramfs=self.settings.initramfs,
            kernel_arguments=self.settings.kernel_arguments,
            disk=place.disk,
            memory_mib=vm.memory_mib,
            vcpus=vm.vcpus,
        )
