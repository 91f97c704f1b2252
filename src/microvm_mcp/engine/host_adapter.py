"""The host port on this Linux machine: slots and machine ids in, calls of `host.*` out.

All names are derived here and nowhere else: unit, namespace and TAP, cgroup, runtime directory, user, disk. What
the kernel or a command refuses becomes `HostFailure`, with words that are fit for a machine's owner and the
evidence for the log.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.engine.host_port import HostFailure, Place
from microvm_mcp.host import cgroup, command, disk, network
from microvm_mcp.host.instance import unit_name, unit_prefix
from microvm_mcp.model import Slot, VmId

TAP = "tap0"
GUEST_MAC = "02:fc:00:00:00:02"
"""The same in every machine: each has a namespace of its own."""

_KILL_S = 30.0
_RESIZE_S = 120.0
_ENSURE_ATTEMPTS = 3
_VMM_OVERHEAD_MIB = 512
"""What a VMM takes besides the guest's RAM: its own code, the translation cache of emulation, I/O buffers."""
_VMM_PIDS = 256
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this instance lives on the host."""

    tag: str
    uid_base: int
    machines_dir: Path
    """Disks, one directory per machine; on one reflinking file system with the image."""
    jail_dir: Path
    cgroup_mount: Path
    root_disk: Path
    """The image's disk, which copies are made of."""
    root_disk_bytes: int


class LinuxHost:
    """Implements `engine.host_port.Host`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def place(self, slot: Slot, vm_id: VmId) -> Place:
        layout = self._layout
        unit = unit_name(layout.tag, slot)
        return Place(
            unit=unit,
            uid=layout.uid_base + slot,
            gid=layout.uid_base + slot,
            netns=unit,
            tap=TAP,
            mac=GUEST_MAC,
            cgroup=self._cgroup(slot),
            runtime_dir=self._runtime_dir(slot),
            disk=self._machine_dir(vm_id) / "disk.raw",
        )

    def boot_id(self) -> str:
        return self._boot_id

    async def free_bytes(self) -> int:
        with _as_failure("does not tell its free space"):
            return await asyncio.to_thread(disk.free_bytes, self._layout.machines_dir)

    async def create_disk(self, vm_id: VmId, size_bytes: int) -> None:
        home = self._machine_dir(vm_id)
        path = home / "disk.raw"
        with _as_failure("could not make the machine's disk"):
            await asyncio.to_thread(home.mkdir, mode=0o700)
            await disk.clone(self._layout.root_disk, path)
            if size_bytes > self._layout.root_disk_bytes:
                await disk.extend(path, size_bytes)
                # A fresh copy of the image: no guest has written to it, so that it may be read here.
                await command.run(["resize2fs", "-f", str(path)], timeout_s=_RESIZE_S)
            await disk.sync(path)
            await disk.sync(home)
            await disk.sync(self._layout.machines_dir)

    async def remove_disk(self, vm_id: VmId) -> None:
        with _as_failure("could not remove the machine's disk"):
            await disk.remove_tree(self._machine_dir(vm_id))

    async def ensure_cgroup(self, slot: Slot, *, memory_mib: int, vcpus: int) -> None:
        layout = self._layout
        limits = cgroup.Limits(
            memory_bytes=(memory_mib + _VMM_OVERHEAD_MIB) << 20, pids=_VMM_PIDS, cpus=vcpus, swap_bytes=0
        )
        with _as_failure("could not make the machine's cgroup"):
            for attempt in range(_ENSURE_ATTEMPTS):
                try:
                    await asyncio.to_thread(cgroup.ensure, layout.cgroup_mount, layout.tag, str(slot), limits)
                except cgroup.CgroupError:
                    # The last machine that goes takes the parent with it, perhaps between two of our steps.
                    if attempt == _ENSURE_ATTEMPTS - 1:
                        raise
                else:
                    return

    async def end_cgroup(self, slot: Slot) -> None:
        with _as_failure("could not end the machine's processes"):
            await cgroup.remove(self._cgroup(slot), timeout_s=_KILL_S)

    async def ensure_network(self, slot: Slot) -> None:
        with _as_failure("could not make the machine's network namespace"):
            await network.ensure(unit_name(self._layout.tag, slot), tap=TAP, uid=self._layout.uid_base + slot)

    async def remove_network(self, slot: Slot) -> None:
        with _as_failure("could not remove the machine's network namespace"):
            await network.remove(unit_name(self._layout.tag, slot))

    async def ensure_runtime_dir(self, slot: Slot) -> None:
        path = self._runtime_dir(slot)
        with _as_failure("could not make the machine's runtime directory"):
            await disk.remove_tree(path)
            await asyncio.to_thread(path.mkdir, mode=0o700)

    async def remove_runtime_dir(self, slot: Slot) -> None:
        with _as_failure("could not remove the machine's runtime directory"):
            await disk.remove_tree(self._runtime_dir(slot))

    async def leftovers(self) -> frozenset[Slot]:
        with _as_failure("could not be searched for what an earlier service left"):
            return await asyncio.to_thread(self._leftovers)

    def _leftovers(self) -> frozenset[Slot]:
        layout = self._layout
        prefix = unit_prefix(layout.tag)
        jails = (entry.name for entry in layout.jail_dir.iterdir() if entry.name.startswith(f"{layout.tag}-"))
        found = {
            *cgroup.leaves(layout.cgroup_mount, layout.tag),
            *(name.removeprefix(prefix) for name in network.names(prefix)),
            *(name.removeprefix(f"{layout.tag}-") for name in jails),
        }
        return frozenset(Slot(int(name)) for name in found if name.isascii() and name.isdigit())

    def _cgroup(self, slot: Slot) -> Path:
        return cgroup.parent(self._layout.cgroup_mount, self._layout.tag) / str(slot)

    def _runtime_dir(self, slot: Slot) -> Path:
        return self._layout.jail_dir / f"{self._layout.tag}-{slot}"

    def _machine_dir(self, vm_id: VmId) -> Path:
        return self._layout.machines_dir / vm_id


@contextmanager
def _as_failure(reason: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in _NO_ROOM
        raise HostFailure("has no room left on its volume" if full else reason, full=full) from error
    except (cgroup.CgroupError, network.NetworkError, command.CommandFailed, disk.NotReflinkable) as error:
        raise HostFailure(reason, evidence=str(error)) from error
