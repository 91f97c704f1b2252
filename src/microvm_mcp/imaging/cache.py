"""Downloads and unpacked-once trees that a later build of the same inputs takes from disk.

An entry is complete or not there: it is written under another name and renamed. Entries older than `MAX_AGE_DAYS`
are dropped, so that a rebuild brings the security updates of its day.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.imaging.errors import ImageError

MAX_AGE_DAYS = 14
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class Cache:
    directory: Path

    def prepare(self) -> None:
        """Only under the lock of `exclusive.py`: whatever is half made here has no maker any more."""
        if self.directory.is_symlink():
            raise ImageError("The cache directory is a symbolic link; name the directory itself.")
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        limit = time.time() - MAX_AGE_DAYS * 86_400
        for path in self.directory.iterdir():
            if path.name.startswith(_PARTIAL) or (path.name.endswith(".tar") and path.lstat().st_mtime < limit):
                remove(path)

    def entry(self, name: str) -> Path:
        return self.directory / name

    @contextmanager
    def adding(self, name: str) -> Iterator[Path]:
        """A new empty directory; what the body leaves in it under `name` becomes the entry."""
        scratch = self.directory / f"{_PARTIAL}{name}"
        remove(scratch)
        scratch.mkdir(mode=0o755)
        try:
            yield scratch
            (scratch / name).replace(self.entry(name))
        finally:
            remove(scratch)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_tree(directory: Path) -> None:
    """Files first, then the directory that names them."""
    for path in (*sorted(directory.iterdir()), directory):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
