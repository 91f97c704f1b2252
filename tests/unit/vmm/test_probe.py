"""What QEMU prints about itself, read; and what is said about the profile."""

from __future__ import annotations

import pytest

from microvm_mcp.host.cgroup import CONTROLLERS
from microvm_mcp.vmm.driver import Capabilities
from microvm_mcp.vmm.qemu.probe import parse_q35, parse_version, weaknesses

EMULATED = Capabilities(
    name="qemu",
    hardware_virtualisation=False,
    snapshot=True,
    jail=False,
    machine_type="pc-q35-7.2",
    vmm_version="7.2.22",
    vmm_digest="0" * 64,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright", (7, 2, 22)),
        ("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)", (10, 0, 2)),
        ("GNU coreutils 9.1", None),
        ("", None),
    ],
)
def test_the_version_is_read(text: str, expected: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == expected


def test_the_alias_is_resolved_to_what_it_means() -> None:
    text = "microvm      microvm (i386)\nq35          Standard PC (Q35 + ICH9, 2009) (alias of pc-q35-7.2)\n"
    assert parse_q35(text) == "pc-q35-7.2"
    assert parse_q35("pc-q35-7.2  Standard PC\n") is None


def test_each_missing_protection_is_a_line_of_its_own() -> None:
    lines = weaknesses(EMULATED, CONTROLLERS)
    assert len(lines) == 3
    assert "emulated" in lines[0]
    assert "jailer" in lines[1]
    assert "cpu, io, memory, pids" in lines[2]
    assert len(weaknesses(EMULATED, frozenset())) == 2
