"""The host table: each check against a host that has it and, where one can be made, a host that has not."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.host import preflight
from microvm_mcp.host.preflight import GIB, Check, Verdict, Wanted
from tests.support import xfs
from tests.support.confined import UID

pytestmark = pytest.mark.needs("root", "reflink", "cgroup2")


@pytest.fixture
def wanted(reflink_dir: Path, request: pytest.FixtureRequest) -> Wanted:
    state = reflink_dir / str(request.node.name).replace("[", "-").replace("]", "")
    state.mkdir(mode=0o700)
    return Wanted(
        state_dir=state,
        jail_dir=state / "jail",
        image_dir=state / "image",
        uid_base=UID + 100_000,
        uid_count=16_384,
        min_free_bytes=GIB,
    )


async def rows(wanted: Wanted) -> dict[str, Check]:
    return {check.name: check for check in await preflight.survey(wanted)}


def worst(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.verdict is Verdict.REFUSED}


async def test_a_host_that_has_everything_is_refused_nothing_and_keeps_nothing(wanted: Wanted) -> None:
    before = sorted(Path("/sys/fs/cgroup").rglob("microvm-doctor*"))
    checks = await rows(wanted)
    assert worst(checks) == set()
    assert list(wanted.state_dir.iterdir()) == []
    assert sorted(Path("/sys/fs/cgroup").rglob("microvm-doctor*")) == before


async def test_every_refusal_comes_with_a_way_out(wanted: Wanted, tmp_path: Path) -> None:
    nowhere = replace(wanted, state_dir=tmp_path / "absent", uid_base=0, min_free_bytes=1 << 60)
    for check in await preflight.survey(nowhere):
        assert bool(check.mend) == (check.verdict is not Verdict.OK), check


async def test_a_missing_and_a_wide_state_directory_are_refused(wanted: Wanted) -> None:
    missing = await rows(replace(wanted, state_dir=wanted.state_dir / "absent"))
    assert missing["state directory"].mend == f"install -d -m 0700 {wanted.state_dir / 'absent'}"
    wanted.state_dir.chmod(0o755)
    wide = await rows(wanted)
    assert wide["state directory"].mend == f"chmod 0700 {wanted.state_dir}"


async def test_a_file_system_without_reflinks_is_refused_with_the_command_that_mends_it(
    wanted: Wanted, tmp_path: Path
) -> None:
    with xfs.mounted(tmp_path, reflink=False) as where:
        checks = await rows(replace(wanted, state_dir=where, jail_dir=where / "jail", image_dir=where / "image"))
    assert "mkfs.xfs -m reflink=1" in checks["reflink"].mend


async def test_directories_on_other_file_systems_are_refused(wanted: Wanted, tmp_path: Path) -> None:
    checks = await rows(replace(wanted, jail_dir=tmp_path / "jail", image_dir=tmp_path / "image"))
    assert {"jail directory", "image directory"} <= worst(checks)
    assert str(wanted.state_dir) in checks["jail directory"].mend


async def test_a_mount_with_nodev_and_noexec_is_refused(wanted: Wanted, tmp_path: Path) -> None:
    with xfs.mounted(tmp_path) as where:
        subprocess.run(["mount", "-o", "remount,nodev,noexec", str(where)], check=True, timeout=30)
        checks = await rows(replace(wanted, state_dir=where, jail_dir=where / "jail", image_dir=where / "image"))
    assert checks["mount options"].fact.endswith("is mounted nodev and noexec")
    assert checks["mount options"].mend == f"mount -o remount,dev,exec {where}"


async def test_user_ids_of_accounts_and_of_running_processes_are_refused(wanted: Wanted) -> None:
    assert "root" in (await rows(replace(wanted, uid_base=0)))["user ids"].fact
    squatter = subprocess.Popen(["sleep", "1000"], user=wanted.uid_base + 16_383)
    try:
        assert str(squatter.pid) in (await rows(wanted))["user ids"].fact
        elsewhere = replace(wanted, uid_base=wanted.uid_base + 16_384)
        assert (await rows(elsewhere))["user ids"].verdict is Verdict.OK
    finally:
        squatter.kill()
        squatter.wait()


async def test_too_little_space_is_refused_with_the_numbers(wanted: Wanted) -> None:
    check = (await rows(replace(wanted, min_free_bytes=1000 * GIB)))["space"]
    assert check.verdict is Verdict.REFUSED
    assert "1001 GiB" in check.mend


async def test_a_missing_program_is_refused_with_its_package(
    wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "PROGRAMS", (("no-such-program", "some-package", Verdict.REFUSED),))
    check = (await rows(wanted))["no-such-program"]
    assert (check.verdict, check.mend) == (Verdict.REFUSED, "apt-get install some-package")


def test_the_table_has_a_line_per_check_and_the_way_out_below() -> None:
    checks = (Check("one", Verdict.OK, "fine"), Check("longer", Verdict.REFUSED, "broken", "mend it"))
    assert preflight.render(checks).splitlines() == [
        "ok       one     fine",
        "refused  longer  broken",
        "                 -> mend it",
    ]
    assert preflight.refused(checks)
    assert not preflight.refused(checks[:1])
    assert preflight.documents(checks)[1] == {
        "name": "longer",
        "verdict": "refused",
        "fact": "broken",
        "mend": "mend it",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user:100000:65536\n", [("user", 100_000, 65_536)]),
        ("# none\n\nbroken\na:b:c\nx:1", []),
        ("1000:5:6\nu:7:8", [("1000", 5, 6), ("u", 7, 8)]),
    ],
)
def test_subordinate_ranges_are_read(text: str, expected: list[tuple[str, int, int]]) -> None:
    assert preflight.parse_subordinates(text) == expected
