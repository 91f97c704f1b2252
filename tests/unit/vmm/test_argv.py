"""QEMU's command line, word by word: a change here makes saved state of earlier versions unloadable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.vmm.driver import BootSpec
from microvm_mcp.vmm.qemu.argv import Machine, render_argv, render_probe_argv

SPEC = BootSpec(
    unit="mvm-0123abcd-16383",
    uid=86_383,
    gid=86_383,
    netns="mvm-0123abcd-16383",
    tap="tap0",
    mac="02:fc:00:00:00:02",
    cgroup=Path("/sys/fs/cgroup/microvm-0123abcd/16383"),
    runtime_dir=Path("/secret/jail/mvm-0123abcd-16383"),
    kernel=Path("/secret/image/vmlinuz"),
    initramfs=Path("/secret/image/initramfs.img"),
    kernel_arguments="root=/dev/vda rw quiet",
    disk=Path("/secret/machines/vm-1/disk.raw"),
    memory_mib=1024,
    vcpus=2,
    memory_file=Path("/secret/machines/vm-1/memory"),
)
EMULATED = Machine("/usr/bin/qemu-system-x86_64", "pc-q35-7.2", "tcg")
ACCELERATED = Machine("/usr/bin/qemu-system-x86_64", "microvm", "kvm")

EMULATED_LINE = """
/usr/bin/qemu-system-x86_64
-name mvm-0123abcd-16383,process=mvm-0123abcd-16
-machine pc-q35-7.2,graphics=off,sata=off,smbus=off,usb=off,vmport=off,dump-guest-core=off,mem-merge=off,memory-backend=m0
-accel tcg,thread=multi,tb-size=128
-cpu max
-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
-nodefaults
-no-user-config
-display none
-action reboot=shutdown,shutdown=pause,panic=pause
-smp cpus=2,sockets=1,cores=2,threads=1
-m size=1024M
-object memory-backend-file,id=m0,size=1024M,mem-path=/proc/self/fd/16,share=on
-kernel /proc/self/fd/14
-initrd /proc/self/fd/15
-append root=/dev/vda rw quiet console=ttyS0 panic=-1 reboot=t
-chardev socket,id=qmp,fd=11,server=on,wait=off
-mon chardev=qmp,mode=control
-chardev ringbuf,id=console,size=32768
-serial chardev:console
-add-fd fd=10,set=1
-blockdev driver=file,node-name=disk-file,filename=/dev/fdset/1,aio=threads,discard=unmap
-blockdev driver=raw,node-name=disk,file=disk-file,discard=unmap
-device virtio-blk-pci,id=disk0,drive=disk
-netdev tap,id=net,fd=13,vhost=off
-device virtio-net-pci,id=net0,netdev=net,mac=02:fc:00:00:00:02,romfile=
-object rng-builtin,id=rng
-device virtio-rng-pci,id=rng0,rng=rng
-device virtio-serial-pci,id=serial0,max_ports=8
-chardev socket,id=control,fd=12,server=on,wait=off
-device virtserialport,bus=serial0.0,nr=1,chardev=control,name=microvm.control
-device vmgenid,id=generation,guid=auto
-device pvpanic
-S
"""  # noqa: E501 - one option per line


def words(line: str) -> tuple[str, ...]:
    out: list[str] = []
    for row in line.strip().splitlines():
        option, space, value = row.partition(" ")
        out += [option, value] if space else [option]
    return tuple(out)


def test_the_line_of_an_emulated_machine() -> None:
    assert render_argv(SPEC, EMULATED, incoming=False) == words(EMULATED_LINE)


def test_the_line_of_a_machine_under_kvm_differs_in_platform_and_transport_alone() -> None:
    expected = (
        EMULATED_LINE.replace(
            "pc-q35-7.2,graphics=off,sata=off,smbus=off,usb=off,vmport=off",
            "microvm,acpi=on,pcie=off,rtc=on,isa-serial=on,x-option-roms=off",
        )
        .replace("-accel tcg,thread=multi,tb-size=128", "-accel kvm")
        .replace("-cpu max", "-cpu host")
        .replace("-blk-pci", "-blk-device")
        .replace("-net-pci", "-net-device")
        .replace("-rng-pci", "-rng-device")
        .replace("-serial-pci", "-serial-device")
        .replace(",romfile=", "")
        .replace("-device vmgenid,id=generation,guid=auto\n-device pvpanic\n", "")
    )
    assert render_argv(SPEC, ACCELERATED, incoming=False) == words(expected)


@pytest.mark.parametrize("machine", [EMULATED, ACCELERATED])
def test_loading_differs_from_booting_by_two_words(machine: Machine) -> None:
    booting = render_argv(SPEC, machine, incoming=False)
    assert render_argv(SPEC, machine, incoming=True) == (*booting, "-incoming", "defer")


@pytest.mark.parametrize("machine", [EMULATED, ACCELERATED])
def test_no_path_of_the_host_is_on_the_line(machine: Machine) -> None:
    assert not [word for word in render_argv(SPEC, machine, incoming=True) if "/secret" in word or "/sys" in word]


def test_saved_state_of_one_slot_loads_in_another() -> None:
    elsewhere = replace(SPEC, unit="mvm-ffffffff-1", uid=1, netns="x", runtime_dir=Path("/y"), disk=Path("/z"))
    differing = {
        (one, two)
        for one, two in zip(
            render_argv(SPEC, EMULATED, incoming=True), render_argv(elsewhere, EMULATED, incoming=True), strict=True
        )
        if one != two
    }
    assert {one.split(",")[0] for one, _ in differing} == {"mvm-0123abcd-16383"}


def test_anonymous_memory_names_no_file() -> None:
    line = " ".join(render_argv(replace(SPEC, memory_file=None), EMULATED, incoming=False))
    assert "-object memory-backend-ram,id=m0,size=1024M " in line
    assert "mem-path" not in line


def test_our_kernel_arguments_come_last_and_so_win() -> None:
    line = render_argv(replace(SPEC, kernel_arguments="panic=0 console=tty0"), EMULATED, incoming=False)
    assert line[line.index("-append") + 1] == "panic=0 console=tty0 console=ttyS0 panic=-1 reboot=t"


@pytest.mark.parametrize("machine", [EMULATED, ACCELERATED])
def test_a_probe_guest_has_the_platform_of_a_machine_and_no_devices(machine: Machine) -> None:
    probe, real = render_probe_argv(machine), render_argv(SPEC, machine, incoming=False)
    for option in ("-accel", "-cpu", "-sandbox"):
        assert probe[probe.index(option) + 1] == real[real.index(option) + 1]
    assert not {"-device", "-netdev", "-blockdev", "-S"} & set(probe)
