"""What this host offers to tests. Each probe tries the real thing once, and says why it is missing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

CGROUP2_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def _root() -> str | None:
    return None if os.geteuid() == 0 else "run as root"


def _programs(*names: str) -> str | None:
    missing = [name for name in names if shutil.which(name) is None]
    return f"missing: {', '.join(missing)}" if missing else None


def _netns() -> str | None:
    return _root() or _programs("ip", "nft") or (None if Path("/dev/net/tun").exists() else "no /dev/net/tun")


def cgroup2_mount() -> Path | None:
    return next((mount for mount in CGROUP2_MOUNTS if (mount / "cgroup.controllers").exists()), None)


def _cgroup2() -> str | None:
    mount = cgroup2_mount()
    if mount is None:
        return "no cgroup v2 hierarchy is mounted"
    return _root()


def _reflink() -> str | None:
    return _root() or _programs("mkfs.xfs", "losetup", "mount")


def _qemu() -> str | None:
    return _root() or _programs("qemu-system-x86_64")


def _built_image(variable: str) -> str | None:
    where = os.environ.get(variable, "")
    if not where:
        return f"{variable} names no built image"
    return None if (Path(where) / "manifest.json").exists() else f"{variable} has no manifest.json"


def _image() -> str | None:
    return _built_image("MICROVM_TEST_IMAGE")


def _tiny() -> str | None:
    return _built_image("MICROVM_TEST_TINY_IMAGE")


def _npm() -> str | None:
    missing = _programs("node", "npm")
    if missing:
        return missing
    with tempfile.TemporaryDirectory() as cwd:
        done = subprocess.run(["npm", "--version"], cwd=cwd, capture_output=True, timeout=30, check=False)
    return None if done.returncode == 0 else "npm does not run"


_PROBES: dict[str, Callable[[], str | None]] = {
    "root": _root,
    "reflink": _reflink,
    "netns": _netns,
    "cgroup2": _cgroup2,
    "qemu": _qemu,
    "image": _image,
    "tiny": _tiny,
    "npm": _npm,
}


@functools.cache
def missing(name: str) -> str | None:
    """None where the host has it, else why not."""
    if name not in _PROBES:
        return f"unknown need {name!r}; known: {', '.join(_PROBES)}"
    return _PROBES[name]()


def table() -> dict[str, str | None]:
    return {name: missing(name) for name in _PROBES}
