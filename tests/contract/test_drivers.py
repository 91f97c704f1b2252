"""Every driver, and the fake, against the suite."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from microvm_mcp.host import cgroup, disk
from microvm_mcp.vmm.driver import BootSpec, Driver, SnapshotPaths
from tests.contract.driver_suite import DriverSuite, Rig, make_golden
from tests.support import leaks, xfs
from tests.support.confined import make_place, remove_place
from tests.support.fake_driver import FakeDriver
from tests.support.tiny import MAC, copy_disk, emulated, tiny_spec


def _rig(driver: Driver, spec: BootSpec, store: Path, processes: Callable[[], list[str]]) -> Rig:
    golden, kept = SnapshotPaths(store / "golden.memory", store / "golden.state"), store / "golden.disk"
    boot_id = asyncio.run(make_golden(driver, spec, golden))
    spec.disk.rename(kept)

    def restore_disk() -> None:
        spec.disk.unlink(missing_ok=True)
        if kept.stat().st_size:
            disk.clone_now(kept, spec.disk)
        else:
            spec.disk.touch()

    return Rig(driver, spec, store, golden, boot_id, restore_disk, processes)


def _fresh(rig: Rig) -> Rig:
    """For each test: the golden disk, no memory, no snapshots of earlier tests."""
    rig.restore_disk()
    for entry in rig.store.iterdir():
        if entry.suffix in (".memory", ".state") and entry.stem != "golden":
            entry.unlink()
    return rig


@pytest.fixture(scope="module")
def fake_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    store = tmp_path_factory.mktemp("store")
    runtime_dir = Path(tempfile.mkdtemp(prefix=leaks.temporary_prefix(), dir="/tmp"))
    for name in ("disk", "kernel"):
        (store / name).touch()
    spec = BootSpec(
        unit="mvm-00000000-0",
        uid=os.getuid(),
        gid=os.getgid(),
        netns="",
        tap="",
        mac=MAC,
        cgroup=store,
        runtime_dir=runtime_dir,
        kernel=store / "kernel",
        initramfs=store / "kernel",
        kernel_arguments="",
        disk=store / "disk",
        memory_mib=64,
        vcpus=1,
        memory_file=store / "live.memory",
    )
    yield _rig(FakeDriver(), spec, store, lambda: _processes_naming(runtime_dir))
    shutil.rmtree(runtime_dir)


@pytest.fixture(scope="module", params=["shared memory file", "anonymous memory"])
def qemu_rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    here = asyncio.run(make_place())
    try:
        with xfs.mounted(tmp_path_factory.mktemp("qemu")) as store:
            spec = tiny_spec(here, store, memory_file=request.param == "shared memory file")
            copy_disk(store).rename(spec.disk)
            yield _rig(emulated(), spec, store, lambda: [f"pid {pid}" for pid in cgroup.pids(spec.cgroup)])
    finally:
        asyncio.run(remove_place(here))


class TestFakeDriver(DriverSuite):
    @pytest.fixture
    def rig(self, fake_rig: Rig) -> Rig:
        return _fresh(fake_rig)


@pytest.mark.needs("root", "reflink", "netns", "cgroup2", "qemu", "tiny")
class TestQemuDriver(DriverSuite):
    @pytest.fixture
    def rig(self, qemu_rig: Rig) -> Rig:
        return _fresh(qemu_rig)


def _processes_naming(path: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(path).encode() in (entry / "cmdline").read_bytes():
                    found.append(f"pid {entry.name}")
            except OSError:
                continue
    return found
