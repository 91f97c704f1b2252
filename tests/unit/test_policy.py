"""Admission: each limit refuses exactly where it is passed, and says so in numbers."""

from __future__ import annotations

import dataclasses

import pytest

from microvm_mcp.model import Limits
from microvm_mcp.policy import GIB, HostLimits, Refusal, Reservation, Usage, admit, usage

LIMITS = HostLimits(max_vms=10, max_memory_mib=10_240, max_storage_gib=100, free_floor_bytes=2 * GIB)
ASKED = Reservation(memory_mib=1024, disk_bytes=3 * GIB)
NOTHING = Usage(0, 0, 0)
PLENTY = 500 * GIB


def verdict(
    *,
    limits: HostLimits = LIMITS,
    quota: Limits = Limits(),  # noqa: B008 - frozen
    on_host: Usage = NOTHING,
    in_workspace: Usage = NOTHING,
    free_bytes: int = PLENTY,
) -> Refusal | None:
    return admit(
        ASKED, limits=limits, quota=quota, on_host=on_host, in_workspace=in_workspace, free_bytes=free_bytes
    )


def limit_of(refusal: Refusal | None) -> tuple[object, object] | None:
    return None if refusal is None else (refusal.details["scope"], refusal.details["limit"])


def test_a_machine_reserves_its_disk_twice_its_memory_and_what_was_saved() -> None:
    saved = dataclasses.replace(ASKED, saved_bytes=7)
    assert saved.storage_bytes(1.0) == 3 * GIB + 2 * GIB + 7
    assert saved.storage_bytes(0.5) == 3 * GIB // 2 + 2 * GIB + 7
    assert usage([ASKED, saved], 1.0) == Usage(2, 2048, 10 * GIB + 7)


@pytest.mark.parametrize(
    ("held", "refused_by"),
    [
        (Usage(9, 0, 0), None),
        (Usage(10, 0, 0), ("host", "max_vms")),
        (Usage(0, 9_216, 0), None),
        (Usage(0, 9_217, 0), ("host", "max_memory_mib")),
        (Usage(0, 0, 95 * GIB), None),
        (Usage(0, 0, 95 * GIB + 1), ("host", "max_storage_gib")),
    ],
)
def test_host_limits_hold_to_the_last_unit(held: Usage, refused_by: tuple[str, str] | None) -> None:
    assert limit_of(verdict(on_host=held)) == refused_by


@pytest.mark.parametrize(
    ("quota", "refused_by"),
    [
        (Limits(), None),
        (Limits(max_vms=3, max_memory_mib=3072, max_storage_gib=15), None),
        (Limits(max_vms=2), ("workspace", "max_vms")),
        (Limits(max_memory_mib=3071), ("workspace", "max_memory_mib")),
        (Limits(max_storage_gib=14), ("workspace", "max_storage_gib")),
    ],
)
def test_the_quota_of_the_workspace_holds_beside_the_host(
    quota: Limits, refused_by: tuple[str, str] | None
) -> None:
    held = usage([ASKED, ASKED], 1.0)
    assert limit_of(verdict(quota=quota, in_workspace=held, on_host=held)) == refused_by


def test_the_quota_speaks_before_the_host() -> None:
    full = Usage(10, 10_240, 100 * GIB)
    assert limit_of(verdict(quota=Limits(max_vms=10), in_workspace=full, on_host=full)) == ("workspace", "max_vms")


def test_space_that_is_really_there_counts_above_the_floor() -> None:
    assert verdict(free_bytes=7 * GIB) is None
    assert limit_of(verdict(free_bytes=7 * GIB - 1)) == ("host", "free_space_gib")


def test_less_disk_reserve_asks_for_less_space() -> None:
    lean = dataclasses.replace(LIMITS, disk_reserve=0.0)
    assert verdict(limits=lean, free_bytes=4 * GIB) is None
    assert verdict(limits=LIMITS, free_bytes=4 * GIB) is not None


def test_a_refusal_has_the_numbers_in_message_and_details() -> None:
    refusal = verdict(quota=Limits(max_memory_mib=1500), in_workspace=Usage(1, 1024, 0))
    assert refusal is not None
    error = refusal.error()
    assert error.details == {
        "limit": "max_memory_mib",
        "scope": "workspace",
        "allowed": 1500,
        "in_use": 1024,
        "asked": 1024,
    }
    assert "1500 MiB of memory" in error.message
    assert error.message.endswith(".")
