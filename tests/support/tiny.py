"""The tiny image, and a driver that boots it under emulation whatever the host can do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from microvm_mcp.vmm.driver import BootSpec, Capabilities
from microvm_mcp.vmm.qemu.argv import Machine
from microvm_mcp.vmm.qemu.driver import QemuDriver
from tests.support.confined import Place

KERNEL_ARGUMENTS = "root=/dev/vda rw init=/sbin/init quiet loglevel=3"
MAC = "02:fc:00:00:00:02"


def tiny_image() -> Path:
    return Path(os.environ["MICROVM_TEST_TINY_IMAGE"])


def machine() -> Machine:
    binary = shutil.which("qemu-system-x86_64")
    assert binary is not None
    return Machine(binary, "q35", "tcg")


def emulated() -> QemuDriver:
    return QemuDriver(
        machine(),
        Capabilities(
            name="qemu",
            hardware_virtualisation=False,
            snapshot=True,
            jail=False,
            machine_type="q35",
            vmm_version="",
            vmm_digest="",
        ),
    )


def tiny_spec(here: Place, store: Path, *, memory_file: bool = True, memory_mib: int = 256) -> BootSpec:
    """`store` holds `disk.raw` and, with `memory_file`, the memory."""
    image = tiny_image()
    return BootSpec(
        unit=here.unit,
        uid=here.uid,
        gid=here.uid,
        netns=here.netns,
        tap=here.tap,
        mac=MAC,
        cgroup=here.cgroup,
        runtime_dir=here.runtime_dir,
        kernel=image / "vmlinuz",
        initramfs=image / "initramfs.img",
        kernel_arguments=KERNEL_ARGUMENTS,
        disk=store / "disk.raw",
        memory_mib=memory_mib,
        vcpus=2,
        memory_file=store / "live.memory" if memory_file else None,
    )


def copy_disk(store: Path) -> Path:
    """The image's disk on the file system of `store`, where it can be reflinked from; sparse as it was."""
    target = store / "image.raw"
    with (tiny_image() / "rootfs.raw").open("rb") as source, target.open("wb") as copy:
        copy.truncate(os.fstat(source.fileno()).st_size)
        while chunk := source.read(1 << 20):
            if chunk.strip(b"\0"):
                copy.seek(source.tell() - len(chunk))
                copy.write(chunk)
    return target
