"""A reflinking file system for tests: XFS on a loop device, made once per session and taken down after it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_GIB = 8
"""Sparse: it costs what is written."""


@contextmanager
def mounted(directory: Path, *, reflink: bool = True) -> Iterator[Path]:
    """Yields the mount point. Both it and the backing file lie below `directory`."""
    backing, mount_point = directory / "reflink.xfs", directory / "reflink"
    mount_point.mkdir()
    with backing.open("wb") as file:
        file.truncate(SIZE_GIB << 30)
    _run("mkfs.xfs", "-q", "-m", f"reflink={int(reflink)}", str(backing))
    _run("mount", "-o", "loop", str(backing), str(mount_point))
    try:
        yield mount_point
    finally:
        _run("umount", str(mount_point))
        backing.unlink()


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=60, capture_output=True)
