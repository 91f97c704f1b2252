"""The host port: what the engine asks of this Linux machine for one slot or one machine, in its own words.

Names derive from the instance's tag and the slot, so that everything here can be found and removed without being
remembered. `ensure_*` and `remove_*` are idempotent. A call that fails leaves nothing that the matching removal
does not remove. Each call has a deadline of its own and ends; a caller that is cancelled need not be obeyed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from microvm_mcp.model import Slot, VmId


class HostFailure(Exception):
    """The host refused or failed. `reason` completes "The host …" and is fit for the owner of a machine."""

    def __init__(self, reason: str, *, full: bool = False, evidence: str = "") -> None:
        super().__init__(evidence or reason)
        self.reason = reason
        self.full = full
        """The host's own file system has no room."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one machine lives on the host: derived, whether or not anything of it exists."""

    unit: str
    uid: int
    gid: int
    netns: str
    tap: str
    mac: str
    cgroup: Path
    runtime_dir: Path
    disk: Path


class Host(Protocol):
    def place(self, slot: Slot, vm_id: VmId) -> Place: ...

    def boot_id(self) -> str:
        """Differs from one boot of the host to the next."""

    async def free_bytes(self) -> int:
        """Really free on the volume of the disks."""

    async def create_disk(self, vm_id: VmId, size_bytes: int) -> None:
        """A private copy of the image, grown to `size_bytes`. Durable when it returns."""

    async def remove_disk(self, vm_id: VmId) -> None: ...

    async def ensure_cgroup(self, slot: Slot, *, memory_mib: int, vcpus: int) -> None: ...

    async def end_cgroup(self, slot: Slot) -> None:
        """Kill whatever sits in it, prove it empty, remove it."""

    async def ensure_network(self, slot: Slot) -> None: ...

    async def remove_network(self, slot: Slot) -> None: ...

    async def ensure_runtime_dir(self, slot: Slot) -> None:
        """Empty, root's, 0700."""

    async def remove_runtime_dir(self, slot: Slot) -> None: ...

    async def leftovers(self) -> frozenset[Slot]:
        """Slots of which anything but a disk exists under this instance's own tag."""
