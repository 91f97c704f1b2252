"""What this QEMU can do on this host, found out by trying.

That /dev/kvm opens, and even that it creates a machine, proves nothing: on some hosts a guest then makes no
progress and burns a core. So KVM is chosen only if a probe guest (the service's own kernel and initramfs) reaches
user space within a deadline. The verdict is remembered per host boot, QEMU binary and kernel. Nothing of the probe
outlives it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from microvm_mcp.host import cgroup, command, process
from microvm_mcp.host.digest import sha256_file
from microvm_mcp.host.disk import write_durable_now
from microvm_mcp.vmm.driver import Capabilities
from microvm_mcp.vmm.qemu.argv import Fd, Machine, render_probe_argv

logger = logging.getLogger(__name__)

Acceleration = Literal["auto", "emulation", "kvm"]

KVM_DEVICE = Path("/dev/kvm")
OLDEST = (6, 2)
"""The first with everything that the command line uses; 7.2 is what is tested."""
PROBE_S = 15.0
"""A guest under working KVM needs less than one second; a host with many others to serve may take some more."""
_REACHED = "Attempted to kill init! exitcode="
"""What the kernel says when its init has run and ended: user space was reached."""
_NOBODY = 65_534
_COMMAND_S = 20.0
_VERSION = re.compile(r"QEMU emulator version (\d+)\.(\d+)\.(\d+)", re.ASCII)
_MEND = "apt-get install qemu-system-x86"


class NoVmm(Exception):
    """No machine can run here. The fact, then the way out."""


@dataclass(frozen=True, slots=True)
class Guest:
    """What a probe guest boots."""

    kernel: Path
    initramfs: Path


@dataclass(frozen=True, slots=True)
class Verdict:
    works: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    machine: Machine
    capabilities: Capabilities
    kvm: Verdict


async def survey(binary: str, acceleration: Acceleration, guest: Guest, *, cache: Path | None = None) -> Found:
    """Picks machine type and accelerator. `cache`: a file that keeps the verdict on KVM over restarts."""
    path = find_binary(binary)
    version = parse_version((await _ask(path, "--version")).text)
    if version is None or version[:2] < OLDEST:
        raise NoVmm(f"{path} is not QEMU {OLDEST[0]}.{OLDEST[1]} or newer: {_MEND}")
    digest = await asyncio.to_thread(sha256_file, path)
    kvm = Verdict(works=False, reason="emulation was chosen in the configuration")
    if acceleration != "emulation":
        kvm = await _judge_kvm(path, digest, guest, cache)
    if acceleration == "kvm" and not kvm.works:
        raise NoVmm(f'KVM does not work here ({kvm.reason}): set acceleration = "auto" or use another host')
    if kvm.works:
        machine = Machine(str(path), "microvm", "kvm")
    else:
        q35 = parse_q35((await _ask(path, "-machine", "help")).text)
        if q35 is None:
            raise NoVmm(f"{path} has no machine type q35: {_MEND}")
        machine = Machine(str(path), q35, "tcg")
    capabilities = Capabilities(
        name="qemu",
        hardware_virtualisation=kvm.works,
        snapshot=True,
        jail=False,
        machine_type=machine.machine_type,
        vmm_version=".".join(map(str, version)),
        vmm_digest=digest,
    )
    return Found(machine, capabilities, kvm)


def find_binary(binary: str) -> Path:
    found = shutil.which(binary, path=command.PLAIN_ENVIRONMENT["PATH"])
    if found is None:
        raise NoVmm(f"{binary} is not installed: {_MEND}")
    return Path(found).resolve()


def parse_version(text: str) -> tuple[int, int, int] | None:
    found = _VERSION.search(text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def parse_q35(text: str) -> str | None:
    """The versioned type behind the alias: what it means must not change with a newer binary."""
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == "q35":
            alias = re.search(r"\(alias of (pc-q35-[\w.-]+)\)", rest, re.ASCII)
            return alias[1] if alias else "q35"
    return None


def weaknesses(capabilities: Capabilities, missing: frozenset[str] | None = None) -> tuple[str, ...]:
    """What the embedded profile lacks, one sentence each. `missing`: cgroup controllers; None: look."""
    if missing is None:
        mount = cgroup.find_mount()
        missing = cgroup.CONTROLLERS if mount is None else cgroup.CONTROLLERS - cgroup.controllers(mount)
    lines = []
    if not capabilities.hardware_virtualisation:
        lines.append(
            "machines are emulated in software: ten times slower or worse, and QEMU's emulator, which its authors "
            "do not hold to be a security barrier, is what separates a guest from its VMM process"
        )
    if not capabilities.jail:
        lines.append(
            "no jailer: QEMU's seccomp filter, a user of its own, private mount, network, IPC and UTS namespaces "
            "and a reduced view of the file system stand in its place; it has no PID namespace and no empty root"
        )
    if missing:
        lines.append(
            f"no cgroup v2 controllers for {', '.join(sorted(missing))}: a machine's use of them is not bounded "
            "by the host, and a busy one slows the others down"
        )
    return tuple(lines)


async def try_boot(machine: Machine, guest: Guest, *, deadline_s: float) -> Verdict:
    """Boots the probe guest once, confined like any VMM, and ends it in any case."""
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="microvm-probe-")))
        descriptors: dict[int, int] = {}
        for number, path in ((Fd.KERNEL, guest.kernel), (Fd.INITRAMFS, guest.initramfs)):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            descriptors[number] = fd
        plan = process.Plan(
            argv=render_probe_argv(machine),
            uid=_NOBODY,
            gid=_NOBODY,
            output=directory / "output",
            descriptors=descriptors,
            private_devices=(str(KVM_DEVICE),) if machine.accelerator == "kvm" else (),
            # Should we die meanwhile: what burns a core ends by itself, since nobody else knows of it.
            limits={"NOFILE": 256, "CPU": int(4 * deadline_s) + 10},
        )
        try:
            held = await process.launch(plan, timeout_s=_COMMAND_S)
        except process.LaunchFailed as error:
            return Verdict(works=False, reason=f"the probe guest could not be started: {error}")
        try:
            async with asyncio.timeout(deadline_s):
                await held.wait()
        except TimeoutError:
            return Verdict(works=False, reason=f"the probe guest did not reach user space within {deadline_s:g} s")
        finally:
            held.signal(signal.SIGKILL)
            await held.wait()
        said = held.output()
    if _REACHED in said:
        return Verdict(works=True, reason="the probe guest reached user space")
    last = " ".join(said.split())[-300:] or "without a word"
    return Verdict(works=False, reason=f"the probe guest ended early: {last}")


async def _judge_kvm(binary: Path, digest: str, guest: Guest, cache: Path | None) -> Verdict:
    if not await asyncio.to_thread(KVM_DEVICE.exists):
        return Verdict(works=False, reason=f"no {KVM_DEVICE}")
    kernel = guest.kernel.stat()
    key = f"{process.host_boot_id()} {digest} {kernel.st_size} {kernel.st_mtime_ns}"
    known = None if cache is None else _recall(cache, key)
    if known is not None:
        return known
    verdict = await try_boot(Machine(str(binary), "microvm", "kvm"), guest, deadline_s=PROBE_S)
    logger.info("KVM works=%s reason=%s", verdict.works, verdict.reason)
    if cache is not None:
        document = {"key": key, "works": verdict.works, "reason": verdict.reason}
        await asyncio.to_thread(write_durable_now, cache, json.dumps(document).encode())
    return verdict


def _recall(cache: Path, key: str) -> Verdict | None:
    try:
        document = json.loads(cache.read_text())
        if document["key"] != key:
            return None
        return Verdict(works=document["works"] is True, reason=str(document["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _ask(binary: Path, *words: str) -> command.Completed:
    try:
        return await command.run([binary, *words], timeout_s=_COMMAND_S)
    except command.CommandFailed as error:
        raise NoVmm(f"{binary} does not run ({error.reason}): {_MEND}") from error
