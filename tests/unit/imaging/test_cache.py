from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from microvm_mcp.imaging.cache import MAX_AGE_DAYS, Cache
from microvm_mcp.imaging.errors import ImageError


def test_entry_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.prepare()
    with pytest.raises(FileNotFoundError), cache.adding("a.tar") as scratch:
        (scratch / "b.tar").write_bytes(b"not what was announced")
    assert list(cache.directory.iterdir()) == []
    with cache.adding("a.tar") as scratch:
        (scratch / "a.tar").write_bytes(b"whole")
        assert not cache.entry("a.tar").exists()
    assert cache.entry("a.tar").read_bytes() == b"whole"


def test_half_made_and_old_package_trees_go_and_pinned_downloads_stay(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    long_ago = time.time() - (MAX_AGE_DAYS + 1) * 86_400
    for name in ("old.tar", "old.whl"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (long_ago, long_ago))
    (tmp_path / "new.tar").touch()
    (tmp_path / ".partial-x").mkdir()
    (tmp_path / ".partial-x" / "x").touch()
    cache.prepare()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.tar", "old.whl"]


def test_cache_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ImageError, match="symbolic link"):
        Cache(tmp_path / "link").prepare()
