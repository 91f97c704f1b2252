"""The VMM's rows of the host table: which there is, whether KVM boots a guest, and what the profile lacks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.host.preflight import Check, Verdict
from microvm_mcp.vmm.qemu import probe


@dataclass(frozen=True, slots=True)
class Report:
    checks: tuple[Check, ...]
    weaknesses: tuple[str, ...]
    """What the embedded profile lacks, one sentence each; empty where no VMM was found."""


async def survey(
    binary: str, acceleration: probe.Acceleration, *, kernel: Path, initramfs: Path, cache: Path | None
) -> Report:
    """Without a kernel and an initramfs no guest can be tried: then KVM's row says so."""
    bootable = await asyncio.to_thread(lambda: kernel.is_file() and initramfs.is_file())
    wanted: probe.Acceleration = acceleration if bootable else "emulation"
    try:
        found = await probe.survey(binary, wanted, probe.Guest(kernel, initramfs), cache=cache)
    except probe.NoVmm as error:
        fact, _, mend = str(error).rpartition(": ")
        return Report((Check("vmm", Verdict.REFUSED, fact, mend),), ())
    vmm = Check("vmm", Verdict.OK, f"QEMU {found.capabilities.vmm_version} at {found.machine.binary}")
    return Report((vmm, _kvm(found, bootable)), probe.weaknesses(found.capabilities))


def _kvm(found: probe.Found, bootable: bool) -> Check:
    if not bootable:
        return Check("kvm", Verdict.WEAKER, "not tried, since there is no image to boot", "build-image, then again")
    if found.kvm.works:
        return Check("kvm", Verdict.OK, found.kvm.reason)
    fact = f"machines are emulated: {found.kvm.reason}"
    return Check("kvm", Verdict.WEAKER, fact, "use a host on which KVM boots a stock kernel")
