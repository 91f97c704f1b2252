"""Real cgroups: made twice, limited where the host can, killed whole, removed twice."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from microvm_mcp.host import cgroup

pytestmark = pytest.mark.needs("root", "cgroup2")

HYBRID = """25 24 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw
26 25 0:23 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
27 25 0:24 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
LIMITS = cgroup.Limits(memory_bytes=1 << 30, pids=100, cpus=2)


def mount() -> Path:
    found = cgroup.find_mount()
    assert found is not None
    return found


@pytest.fixture
async def tag() -> AsyncIterator[str]:
    made = secrets.token_hex(4)
    yield made
    for name in cgroup.leaves(mount(), made):
        await cgroup.remove(cgroup.parent(mount(), made) / name, timeout_s=20)


def sleeper(leaf: Path) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(["sleep", "1000"])
    (leaf / "cgroup.procs").write_text(str(started.pid))
    return started


def test_a_leaf_can_be_ensured_twice_and_says_which_limits_are_not_in_force(tag: str) -> None:
    one = cgroup.ensure(mount(), tag, "7", LIMITS)
    assert cgroup.ensure(mount(), tag, "7", LIMITS) == one
    assert one.path == mount() / f"microvm-{tag}" / "7"
    there = set((one.path / "cgroup.controllers").read_text().split())
    assert one.missing == cgroup.CONTROLLERS - there
    if "pids" in there:
        assert (one.path / "pids.max").read_text().strip() == "100"
    if "memory" in there:
        assert (one.path / "memory.max").read_text().strip() == str(1 << 30)
    assert cgroup.leaves(mount(), tag) == {"7"}


async def test_killing_a_leaf_ends_its_processes_and_no_others(tag: str) -> None:
    one, other = (cgroup.ensure(mount(), tag, name, LIMITS).path for name in ("1", "2"))
    mine, neighbour = sleeper(one), sleeper(other)
    assert cgroup.is_populated(one)
    await cgroup.kill(one, timeout_s=20)
    assert not cgroup.is_populated(one)
    assert await asyncio.to_thread(mine.wait, 20) == -9
    assert neighbour.poll() is None
    assert cgroup.pids(other) == (neighbour.pid,)
    await cgroup.remove(other, timeout_s=20)
    assert await asyncio.to_thread(neighbour.wait, 20) == -9


async def test_a_populated_leaf_is_removed_and_then_removed_again(tag: str) -> None:
    leaf = cgroup.ensure(mount(), tag, "1", LIMITS).path
    below = leaf / "nested" / "deep"
    await asyncio.to_thread(below.mkdir, parents=True)
    process = sleeper(below)
    removing = asyncio.create_task(cgroup.remove(leaf, timeout_s=20))
    assert await asyncio.to_thread(process.wait, 20) == -9
    await removing
    await cgroup.remove(leaf, timeout_s=20)
    assert cgroup.leaves(mount(), tag) == frozenset()
    assert not cgroup.is_populated(leaf)
    assert cgroup.pids(leaf) == ()


async def test_a_group_that_never_was_is_dead() -> None:
    await cgroup.kill(mount() / "microvm-00000000" / "none", timeout_s=1)
    await cgroup.remove(mount() / "microvm-00000000" / "none", timeout_s=1)


def test_a_refusal_names_the_group() -> None:
    with pytest.raises(cgroup.CgroupError, match="microvm-xx/0"):
        cgroup.ensure(Path("/proc"), "xx", "0", LIMITS)


@pytest.mark.parametrize(
    ("mountinfo", "expected"),
    [
        ("30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw", "/sys/fs/cgroup"),
        (
            HYBRID,
            "/sys/fs/cgroup/unified",
        ),
        ("30 24 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw", None),
        ("26 25 0:23 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory", None),
    ],
)
def test_the_hierarchy_is_found_where_it_is_mounted_whole(mountinfo: str, expected: str | None) -> None:
    assert cgroup.parse_mount(mountinfo) == (None if expected is None else Path(expected))


def test_limits_are_rendered_for_each_controller() -> None:
    assert cgroup.render_limits(cgroup.Limits(memory_bytes=5, pids=6, cpus=3)) == {
        "memory": {"memory.max": "5", "memory.swap.max": "0"},
        "pids": {"pids.max": "6"},
        "cpu": {"cpu.max": "300000 100000"},
    }
