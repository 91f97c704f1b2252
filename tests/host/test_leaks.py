"""The guard against leaks sees them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from microvm_mcp.host import process
from tests.support import leaks, xfs
from tests.support.confined import place

pytestmark = pytest.mark.needs("root", "netns", "cgroup2", "reflink")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "SETTLE_S", 0.3)


async def test_what_a_machine_leaves_is_seen_until_it_is_gone(tmp_path: Path) -> None:
    before = leaks.look([tmp_path])
    async with place() as here:
        plan = process.Plan(("/usr/bin/sleep", "1000"), here.uid, here.uid, here.runtime_dir / "o", here.cgroup)
        held = await process.launch(plan, timeout_s=20)
        seen = " ".join(leaks.left_behind(before, [tmp_path]))
        for trace in (
            f"process {held.pid} in {here.cgroup}",
            f"cgroup {here.cgroup.parent}",
            f"network namespace {here.netns}",
            f"temporary {here.runtime_dir}",
            f"child {held.pid} sleep",
        ):
            assert trace in seen
    assert leaks.left_behind(before, [tmp_path]) == []


def test_mounts_and_loop_devices_below_our_directories_are_seen(tmp_path: Path) -> None:
    before = leaks.look([tmp_path])
    with xfs.mounted(tmp_path) as where:
        seen = leaks.left_behind(before, [tmp_path])
        assert f"mount {where}" in seen
        assert any(trace.startswith("loop device") for trace in seen)
    assert leaks.left_behind(before, [tmp_path]) == []


def test_descriptors_and_zombies_are_seen(tmp_path: Path) -> None:
    before = leaks.look([tmp_path])
    read, write = os.pipe()
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    seen = leaks.left_behind(before, [tmp_path])
    assert seen.count("descriptor of pipe:[N]") == 2
    assert f"child {child.pid} true (Z)" in seen
    child.wait()
    os.close(read)
    os.close(write)
    assert leaks.left_behind(before, [tmp_path]) == []
