"""What is QEMU's own: its confinement seen from outside, panics, floods, and ends that nobody watched."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from microvm_mcp.host import cgroup, disk, network
from microvm_mcp.vmm.driver import BootSpec, Vmm, VmmError
from microvm_mcp.vmm.qemu.argv import Fd
from tests.contract.driver_suite import BOOT_S, killing
from tests.support import xfs
from tests.support.confined import inode, look_at, make_place, remove_place
from tests.support.greet import greet
from tests.support.tiny import copy_disk, emulated, tiny_spec

pytestmark = [
    pytest.mark.needs("root", "reflink", "netns", "cgroup2", "qemu", "tiny"),
    pytest.mark.timeout(300),
]

NO_ROOT = "root=/dev/nowhere"
"""With this the initramfs gives up after five seconds, and the kernel panics."""


@dataclass(frozen=True, slots=True)
class Ground:
    spec: BootSpec
    store: Path


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    async with _ground(tmp_path) as made:
        yield made


@asynccontextmanager
async def _ground(directory: Path, slot: int = 0) -> AsyncIterator[Ground]:
    here = await make_place(slot)
    try:
        with xfs.mounted(directory) as store:
            image = await asyncio.to_thread(copy_disk, store)
            spec = tiny_spec(here, store)
            await disk.clone(image, spec.disk)
            yield Ground(spec, store)
    finally:
        await remove_place(here)


def mode_and_owner(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mode & 0o777, found.st_uid


def connectable(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


async def test_a_running_vmm_is_confined_as_promised_seen_from_outside(ground: Ground) -> None:
    spec = ground.spec
    async with killing(await emulated().boot(spec)) as vmm:
        await greet(vmm.channel.path, deadline_s=BOOT_S)
        seen = look_at(vmm.identity.pid)
        assert len(seen.threads) > spec.vcpus
        for thread in seen.threads:
            assert thread["Uid"].split() == [str(spec.uid)] * 4
            assert thread["Gid"].split() == [str(spec.gid)] * 4
            assert thread["Groups"] == ""
            assert thread["NoNewPrivs"] == "1"
            assert thread["Seccomp"] == "2"
            for which in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                assert int(thread[which], 16) == 0, which
        assert seen.own_namespaces >= {"mnt", "net", "ipc", "uts"}
        assert seen.netns_inode == inode(network.path(spec.netns))
        assert seen.session == vmm.identity.pid
        assert seen.limits["Max core file size"] == ("0", "0")
        assert seen.limits["Max open files"][1] == "1024"
        assert seen.environment == {"PATH", "LC_ALL", "HOME"}
        assert vmm.identity.pid in cgroup.pids(spec.cgroup)
        named = {name for name in seen.descriptors.values() if name.startswith("/")}
        assert named == {
            "/dev/null",
            "/dev/net/tun",
            str(spec.runtime_dir / "output"),
            str(spec.disk),
            str(spec.memory_file),
            str(spec.kernel),
            str(spec.initramfs),
        }
        assert seen.descriptors[Fd.TAP] == "/dev/net/tun"
        assert mode_and_owner(spec.disk) == (0o600, 0)
        assert mode_and_owner(spec.runtime_dir) == (0o700, 0)
        for name in ("qmp.sock", "control.sock", "output"):
            assert mode_and_owner(spec.runtime_dir / name) == (0o600, 0)


async def test_a_vmm_cannot_make_its_disk_larger_than_it_is(ground: Ground) -> None:
    vmm = await emulated().boot(ground.spec)
    try:
        text = await asyncio.to_thread(Path(f"/proc/{vmm.identity.pid}/limits").read_text)
        limit = next(line.split()[3:5] for line in text.splitlines() if line.startswith("Max file size"))
        size = max(disk.size_bytes(ground.spec.disk), (ground.spec.memory_mib + 256) << 20)
        assert limit == [str(size)] * 2
    finally:
        await vmm.kill()


async def test_two_machines_have_nothing_in_common(ground: Ground, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with (
        _ground(tmp_path / "other", slot=1) as other,
        killing(await emulated().boot(ground.spec)) as one,
        killing(await emulated().boot(other.spec)) as two,
    ):
        first, second = look_at(one.identity.pid), look_at(two.identity.pid)
        assert first.netns_inode != second.netns_inode
        assert first.threads[0]["Uid"] != second.threads[0]["Uid"]
        shared = set(first.descriptors.values()) & set(second.descriptors.values())
        assert {name for name in shared if name.startswith(("/", "socket"))} == {
            "/dev/null",
            "/dev/net/tun",
            str(ground.spec.kernel),
            str(ground.spec.initramfs),
        }
        await one.kill()
        assert connectable(two.channel.path)
        assert (await two.wait_exit() if two.identity.pid not in cgroup.pids(other.spec.cgroup) else None) is None


async def test_a_panic_is_told_from_a_shutdown(ground: Ground) -> None:
    async with killing(await emulated().boot(replace(ground.spec, kernel_arguments=NO_ROOT))) as vmm:
        async with asyncio.timeout(BOOT_S):
            info = await vmm.wait_exit()
        assert (info.guest_shutdown, info.guest_panicked) == (False, True)
        assert "no block device" in info.last_output
        assert cgroup.pids(ground.spec.cgroup) == ()


async def test_an_end_that_nobody_watched_is_told_to_whoever_adopts(ground: Ground) -> None:
    driver = emulated()
    vmm: Vmm = await driver.boot(replace(ground.spec, kernel_arguments=NO_ROOT))
    await vmm.close()
    # The guest panics in five seconds of its own time; QEMU then stands still, which costs no CPU.
    async with asyncio.timeout(BOOT_S):
        while await _cpu_ticks(vmm.identity.pid) != await _cpu_ticks(vmm.identity.pid, after_s=3):
            pass
    adopted = await driver.adopt(ground.spec, vmm.identity)
    assert adopted is not None
    async with killing(adopted):
        async with asyncio.timeout(30):
            info = await adopted.wait_exit()
        assert (info.guest_shutdown, info.guest_panicked) == (False, True)


async def _cpu_ticks(pid: int, *, after_s: float = 0) -> int:
    await asyncio.sleep(after_s)
    fields = (await asyncio.to_thread(Path(f"/proc/{pid}/stat").read_text)).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_a_second_connection_to_qmp_does_not_take_the_machine_over(ground: Ground) -> None:
    async with killing(await emulated().boot(ground.spec)) as vmm:
        with socket.socket(socket.AF_UNIX) as intruder:
            intruder.connect(str(ground.spec.runtime_dir / "qmp.sock"))
            await vmm.pause()
            await vmm.run()


async def test_a_vmm_that_stops_answering_is_reported_and_can_be_killed(ground: Ground) -> None:
    driver = emulated()
    vmm = await driver.boot(ground.spec)
    os.kill(vmm.identity.pid, signal.SIGSTOP)
    await vmm.close()
    with pytest.raises(VmmError, match="does not answer"):
        await driver.adopt(ground.spec, vmm.identity)
    await cgroup.kill(ground.spec.cgroup, timeout_s=20)
    assert await driver.adopt(ground.spec, vmm.identity) is None
    # Let go of by both, it is still the child of this process.
    os.waitpid(vmm.identity.pid, 0)


@pytest.mark.parametrize("which", ["kernel", "initramfs"])
async def test_a_kernel_that_the_vmms_user_cannot_read_is_refused_with_the_command(
    ground: Ground, which: str
) -> None:
    secret = ground.store / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0o600)
    spec = replace(ground.spec, kernel=secret) if which == "kernel" else replace(ground.spec, initramfs=secret)
    with pytest.raises(VmmError, match=f"chmod 0644 {secret}"):
        await emulated().boot(spec)
    assert list(spec.runtime_dir.iterdir()) == []


async def test_a_path_that_is_too_long_for_a_socket_is_refused_by_name(ground: Ground) -> None:
    deep = ground.spec.runtime_dir / ("x" * 100)
    deep.mkdir()
    with pytest.raises(VmmError, match="shorter jail_dir"):
        await emulated().boot(replace(ground.spec, runtime_dir=deep))
    deep.rmdir()


async def test_a_symlink_in_place_of_the_disk_is_not_followed(ground: Ground) -> None:
    link = ground.store / "link"
    link.symlink_to(ground.spec.disk)
    with pytest.raises(VmmError):
        await emulated().boot(replace(ground.spec, disk=link))


async def test_a_cancelled_boot_leaves_no_process_and_no_memory(ground: Ground) -> None:
    for delay in (0.02, 0.1, 0.25):
        task = asyncio.create_task(emulated().boot(ground.spec))
        await asyncio.sleep(delay)
        task.cancel()
        try:
            await (await task).kill()
        except asyncio.CancelledError:
            await cgroup.kill(ground.spec.cgroup, timeout_s=20)
        assert cgroup.pids(ground.spec.cgroup) == ()
    async with killing(await emulated().boot(ground.spec)) as vmm:
        assert cgroup.pids(ground.spec.cgroup) == (vmm.identity.pid,)
