from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from microvm_mcp.imaging.debian import parse_dpkg_status
from microvm_mcp.imaging.disk import make_disk
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.tree import SUPERVISOR_PATH, USER_ID, check_owners, set_owners_and_modes

DISK_MIB = 32


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in ("etc", "root", "home/user/.local", "workspace", "usr/bin", "usr/lib/microvm"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0:::\nuser:x:1000:1000:::\n")
    (root / "etc/group").write_text("root:x:0:\nshadow:x:42:\nuser:x:1000:\n")
    (root / "etc/shadow").write_text("root:!*:::::::\n")
    (root / "usr/bin/su").write_text("#!")
    (root / "usr/bin/su").chmod(0o4755)
    (root / SUPERVISOR_PATH).write_text("zip")
    (root / "home/user/.profile").write_text("")
    return root


@pytest.mark.needs("root")
def test_owners_and_modes_are_set_and_no_program_changes_its_identity(tree: Path) -> None:
    set_owners_and_modes(tree)
    check_owners(tree)
    assert (tree / "home/user/.profile").stat().st_uid == USER_ID
    assert (tree / "workspace").stat().st_uid == USER_ID
    assert stat.S_IMODE((tree / "usr/bin/su").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "etc/shadow").stat().st_mode) == 0o600
    assert stat.S_IMODE((tree / "root").stat().st_mode) == 0o700


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("path", "owner", "said"),
    [
        ("usr/bin/su", (12345, 0), "12345:0, unknown in the image"),
        ("usr/bin/su", (0, 12345), "0:12345, unknown in the image"),
        ("usr/bin/su", (USER_ID, USER_ID), "wrong owner"),
        ("workspace", (0, 0), "wrong owner"),
    ],
)
def test_owner_that_does_not_belong_there_is_refused(
    tree: Path, path: str, owner: tuple[int, int], said: str
) -> None:
    set_owners_and_modes(tree)
    os.chown(tree / path, *owner)
    with pytest.raises(ImageError, match=said):
        check_owners(tree)


@pytest.mark.needs("root")
async def test_disk_is_a_clean_sparse_file_system_with_numeric_owners_and_derived_identity(
    tree: Path, tmp_path: Path
) -> None:
    set_owners_and_modes(tree)
    images = [tmp_path / "one.raw", tmp_path / "two.raw"]
    for image in images:
        await make_disk(tree, image, size_mib=DISK_MIB, bytes_per_inode=16384, inputs_digest="a" * 64)
    checked = subprocess.run(
        ["e2fsck", "-fn", str(images[0])], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout
    status = images[0].stat()
    assert status.st_size == DISK_MIB << 20
    assert status.st_blocks * 512 < status.st_size / 2
    headers = [
        subprocess.run(["dumpe2fs", "-h", str(image)], capture_output=True, timeout=60, check=True).stdout
        for image in images
    ]
    assert headers[0] == headers[1]
    assert b"Filesystem created:" in headers[0]


@pytest.mark.needs("root")
async def test_disk_that_cannot_hold_the_tree_is_an_error(tree: Path, tmp_path: Path) -> None:
    (tree / "large").write_bytes(b"x" * (4 << 20))
    with pytest.raises(Exception, match="mke2fs"):
        await make_disk(tree, tmp_path / "x.raw", size_mib=2, bytes_per_inode=16384, inputs_digest="a" * 64)


def test_versions_come_from_what_dpkg_says_is_installed() -> None:
    status = (
        "Package: zlib1g\nStatus: install ok installed\nVersion: 1:1.3\nDescription: x\n more: of it\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 2\n\n"
        "Package: bash\nStatus: install ok installed\nVersion: 5.2-1\n"
    )
    assert parse_dpkg_status(status) == {"bash": "5.2-1", "zlib1g": "1:1.3"}
