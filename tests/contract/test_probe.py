"""The survey of this host's QEMU, with probe guests that really boot."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.host import process
from microvm_mcp.vmm.qemu import probe
from microvm_mcp.vmm.qemu.argv import Machine
from tests.support.tiny import machine, tiny_image

pytestmark = [pytest.mark.needs("root", "qemu", "tiny"), pytest.mark.timeout(180)]


def guest() -> probe.Guest:
    return probe.Guest(tiny_image() / "vmlinuz", tiny_image() / "initramfs.img")


def qemus() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"rdinit=/bin/busybox" in (entry / "cmdline").read_bytes():
                    found.add(entry.name)
            except OSError:
                continue
    return found


async def test_a_guest_that_boots_is_seen_to_reach_user_space() -> None:
    verdict = await probe.try_boot(machine(), guest(), deadline_s=120)
    assert verdict == probe.Verdict(works=True, reason="the probe guest reached user space")


async def test_a_guest_that_makes_no_progress_is_ended_at_the_deadline() -> None:
    verdict = await probe.try_boot(machine(), guest(), deadline_s=0.2)
    assert not verdict.works
    assert "0.2 s" in verdict.reason
    assert qemus() == set()


async def test_a_guest_whose_service_died_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[str] = []
    launch = process.launch

    async def look(plan: process.Plan, *, timeout_s: float) -> process.Process:
        held = await launch(plan, timeout_s=timeout_s)
        text = await asyncio.to_thread(Path(f"/proc/{held.pid}/limits").read_text)
        limits.extend(line for line in text.splitlines() if line.startswith("Max cpu time"))
        return held

    monkeypatch.setattr(process, "launch", look)
    await probe.try_boot(machine(), guest(), deadline_s=0.5)
    assert [line.split()[3:5] for line in limits] == [["12", "12"]]


async def test_a_kernel_that_is_none_is_no_success(tmp_path: Path) -> None:
    fake = tmp_path / "kernel"
    fake.write_bytes(b"\0" * 65536)
    fake.chmod(0o644)
    verdict = await probe.try_boot(machine(), replace(guest(), kernel=fake), deadline_s=20)
    assert not verdict.works


async def test_a_machine_type_that_does_not_exist_is_told_in_qemus_words() -> None:
    verdict = await probe.try_boot(Machine(machine().binary, "nonsense", "tcg"), guest(), deadline_s=20)
    assert not verdict.works
    assert "supported machines" in verdict.reason


async def test_what_is_chosen_is_what_was_seen_to_work_and_the_verdict_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "probe.json"
    found = await probe.survey("qemu-system-x86_64", "auto", guest(), cache=cache)
    assert found.capabilities.hardware_virtualisation is found.kvm.works
    if found.kvm.works:
        assert (found.machine.machine_type, found.machine.accelerator) == ("microvm", "kvm")
    else:
        assert found.machine.machine_type.startswith("pc-q35-")
        assert found.machine.accelerator == "tcg"
    assert len(found.capabilities.vmm_digest) == 64
    assert qemus() == set()

    async def not_again(*_: object, **__: object) -> probe.Verdict:
        raise AssertionError("probed again")

    if probe.KVM_DEVICE.exists():
        monkeypatch.setattr(probe, "try_boot", not_again)
        assert await probe.survey("qemu-system-x86_64", "auto", guest(), cache=cache) == found
        document = json.loads(cache.read_text())
        document["key"] = document["key"].replace(process.host_boot_id(), "an-earlier-boot")
        cache.write_text(json.dumps(document))
        with pytest.raises(AssertionError, match="probed again"):
            await probe.survey("qemu-system-x86_64", "auto", guest(), cache=cache)


async def test_kvm_that_was_demanded_and_does_not_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> probe.Verdict:
        return probe.Verdict(works=False, reason="it burns a core")

    monkeypatch.setattr(probe, "try_boot", broken)
    with pytest.raises(probe.NoVmm, match="acceleration"):
        await probe.survey("qemu-system-x86_64", "kvm", guest())


async def test_emulation_that_was_chosen_probes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_asked(*_: object, **__: object) -> probe.Verdict:
        raise AssertionError("probed")

    monkeypatch.setattr(probe, "try_boot", not_asked)
    found = await probe.survey("qemu-system-x86_64", "emulation", guest())
    assert found.machine.accelerator == "tcg"


async def test_a_missing_and_a_foreign_binary_are_refused_with_the_command_that_mends_it() -> None:
    for binary in ("qemu-system-nonsense", "/bin/true"):
        with pytest.raises(probe.NoVmm, match="apt-get install"):
            await probe.survey(binary, "emulation", guest())
