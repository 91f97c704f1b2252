"""Reflinks on a real XFS, refusal on one that cannot, and publication."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from microvm_mcp.host import disk
from tests.support import xfs

pytestmark = pytest.mark.needs("root", "reflink")


@pytest.fixture
def work(reflink_dir: Path, request: pytest.FixtureRequest) -> Path:
    path = reflink_dir / str(request.node.name).replace("[", "-").replace("]", "")
    path.mkdir()
    return path


def listing(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def test_a_copy_shares_its_blocks_and_nothing_written_later(work: Path) -> None:
    source, copy = work / "source", work / "copy"
    source.write_bytes(os.urandom(8 << 20))
    await disk.sync(source)
    free = disk.free_bytes(work)
    await disk.clone(source, copy)
    await disk.sync(copy)
    assert free - disk.free_bytes(work) < 1 << 20
    assert copy.read_bytes() == source.read_bytes()
    assert mode(copy) == 0o600
    with copy.open("r+b") as file:
        file.write(b"mine")
    assert source.read_bytes()[:4] != b"mine"


async def test_a_copy_replaces_nothing_and_follows_no_symlink(work: Path) -> None:
    source, taken, link = work / "source", work / "taken", work / "link"
    source.write_bytes(b"x" * 4096)
    taken.write_bytes(b"precious")
    link.symlink_to(source)
    with pytest.raises(FileExistsError):
        await disk.clone(source, taken)
    assert taken.read_bytes() == b"precious"
    with pytest.raises(OSError) as caught:
        await disk.clone(link, work / "copy")
    assert caught.value.errno == errno.ELOOP
    assert not (work / "copy").exists()


async def test_a_copy_from_another_file_system_is_refused_with_the_mending_command(
    work: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 4096)
    with pytest.raises(disk.NotReflinkable, match=r"mkfs\.xfs -m reflink=1") as caught:
        await disk.clone(source, work / "copy")
    assert "mount -o loop" in caught.value.mend
    assert not (work / "copy").exists()


async def test_the_probe_really_copies_and_leaves_nothing(work: Path) -> None:
    await disk.probe_reflink(work)
    image = work / "image"
    image.write_bytes(b"x" * 65536)
    await disk.probe_reflink(work, image)
    assert listing(work) == ["image"]


async def test_the_probe_refuses_a_file_system_without_reflinks(tmp_path: Path) -> None:
    with xfs.mounted(tmp_path, reflink=False) as where:
        with pytest.raises(disk.NotReflinkable, match=str(where)):
            await disk.probe_reflink(where)
        assert list(where.iterdir()) == []


async def test_a_sparse_file_has_a_size_and_occupies_nothing(work: Path) -> None:
    await disk.create_sparse(work / "disk", 1 << 30)
    assert (work / "disk").stat().st_size == 1 << 30
    assert disk.allocated_bytes(work / "disk") == 0
    with pytest.raises(FileExistsError):
        await disk.create_sparse(work / "disk", 1)
    await disk.extend(work / "disk", 2 << 30)
    assert (work / "disk").stat().st_size == 2 << 30
    with pytest.raises(ValueError, match="never gets smaller"):
        await disk.extend(work / "disk", 1 << 30)


async def test_publishing_replaces_by_one_rename(work: Path) -> None:
    staging, final = work / "staging", work / "final"
    staging.mkdir()
    (staging / "memory").write_bytes(b"m")
    await disk.publish(staging, final)
    assert (final / "memory").read_bytes() == b"m"
    assert not staging.exists()
    await disk.write_durable(work / "file", b"one")
    await disk.write_durable(work / "file", b"two", mode=0o640)
    assert (work / "file").read_bytes() == b"two"
    assert mode(work / "file") == 0o640
    assert listing(work) == ["file", "final"]


async def test_removing_a_tree_follows_no_symlink_and_can_be_repeated(work: Path) -> None:
    outside = work / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = work / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "link").symlink_to(outside)
    await disk.remove_tree(tree)
    await disk.remove_tree(tree)
    assert not tree.exists()
    (work / "tree").symlink_to(outside)
    await disk.remove_tree(work / "tree")
    assert (outside / "kept").exists()
