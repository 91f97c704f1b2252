"""State directories, locks and claims, with real second processes where a lock is the point."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.host import cgroup, instance

pytestmark = pytest.mark.needs("root")

CLAIM = instance.Claim(tag="aaaaaaaa", uid_base=500_000, uid_count=100, network_range="172.20.0.0/24")


def other(**change: object) -> instance.Claim:
    apart = replace(CLAIM, tag="bbbbbbbb", uid_base=600_000, network_range="172.21.0.0/24")
    return replace(apart, **change)  # type: ignore[arg-type]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    instance.ensure_state_dir(path)
    return path


def test_a_state_directory_is_made_for_root_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    instance.ensure_state_dir(path)
    assert path.stat().st_mode & 0o777 == 0o700
    instance.ensure_state_dir(path)


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_a_wider_state_directory_is_refused_with_the_command_that_mends_it(state: Path, mode: int) -> None:
    state.chmod(mode)
    with pytest.raises(instance.InstanceRefused, match=f"chmod 0700 {state}"):
        instance.ensure_state_dir(state)


def test_a_foreign_a_linked_and_a_missing_state_directory_are_refused(state: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(state)
    with pytest.raises(instance.InstanceRefused, match="symlinks"):
        instance.ensure_state_dir(link)
    os.chown(state, 12345, 0)
    with pytest.raises(instance.InstanceRefused, match="chown 0"):
        instance.ensure_state_dir(state)
    with pytest.raises(instance.InstanceRefused, match="install -d"):
        instance.check_state_dir(tmp_path / "absent")


def test_the_instance_id_is_made_once(state: Path) -> None:
    assert instance.read_instance_id(state) is None
    made = instance.ensure_instance_id(state)
    assert len(made) == 32
    assert int(made, 16) >= 0
    assert instance.ensure_instance_id(state) == made == instance.read_instance_id(state)
    assert instance.tag_of(made) == made[:8]
    assert (state / "instance").stat().st_mode & 0o777 == 0o600


def test_a_damaged_instance_id_is_refused_and_never_replaced(state: Path) -> None:
    (state / "instance").write_text("nonsense")
    with pytest.raises(instance.InstanceRefused, match="backup"):
        instance.ensure_instance_id(state)
    assert (state / "instance").read_text() == "nonsense"


def test_a_second_service_on_one_state_directory_is_refused_naming_the_first(state: Path) -> None:
    lock = instance.lock_state_dir(state)
    code = (
        "import sys; from pathlib import Path; from microvm_mcp.host import instance\n"
        "try: instance.lock_state_dir(Path(sys.argv[1]))\n"
        "except instance.InstanceRefused as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, state], capture_output=True, text=True, timeout=30, check=True
    )
    assert f"{state} is in use by pid " in done.stdout
    lock.release()
    again = subprocess.run(
        [sys.executable, "-c", code, state], capture_output=True, text=True, timeout=30, check=True
    )
    assert again.stdout == ""


def test_claims_that_do_not_touch_stand_side_by_side(tmp_path: Path) -> None:
    one = instance.register(CLAIM, cgroup_mount=None, run_dir=tmp_path / "run")
    two = instance.register(other(), cgroup_mount=None, run_dir=tmp_path / "run")
    two.release(cgroup_mount=None)
    one.release(cgroup_mount=None)
    assert list((tmp_path / "run" / "instances").glob("*.json")) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"uid_base": 500_099}, "uid_base"),
        ({"uid_base": 499_901, "uid_count": 100}, "uid_base"),
        ({"uid_base": 1, "uid_count": 10_000_000}, "uid_base"),
        ({"network_range": "172.16.0.0/12"}, "network_range"),
        ({"network_range": "172.20.0.128/30"}, "network_range"),
    ],
)
def test_an_overlapping_claim_is_refused_naming_the_other_instance(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    standing = instance.register(CLAIM, cgroup_mount=None, run_dir=tmp_path)
    with pytest.raises(instance.InstanceRefused, match=f"aaaaaaaa.*set another {says}"):
        instance.register(other(**change), cgroup_mount=None, run_dir=tmp_path)
    standing.release(cgroup_mount=None)
    instance.register(other(**change), cgroup_mount=None, run_dir=tmp_path).release(cgroup_mount=None)


def test_two_services_with_one_id_are_refused(tmp_path: Path) -> None:
    standing = instance.register(CLAIM, cgroup_mount=None, run_dir=tmp_path)
    with pytest.raises(instance.InstanceRefused, match="runs already"):
        instance.register(CLAIM, cgroup_mount=None, run_dir=tmp_path)
    standing.release(cgroup_mount=None)


def test_a_claim_of_a_dead_service_gives_way(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from microvm_mcp.host import instance\n"
        f"instance.register(instance.{CLAIM!r}, cgroup_mount=None, run_dir=Path(sys.argv[1])); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], timeout=30, check=True)
    assert (tmp_path / "instances" / "aaaaaaaa.json").exists()
    instance.register(other(uid_base=CLAIM.uid_base), cgroup_mount=None, run_dir=tmp_path).release(
        cgroup_mount=None
    )


def sleeper(leaf: Path) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(["sleep", "1000"])
    (leaf / "cgroup.procs").write_text(str(started.pid))
    return started


@pytest.mark.needs("cgroup2")
async def test_a_claim_stands_while_its_machines_live_though_its_service_is_gone(tmp_path: Path) -> None:
    mount = cgroup.find_mount()
    assert mount is not None
    claim = replace(CLAIM, tag=secrets.token_hex(4))
    leaf = cgroup.ensure(mount, claim.tag, "0", cgroup.Limits(memory_bytes=1 << 30, pids=9, cpus=1)).path
    machine = sleeper(leaf)
    instance.register(claim, cgroup_mount=mount, run_dir=tmp_path).release(cgroup_mount=mount)
    with pytest.raises(instance.InstanceRefused, match=claim.tag):
        instance.register(other(uid_base=claim.uid_base), cgroup_mount=mount, run_dir=tmp_path)
    machine.kill()
    machine.wait(20)
    await cgroup.remove(leaf, timeout_s=20)
    instance.register(other(uid_base=claim.uid_base), cgroup_mount=mount, run_dir=tmp_path).release(
        cgroup_mount=mount
    )


def test_state_directory_of_another_instance_or_of_none_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    wanted = "0123456789abcdef" * 2
    with pytest.raises(instance.InstanceRefused, match="no instance id"):
        instance.expect_instance(tmp_path, wanted)
    assert list(tmp_path.iterdir()) == []
    other = instance.ensure_instance_id(tmp_path)
    with pytest.raises(instance.InstanceRefused, match=other):
        instance.expect_instance(tmp_path, wanted)
    instance.expect_instance(tmp_path, other)
