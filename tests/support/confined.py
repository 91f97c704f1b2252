"""Host objects for one confined program, made and removed by a test: tag, cgroup, namespace, short directory."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.host import cgroup, network
from tests.support import leaks

UID = 3_900_000_000
"""Far from any range that a service of this host would use."""


@dataclass(frozen=True, slots=True)
class Place:
    unit: str
    uid: int
    netns: str
    tap: str
    cgroup: Path
    runtime_dir: Path


async def make_place(slot: int = 0, *, tag: str | None = None) -> Place:
    tag = tag or secrets.token_hex(4)
    leaks.claim(tag)
    unit, uid = f"mvm-{tag}-{slot}", UID + slot
    mount = cgroup.find_mount()
    assert mount is not None
    leaf = cgroup.ensure(mount, tag, str(slot), cgroup.Limits(memory_bytes=2 << 30, pids=128, cpus=2))
    # Short: the path of a Unix socket has 107 bytes.
    made = Place(unit, uid, unit, "tap0", leaf.path, Path(tempfile.mkdtemp(prefix=f"{unit}-", dir="/tmp")))
    try:
        await network.ensure(unit, tap="tap0", uid=uid)
    except BaseException:
        await remove_place(made)
        raise
    return made


async def remove_place(made: Place) -> None:
    await cgroup.remove(made.cgroup, timeout_s=20)
    await network.remove(made.netns)
    shutil.rmtree(made.runtime_dir)


@asynccontextmanager
async def place(slot: int = 0, *, tag: str | None = None) -> AsyncIterator[Place]:
    made = await make_place(slot, tag=tag)
    try:
        yield made
    finally:
        await remove_place(made)


@dataclass(frozen=True, slots=True)
class Seen:
    """One process as /proc shows it to everybody else."""

    threads: tuple[dict[str, str], ...]
    """The fields of each thread's status: NoNewPrivs and Seccomp are per thread."""
    own_namespaces: frozenset[str]
    """Kinds of namespace that differ from ours."""
    netns_inode: int
    session: int
    descriptors: dict[int, str]
    limits: dict[str, tuple[str, str]]
    environment: frozenset[str]


def look_at(pid: int) -> Seen:
    proc = Path(f"/proc/{pid}")
    kinds = ("mnt", "ipc", "uts", "net", "pid", "user")
    limits = {}
    for line in (proc / "limits").read_text().splitlines()[1:]:
        words = line[26:].split()
        limits[line[:26].strip()] = (words[0], words[1])
    environment = (proc / "environ").read_bytes().split(b"\0")
    return Seen(
        threads=tuple(_fields(task / "status") for task in (proc / "task").iterdir()),
        own_namespaces=frozenset(
            kind
            for kind in kinds
            if (proc / "ns" / kind).stat().st_ino != Path(f"/proc/self/ns/{kind}").stat().st_ino
        ),
        netns_inode=(proc / "ns/net").stat().st_ino,
        session=os.getsid(pid),
        descriptors={int(entry.name): str(entry.readlink()) for entry in (proc / "fd").iterdir()},
        limits=limits,
        environment=frozenset(entry.partition(b"=")[0].decode() for entry in environment if entry),
    )


def _fields(status: Path) -> dict[str, str]:
    lines = status.read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def inode(path: Path) -> int:
    return path.stat().st_ino
