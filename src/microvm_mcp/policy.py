"""Admission: may one more machine be promised to a workspace? Pure arithmetic on facts, with a verdict in numbers.

Every retained machine reserves its disk at virtual size times `disk_reserve`, twice its RAM (once while it runs,
once for its hibernation image) and the bytes of whatever else was saved for it. Reservations are held against the
host's limits and the workspace's quota. Besides, the reservation of the new machine must really be free on the
volume, above a floor that creation never touches. Nothing here does I/O or knows how the facts were found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from microvm_mcp.errors import Detail, ResourceExhausted
from microvm_mcp.model import Limits

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class HostLimits:
    max_vms: int
    max_memory_mib: int
    max_storage_gib: int
    disk_reserve: float = 1.0
    """Share of a disk's virtual size that is reserved; below 1.0 full disks may meet a full volume."""
    free_floor_bytes: int = 2 * GIB
    """Free space that creation leaves to the machines that run."""

    def as_limits(self) -> Limits:
        return Limits(self.max_vms, self.max_memory_mib, self.max_storage_gib)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one retained machine may come to hold on the host."""

    memory_mib: int
    disk_bytes: int
    saved_bytes: int = 0
    """Checkpoints and the like, as they are."""

    def storage_bytes(self, disk_reserve: float) -> int:
        return math.ceil(self.disk_bytes * disk_reserve) + 2 * self.memory_mib * MIB + self.saved_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    vms: int
    memory_mib: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first limit that does not hold, in numbers."""

    message: str
    details: dict[str, Detail]

    def error(self) -> ResourceExhausted:
        return ResourceExhausted(self.message, details=self.details)


def usage(reservations: Iterable[Reservation], disk_reserve: float) -> Usage:
    held = tuple(reservations)
    return Usage(
        vms=len(held),
        memory_mib=sum(one.memory_mib for one in held),
        storage_bytes=sum(one.storage_bytes(disk_reserve) for one in held),
    )


def admit(
    asked: Reservation, *, limits: HostLimits, quota: Limits, on_host: Usage, in_workspace: Usage, free_bytes: int
) -> Refusal | None:
    """None: the machine may be promised. The quota speaks first: its owner can do something about it."""
    more = Usage(1, asked.memory_mib, asked.storage_bytes(limits.disk_reserve))
    return (
        _over(_WORKSPACE, quota, in_workspace, more)
        or _over(_HOST, limits.as_limits(), on_host, more)
        or _too_little_space(more.storage_bytes, limits.free_floor_bytes, free_bytes)
    )


@dataclass(frozen=True, slots=True)
class _Scope:
    name: str
    subject: str
    way_out: str


_WORKSPACE = _Scope("workspace", "workspace's quota", "destroy a machine or ask the operator for a larger quota")
_HOST = _Scope("host", "host's limit", "destroy a machine or ask the operator to raise it")


def _over(scope: _Scope, limits: Limits, held: Usage, more: Usage) -> Refusal | None:
    rows: tuple[tuple[str, str, int | None, float, float], ...] = (
        ("max_vms", "machines", limits.max_vms, held.vms, more.vms),
        ("max_memory_mib", "MiB of memory", limits.max_memory_mib, held.memory_mib, more.memory_mib),
        (
            "max_storage_gib",
            "GiB of storage (disk plus twice the memory of each machine)",
            limits.max_storage_gib,
            held.storage_bytes / GIB,
            more.storage_bytes / GIB,
        ),
    )
    for name, unit, allowed, in_use, asked in rows:
        if allowed is not None and in_use + asked > allowed:
            in_use, asked = round(in_use, 2), round(asked, 2)
            return Refusal(
                f"The {scope.subject} is {allowed} {unit}; {in_use} are reserved and this machine needs {asked}: "
                f"{scope.way_out}.",
                {"limit": name, "scope": scope.name, "allowed": allowed, "in_use": in_use, "asked": asked},
            )
    return None


def _too_little_space(needed: int, floor: int, free: int) -> Refusal | None:
    if free - floor >= needed:
        return None
    needed_gib, floor_gib, free_gib = (round(count / GIB, 2) for count in (needed, floor, free))
    return Refusal(
        f"The host's volume has {free_gib} GiB free and keeps {floor_gib} GiB of that; this machine needs "
        f"{needed_gib} GiB: destroy a machine or ask the operator for more space.",
        {"limit": "free_space_gib", "scope": "host", "free": free_gib, "floor": floor_gib, "asked": needed_gib},
    )
