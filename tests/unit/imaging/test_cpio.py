from __future__ import annotations

import stat
from dataclasses import dataclass

from microvm_mcp.imaging import cpio


@dataclass(frozen=True)
class Read:
    name: str
    mode: int
    uid: int
    mtime: int
    device: tuple[int, int]
    data: bytes


def read_archive(archive: bytes) -> list[Read]:
    """As the kernel's initramfs code reads it: fields by position, name and data padded to four bytes."""
    entries: list[Read] = []
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        _, mode, uid, _, _, mtime, size, _, _, major, minor, name_size, _ = fields
        name = archive[at + 110 : at + 110 + name_size]
        assert name.endswith(b"\0")
        start = (at + 110 + name_size + 3) // 4 * 4
        data = archive[start : start + size]
        at = (start + size + 3) // 4 * 4
        if name == b"TRAILER!!!\0":
            assert not archive[at:].strip(b"\0")
            return entries
        entries.append(Read(name[:-1].decode(), mode, uid, mtime, (major, minor), data))


def test_archive_reads_back_as_what_went_in() -> None:
    entries = [
        cpio.directory("bin"),
        cpio.file("bin/tool", b"12345", 0o755),
        cpio.file("empty", b""),
        cpio.link("bin/sh", "tool"),
        cpio.character_device("console", 5, 1),
    ]
    read = read_archive(cpio.render_archive(entries))
    assert [(item.name, item.mode, item.data, item.device) for item in read] == [
        ("bin", stat.S_IFDIR | 0o755, b"", (0, 0)),
        ("bin/tool", stat.S_IFREG | 0o755, b"12345", (0, 0)),
        ("empty", stat.S_IFREG | 0o644, b"", (0, 0)),
        ("bin/sh", stat.S_IFLNK | 0o777, b"tool", (0, 0)),
        ("console", stat.S_IFCHR | 0o600, b"", (5, 1)),
    ]
    assert {(item.uid, item.mtime) for item in read} == {(0, 0)}


def test_same_entries_give_the_same_bytes_in_whole_blocks() -> None:
    entries = [cpio.directory("a"), cpio.file("a/b", b"x" * 1001)]
    archive = cpio.render_archive(entries)
    assert archive == cpio.render_archive(iter(entries))
    assert len(archive) % 512 == 0
