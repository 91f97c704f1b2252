"""A deterministic cpio archive in the "newc" format, the one the kernel unpacks as initramfs.

Each entry is a header of thirteen 8-digit hex fields after the magic, the name with its NUL, and the data, the last
two padded to four bytes; an entry named TRAILER!!! ends the archive. Pure; owners are root and times are zero, so
the same entries give the same bytes.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """`mode` with the file type; `data` is the content of a file or the target of a link."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(name: str) -> Entry:
    return Entry(name, stat.S_IFDIR | 0o755)


def file(name: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(name, stat.S_IFREG | mode, data)


def link(name: str, target: str) -> Entry:
    return Entry(name, stat.S_IFLNK | 0o777, target.encode())


def character_device(name: str, major: int, minor: int) -> Entry:
    return Entry(name, stat.S_IFCHR | 0o600, device=(major, minor))


def render_archive(entries: Iterable[Entry]) -> bytes:
    """In the given order: a directory must come before what is in it."""
    out = bytearray()
    for inode, entry in enumerate(entries, start=1):
        _append(out, entry, inode)
    _append(out, Entry("TRAILER!!!", 0), 0)
    out += bytes(-len(out) % 512)
    return bytes(out)


def _append(out: bytearray, entry: Entry, inode: int) -> None:
    name = entry.name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (
        *(inode, entry.mode, 0, 0, links, 0, len(entry.data)),
        *(0, 0, *entry.device, len(name), 0),
    )
    out += b"070701" + b"".join(b"%08X" % field for field in fields) + name
    out += bytes(-len(out) % 4)
    out += entry.data
    out += bytes(-len(out) % 4)
