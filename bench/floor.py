"""The shortest way from a built image to one answer: what a cold create is measured against.

The same image and the same QEMU line as the driver's, but no confinement, no cgroup, no service and no record: a
process, a hello on the control channel, the answer, the end. Prints the seconds from just before the process is
started to the answer; copying the disk and choosing the accelerator are done before. Needs root, for the TAP in a
network namespace of its own.

With --exec N it then runs `true` N times over the same channel, and prints for each the milliseconds beyond what
the supervisor measures itself: the price of the channel and of the guest's own end of it.

    bench/floor --image DIR [--volume DIR] [--count N] [--exec N]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from microvm_mcp.imaging.manifest import INITRAMFS, KERNEL, ROOT_DISK, read_manifest
from microvm_mcp.vmm.driver import BootSpec
from microvm_mcp.vmm.qemu.argv import Fd, Machine, render_argv
from microvm_mcp.vmm.qemu.probe import Guest, survey
from microvm_mcp.wire.messages import Output, Shell, StartJob
from microvm_mcp.wire.session import Answered, HostSession, Welcomed

DEADLINE_S = 180.0
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x1002
_CONT = b'{"execute": "qmp_capabilities"}\n{"execute": "cont"}\n'


def main() -> None:
    options = parse_arguments()
    image: Path = options.image
    guest = Guest(image / KERNEL, image / INITRAMFS)
    machine = asyncio.run(survey("qemu-system-x86_64", "auto", guest)).machine
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise SystemExit("No network namespace of its own: run as root.")
    for _ in range(options.count):
        with tempfile.TemporaryDirectory(prefix="microvm-floor-", dir=options.volume) as work:
            boot_s, beyond_ms = measure(image, Path(work), machine, options)
            print("\n".join((f"{boot_s:.3f}", *(f"exec {each:.2f}" for each in beyond_ms))), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Seconds from a QEMU process to one answer of its guest.")
    parser.add_argument("--image", type=Path, required=True, help="directory that build-image made")
    parser.add_argument("--volume", type=Path, help="where the disk is copied to; best a reflinking file system")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--exec", type=int, default=0, dest="rounds", help="times that `true` is run after it")
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--vcpus", type=int, default=2)
    return parser.parse_args()


def measure(image: Path, work: Path, machine: Machine, options: argparse.Namespace) -> tuple[float, list[float]]:
    disk = work / ROOT_DISK
    subprocess.run(["cp", "--reflink=auto", "--sparse=always", image / ROOT_DISK, disk], check=True)
    spec = BootSpec(
        unit="microvm-floor",
        uid=0,
        gid=0,
        netns="",
        tap="tap0",
        mac="02:00:00:00:00:01",
        cgroup=work,
        runtime_dir=work,
        kernel=image / KERNEL,
        initramfs=image / INITRAMFS,
        kernel_arguments=read_manifest(image).kernel_arguments,
        disk=disk,
        memory_mib=options.memory_mib,
        vcpus=options.vcpus,
    )
    opened = {
        Fd.DISK: os.open(disk, os.O_RDWR),
        Fd.KERNEL: os.open(spec.kernel, os.O_RDONLY),
        Fd.INITRAMFS: os.open(spec.initramfs, os.O_RDONLY),
        Fd.QMP: listen(work / "qmp"),
        Fd.CONTROL: listen(work / "control"),
        Fd.TAP: open_tap(spec.tap),
    }
    argv = render_argv(spec, machine, incoming=False)
    started = time.monotonic()
    with (work / "output").open("wb") as output:
        process = start(argv, opened, output.fileno())
    try:
        with connect(work / "qmp") as qmp, connect(work / "control") as control:
            qmp.sendall(_CONT)
            session = HostSession(os.urandom(16))
            control.sendall(session.hello())
            await_event(session, control, started + DEADLINE_S)
            took = time.monotonic() - started
            return took, [exec_beyond(session, control, number) for number in range(options.rounds)]
    except OSError as error:
        raise SystemExit(f"No answer ({error}); QEMU said: {(work / 'output').read_text()}") from error
    finally:
        process.kill()
        process.wait()
        for fd in opened.values():
            os.close(fd)


def start(argv: tuple[str, ...], opened: dict[Fd, int], output: int) -> subprocess.Popen[bytes]:
    """With each descriptor under the number that the command line names."""
    numbers = tuple(int(number) for number in opened)
    # Out of the way first: a descriptor may have been opened under a number that another one is to get.
    high = {int(number): fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for number, fd in opened.items()}
    saved = {number: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 200) for number in numbers if is_open(number)}
    try:
        for number, fd in high.items():
            os.dup2(fd, number)
        return subprocess.Popen(argv, pass_fds=numbers, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    finally:
        for number in numbers:
            os.close(number)
        for number, fd in saved.items():
            os.dup2(fd, number, inheritable=False)
        for fd in (*high.values(), *saved.values()):
            os.close(fd)


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def listen(path: Path) -> int:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(1)
    return server.detach()


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    return client


def open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
    return fd


def await_event(session: HostSession, control: socket.socket, deadline: float) -> Welcomed | Answered:
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([control], [], [], left)[0]:
            break
        data = control.recv(65_536)
        if not data:
            raise ConnectionError("the channel was closed")
        for event in session.receive(data):
            return event
    raise TimeoutError("deadline passed")


def exec_beyond(session: HostSession, control: socket.socket, number: int) -> float:
    command = StartJob(f"job-{number}", "floor", "true", ".", Shell.PLAIN, (), None, 100, 30.0)
    started = time.monotonic()
    control.sendall(session.ask(command)[1])
    event = await_event(session, control, started + DEADLINE_S)
    took_ms = (time.monotonic() - started) * 1000
    if not isinstance(event, Answered) or not isinstance(event.answer, Output):
        raise SystemExit(f"The supervisor refused: {event}")
    service_us = event.answer.job.service_time_us
    if service_us is None:
        raise SystemExit("The job took longer than its wait.")
    return took_ms - service_us / 1000


if __name__ == "__main__":
    main()
