"""Remembered digests are those of the file as it is now."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from microvm_mcp.host import digest
from microvm_mcp.host.digest import DigestCache


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_digest_is_remembered_across_processes_without_reading_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rootfs"
    file.write_bytes(b"one")
    assert DigestCache(tmp_path / "digests.json").sha256(file) == sha(b"one")

    def refuse(path: Path) -> str:
        raise AssertionError(path)

    monkeypatch.setattr(digest, "sha256_file", refuse)
    assert DigestCache(tmp_path / "digests.json").sha256(file) == sha(b"one")


def test_changed_content_of_the_same_size_and_mtime_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "rootfs"
    file.write_bytes(b"one")
    cache = DigestCache(tmp_path / "digests.json")
    cache.sha256(file)
    before = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.sha256(file) == sha(b"two")


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"1:2:3:4:5": 7}'])
def test_damaged_memory_is_ignored(tmp_path: Path, damage: str) -> None:
    (tmp_path / "digests.json").write_text(damage)
    file = tmp_path / "rootfs"
    file.write_bytes(b"one")
    assert DigestCache(tmp_path / "digests.json").sha256(file) == sha(b"one")


def test_missing_file_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DigestCache(tmp_path / "digests.json").sha256(tmp_path / "none")
