"""The engine on the real host, the real driver and a real guest of the tiny image, without service and doors."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from microvm_mcp.engine.context import Context, EngineSettings
from microvm_mcp.engine.fleet import Fleet
from microvm_mcp.engine.host_adapter import Layout, LinuxHost
from microvm_mcp.host import cgroup, network
from microvm_mcp.link.client import LinkClient
from microvm_mcp.link.dial import dialer
from microvm_mcp.model import JobState, VmState
from microvm_mcp.policy import HostLimits
from microvm_mcp.store.database import Database
from tests.support import engine_rig, xfs
from tests.support.confined import UID
from tests.support.engine_rig import WORKSPACE, Rig
from tests.support.tiny import KERNEL_ARGUMENTS, copy_disk, emulated, tiny_image
from tests.support.world import Life, World

pytestmark = [pytest.mark.needs("root", "qemu", "tiny", "reflink", "netns", "cgroup2"), pytest.mark.timeout(300)]


@dataclass
class Place:
    """What one instance has: kept from one life of the service to the next."""

    layout: Layout
    store: Path

    def left(self) -> list[object]:
        return [
            *cgroup.leaves(self.layout.cgroup_mount, self.layout.tag),
            *network.names(f"mvm-{self.layout.tag}-"),
            *self.layout.machines_dir.iterdir(),
            *self.layout.jail_dir.iterdir(),
        ]


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Place]:
    mount = cgroup.find_mount()
    assert mount is not None
    with xfs.mounted(tmp_path) as volume:
        image = copy_disk(volume)
        # Short, because the path of a socket has 107 bytes.
        (volume / "m").mkdir()
        (volume / "j").mkdir()
        short = Path("/tmp") / f"mvm-{secrets.token_hex(4)}"
        short.symlink_to(volume / "j")
        layout = Layout(
            tag=secrets.token_hex(4),
            uid_base=UID,
            machines_dir=volume / "m",
            jail_dir=short,
            cgroup_mount=mount,
            root_disk=image,
            root_disk_bytes=image.stat().st_size,
        )
        try:
            yield Place(layout, tmp_path)
        finally:
            asyncio.run(remove_what_a_failed_test_left(layout))
            short.unlink()


async def remove_what_a_failed_test_left(layout: Layout) -> None:
    host = LinuxHost(layout)
    for slot in await host.leftovers():
        await host.end_cgroup(slot)
        await host.remove_network(slot)


@asynccontextmanager
async def life(place: Place) -> AsyncIterator[Rig]:
    image = tiny_image()
    db = await Database.open(place.store / "service.db", readers=1)
    try:
        await db.write(engine_rig.ensure_workspaces)
        settings = EngineSettings(
            limits=HostLimits(max_vms=4, max_memory_mib=8192, max_storage_gib=100, free_floor_bytes=0),
            slots=4,
            kernel=image / "vmlinuz",
            initramfs=image / "initramfs.img",
            kernel_arguments=KERNEL_ARGUMENTS,
            image_digest="tiny",
            image_bytes=place.layout.root_disk_bytes,
        )
        fleet = Fleet(
            Context(
                db=db,
                driver=emulated(),
                host=LinuxHost(place.layout),
                dial=lambda channel: LinkClient(dialer(channel.kind, channel.path, channel.port)),
                now=time.time,
                settings=settings,
            )
        )
        await fleet.start()
        world = World()
        try:
            yield Rig(db, world, Life(world), fleet, settings)
        finally:
            await fleet.close()
    finally:
        await db.close()


async def until(r: Rig, state: VmState) -> None:
    async with asyncio.timeout(30):
        while r.view().vm.state is not state:
            await asyncio.sleep(0.05)


async def test_a_machine_lives_through_a_restart_of_the_service_and_leaves_nothing(instance: Place) -> None:
    async with life(instance) as r:
        view = await r.create(wait_s=44, memory_mib=256)
        if view.vm.state is VmState.CREATING:
            view = await r.fleet.settle(WORKSPACE, view.vm.vm_id, wait_s=44)
        assert view.vm.state is VmState.RUNNING, view.vm.failure
        vm_id, pid = view.vm.vm_id, view.vm.vmm_pid
        job, page = await r.exec(vm_id, "a", "echo out; echo err >&2; exit 3", wait_s=30)
        assert (job.state, job.exit_code) == (JobState.COMPLETED, 3)
        assert page is not None
        assert (page.stdout.data, page.stderr.data) == (b"out\n", b"err\n")
        going, _ = await r.exec(vm_id, "b", "sleep 600", wait_s=0)
        await r.fleet.write_file(WORKSPACE, vm_id, "f", b"kept", offset=None, mode=None)
    async with life(instance) as r:
        view = r.view()
        assert (view.vm.state, view.vm.vmm_pid) == (VmState.RUNNING, pid)
        assert {job.job_id: job.state for job in view.jobs}[going.job_id] is JobState.RUNNING
        assert (await r.fleet.read_file(WORKSPACE, vm_id, "f", offset=0, length=9)).data == b"kept"
        cancelled = await r.fleet.cancel_job(WORKSPACE, vm_id, going.job_id)
        assert cancelled.state is JobState.CANCELLED
        destroyed = await r.fleet.destroy(WORKSPACE, vm_id, wait_s=30)
        assert destroyed.vm.state is VmState.DESTROYED
        assert instance.left() == []


async def test_a_vmm_that_is_killed_fails_its_machine_and_keeps_its_disk(instance: Place) -> None:
    async with life(instance) as r:
        view = await r.create(wait_s=44, memory_mib=256)
        await r.fleet.settle(WORKSPACE, view.vm.vm_id, wait_s=44)
        pid = r.view().vm.vmm_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(r, VmState.FAILED)
        await r.fleet.settle(WORKSPACE, view.vm.vm_id, wait_s=30)
        assert [str(entry) for entry in instance.left()] == [str(instance.layout.machines_dir / view.vm.vm_id)]
        await r.fleet.destroy(WORKSPACE, view.vm.vm_id, wait_s=30)
        assert instance.left() == []


async def test_a_larger_disk_is_larger_in_the_guest(instance: Place) -> None:
    async with life(instance) as r:
        size = 2 * instance.layout.root_disk_bytes
        view = await r.create(wait_s=44, memory_mib=256, disk_bytes=size)
        view = await r.fleet.settle(WORKSPACE, view.vm.vm_id, wait_s=44)
        assert view.vm.state is VmState.RUNNING, view.vm.failure
        _, page = await r.exec(view.vm.vm_id, "a", "df -k / | tail -n 1 | tr -s ' ' | cut -d' ' -f2", wait_s=30)
        assert page is not None
        assert int(page.stdout.data) * 1024 > 0.9 * size - (64 << 20)
        await r.fleet.destroy(WORKSPACE, view.vm.vm_id, wait_s=30)
