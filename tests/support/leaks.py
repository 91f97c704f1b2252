"""What a test run leaves behind on the host: looked for before and after, anything new is a failure.

Only what is certainly ours counts, since other instances and other test runs may live on the same host: things that
carry a tag which this run claimed or whose state directory it made, paths below its directories, its own children
and descriptors.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from microvm_mcp.host import cgroup, instance, network

_claimed: set[str] = set()
SETTLE_S = 10.0
"""A VMM that was just killed is reaped, and its namespace taken apart, a moment later."""


def claim(tag: str) -> None:
    """Whatever carries this instance tag belongs to this run."""
    _claimed.add(tag)


def temporary_prefix() -> str:
    """For directories in /tmp whose path has to be short."""
    return f"mvm-test-{os.getpid()}-"


def look(directories: Iterable[Path]) -> Counter[str]:
    """Everything of this run that exists now."""
    below = tuple(path for path in directories if path.exists())
    tags = _claimed | _tags_of_state_directories(below)
    gc.collect()
    found: Counter[str] = Counter()
    for tag in sorted(tags):
        found.update(_of_instance(tag))
    found.update(_mounts(below))
    found.update(_loops(below))
    prefixes = (temporary_prefix(), *(instance.unit_prefix(tag) for tag in tags))
    found.update(f"temporary {path}" for path in Path("/tmp").iterdir() if path.name.startswith(prefixes))
    found.update(_children())
    found.update(_descriptors())
    return found


def left_behind(before: Counter[str], directories: Iterable[Path]) -> list[str]:
    """What is new and stays, after some time to settle."""
    directories = tuple(directories)
    deadline = time.monotonic() + SETTLE_S
    while new := look(directories) - before:
        if time.monotonic() > deadline:
            return sorted(new.elements())
        time.sleep(0.1)
    return []


def _tags_of_state_directories(directories: tuple[Path, ...]) -> set[str]:
    tags = set()
    for directory in directories:
        for pattern in ("*/state/instance", "*/*/instance"):
            for file in directory.glob(pattern):
                tags.add(file.read_text(encoding="ascii", errors="replace")[:8])
    return {tag for tag in tags if re.fullmatch(r"[0-9a-f]{8}", tag)}


def _of_instance(tag: str) -> list[str]:
    found = []
    mount = cgroup.find_mount()
    if mount is not None:
        for name in cgroup.leaves(mount, tag):
            leaf = cgroup.parent(mount, tag) / name
            found.append(f"cgroup {leaf}")
            found += [f"process {pid} in {leaf}" for pid in cgroup.pids(leaf)]
        if cgroup.parent(mount, tag).exists():
            found.append(f"cgroup {cgroup.parent(mount, tag)}")
    found += [f"network namespace {name}" for name in network.names(instance.unit_prefix(tag))]
    claims = instance.RUN_DIR / "instances" / f"{tag}.json"
    if claims.exists():
        found.append(f"claim {claims}")
    if shutil.which("nft") and os.geteuid() == 0:
        shown = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, timeout=30, check=False)
        found += [f"nft {line}" for line in shown.stdout.splitlines() if tag in line]
    return found


def _is_below(path: str, directories: tuple[Path, ...]) -> bool:
    return any(Path(path).is_relative_to(directory) for directory in directories)


def _mounts(directories: tuple[Path, ...]) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [f"mount {point}" for point in points if _is_below(point, directories)]


def _loops(directories: tuple[Path, ...]) -> list[str]:
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        backing = file.read_text().strip()
        # Unmounted and unlinked: it clears itself when the last copy of the mount goes, which may be in a mount
        # namespace that a stranger made meanwhile.
        if _is_below(backing, directories) and not backing.endswith(" (deleted)"):
            found.append(f"loop device for {backing}")
    return found


def _children() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if int(parent) == os.getpid():
            found.append(f"child {entry.name} {name} ({state})")
    return found


def _descriptors() -> list[str]:
    """By what they are, not by number; the one that lists them is not among them."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if not target.startswith("/proc/"):
            found.append(f"descriptor of {re.sub(r'[0-9]+', 'N', target)}")
    return found
