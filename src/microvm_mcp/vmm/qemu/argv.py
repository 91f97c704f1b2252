"""From a `BootSpec` to QEMU's command line, as a pure function.

The line names no path that the VMM's user would have to reach: every file and socket is a descriptor that the
launcher hands over under a fixed number. Two devices are chosen by measurement, not taste: `microvm` hangs under
emulation in a third of its boots (nothing to calibrate the TSC against), so emulation means q35; and under
emulation only `-cpu max` reaches user space.

Saved state can be loaded only by the same binary with the same line but for `-incoming`: whatever is changed here
makes older state unloadable.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from microvm_mcp.vmm.driver import BootSpec

CONSOLE_BYTES = 32 << 10
"""Ring buffer inside QEMU: a guest that floods its console overwrites its own lines and nothing else."""
TRANSLATION_CACHE_MIB = 128
"""Emulation only. Unbounded it grows to a gigabyte per machine."""
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
CONTROL_PORT = "microvm.control"


class Fd(IntEnum):
    """Descriptor numbers inside the VMM."""

    DISK = 10
    QMP = 11
    CONTROL = 12
    TAP = 13
    KERNEL = 14
    INITRAMFS = 15
    MEMORY = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """What kind of machine this binary runs on this host."""

    binary: str
    machine_type: str
    """Versioned where QEMU versions it: saved state names it."""
    accelerator: Literal["tcg", "kvm"]


def reopened(fd: int) -> str:
    """A file that QEMU opens by name: through its own descriptor, so that no directory has to let it pass."""
    return f"/proc/self/fd/{fd}"


def kernel_arguments(spec: BootSpec) -> str:
    """The image's own, then ours, which win: a panic resets at once, a reset ends the machine."""
    return f"{spec.kernel_arguments} console=ttyS0 panic=-1 reboot=t".strip()


def render_argv(spec: BootSpec, machine: Machine, *, incoming: bool) -> tuple[str, ...]:
    """CPUs stay stopped until QMP says `cont`; with `incoming` they wait for saved state."""
    argv = [
        machine.binary,
        *("-name", f"{spec.unit},process={spec.unit[:15]}"),
        *render_platform(machine),
        # A guest that ends stays, stopped, until somebody has read why: also if the service is away just then.
        *("-action", "reboot=shutdown,shutdown=pause,panic=pause"),
        *("-smp", f"cpus={spec.vcpus},sockets=1,cores={spec.vcpus},threads=1"),
        *("-m", f"size={spec.memory_mib}M"),
        *("-object", _memory(spec)),
        *("-kernel", reopened(Fd.KERNEL)),
        *("-initrd", reopened(Fd.INITRAMFS)),
        *("-append", kernel_arguments(spec)),
        *("-chardev", f"socket,id=qmp,fd={Fd.QMP:d},server=on,wait=off"),
        *("-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}"),
        *("-serial", "chardev:console"),
        *("-add-fd", f"fd={Fd.DISK:d},set=1"),
        *("-blockdev", "driver=file,node-name=disk-file,filename=/dev/fdset/1,aio=threads,discard=unmap"),
        *("-blockdev", "driver=raw,node-name=disk,file=disk-file,discard=unmap"),
        *("-device", f"{_device(machine, 'virtio-blk')},id=disk0,drive=disk"),
        *("-netdev", f"tap,id=net,fd={Fd.TAP:d},vhost=off"),
        *("-device", f"{_device(machine, 'virtio-net')},id=net0,netdev=net,mac={spec.mac}{_no_rom(machine)}"),
        *("-object", "rng-builtin,id=rng"),
        *("-device", f"{_device(machine, 'virtio-rng')},id=rng0,rng=rng"),
        *("-device", f"{_device(machine, 'virtio-serial')},id=serial0,max_ports=8"),
        *("-chardev", f"socket,id=control,fd={Fd.CONTROL:d},server=on,wait=off"),
        *("-device", f"virtserialport,bus=serial0.0,nr=1,chardev=control,name={CONTROL_PORT}"),
        *_identity_devices(machine),
        "-S",
    ]
    if incoming:
        argv += ["-incoming", "defer"]
    return tuple(argv)


def render_probe_argv(machine: Machine) -> tuple[str, ...]:
    """The smallest guest that proves user space: init ends at once, so that the kernel says so, and resets."""
    return (
        machine.binary,
        *render_platform(machine, memory_backend=False),
        *("-action", "reboot=shutdown"),
        *("-m", "size=192M"),
        *("-kernel", reopened(Fd.KERNEL)),
        *("-initrd", reopened(Fd.INITRAMFS)),
        *("-append", "console=ttyS0 quiet panic=-1 reboot=t rdinit=/bin/busybox"),
        *("-chardev", "stdio,id=console,signal=off"),
        *("-serial", "chardev:console"),
    )


def render_platform(machine: Machine, *, memory_backend: bool = True) -> tuple[str, ...]:
    """Machine, CPU, confinement: what a probe guest shares with every machine."""
    backend = ",memory-backend=m0" if memory_backend else ""
    if machine.accelerator == "kvm":
        accelerator, cpu = "kvm", "host"
    else:
        accelerator, cpu = f"tcg,thread=multi,tb-size={TRANSLATION_CACHE_MIB}", "max"
    if is_microvm(machine):
        kind = f"{machine.machine_type},acpi=on,pcie=off,rtc=on,isa-serial=on,x-option-roms=off"
    else:
        kind = f"{machine.machine_type},graphics=off,sata=off,smbus=off,usb=off,vmport=off"
    return (
        *("-machine", f"{kind},dump-guest-core=off,mem-merge=off{backend}"),
        *("-accel", accelerator),
        *("-cpu", cpu),
        *("-sandbox", SANDBOX),
        "-nodefaults",
        "-no-user-config",
        *("-display", "none"),
    )


def is_microvm(machine: Machine) -> bool:
    return machine.machine_type == "microvm"


def _memory(spec: BootSpec) -> str:
    if spec.memory_file is None:
        return f"memory-backend-ram,id=m0,size={spec.memory_mib}M"
    return f"memory-backend-file,id=m0,size={spec.memory_mib}M,mem-path={reopened(Fd.MEMORY)},share=on"


def _device(machine: Machine, kind: str) -> str:
    return f"{kind}-device" if is_microvm(machine) else f"{kind}-pci"


def _no_rom(machine: Machine) -> str:
    return "" if is_microvm(machine) else ",romfile="


def _identity_devices(machine: Machine) -> tuple[str, ...]:
    """Generation id (a copy of a machine reseeds its random numbers) and panic notifier; both need ACPI tables."""
    return () if is_microvm(machine) else ("-device", "vmgenid,id=generation,guid=auto", "-device", "pvpanic")
