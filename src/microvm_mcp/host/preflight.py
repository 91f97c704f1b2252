"""What this host can do, as a table of checks: each one a fact, and for what cannot work the command that mends it.

Everything is tried, not looked up: a reflink is made, a cgroup is made, a user id is searched for. What was made is
removed at once. Nothing is mended here, and nothing is assumed about a directory that does not exist yet.
"""

from __future__ import annotations

import asyncio
import grp
import os
import platform
import pwd
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from microvm_mcp.host import cgroup, disk, instance
from microvm_mcp.host.command import PLAIN_ENVIRONMENT

GIB = 1 << 30
OLDEST_PYTHON = (3, 11)


class Verdict(StrEnum):
    OK = "ok"
    WEAKER = "weaker"
    """It works, with less protection or speed than it might have."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict
    fact: str
    mend: str = ""
    """A command, or a change of the configuration; empty where nothing needs mending."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the configuration asks of the host."""

    state_dir: Path
    jail_dir: Path
    image_dir: Path
    uid_base: int
    uid_count: int
    min_free_bytes: int


PROGRAMS: tuple[tuple[str, str, Verdict], ...] = (
    ("ip", "iproute2", Verdict.REFUSED),
    ("resize2fs", "e2fsprogs", Verdict.REFUSED),
    ("nft", "nftables", Verdict.WEAKER),
)
"""Program, the Debian package that has it, and what its absence means. `nft` is for machines with networking."""


async def survey(wanted: Wanted) -> tuple[Check, ...]:
    return await asyncio.to_thread(lambda: tuple(_all(wanted)))


def refused(checks: tuple[Check, ...]) -> bool:
    return any(check.verdict is Verdict.REFUSED for check in checks)


def render(checks: tuple[Check, ...]) -> str:
    """One line per check, and below what is not well the way out."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.verdict.value:<8} {check.name:<{width}}  {check.fact}")
        if check.mend:
            lines.append(f"{'':<8} {'':<{width}}  -> {check.mend}")
    return "\n".join(lines)


def documents(checks: tuple[Check, ...]) -> list[dict[str, str]]:
    return [{**asdict(check), "verdict": check.verdict.value} for check in checks]


def _all(wanted: Wanted) -> Iterator[Check]:
    yield from (_user(), _architecture(), _python(), _cgroups(), _controllers(), _tun())
    for program, package, absence in PROGRAMS:
        yield _program(program, package, absence)
    yield _state_dir(wanted.state_dir)
    yield from _directories(wanted)
    yield _users(wanted)
    yield _subordinate_users(wanted)
    yield _space(wanted)


def _user() -> Check:
    if os.geteuid() == 0:
        return Check("user", Verdict.OK, "root")
    return Check("user", Verdict.REFUSED, f"user id {os.geteuid()}", "run it as root: sudo")


def _architecture() -> Check:
    found = platform.machine()
    if found == "x86_64":
        return Check("architecture", Verdict.OK, found)
    return Check("architecture", Verdict.REFUSED, f"{found} is not supported", "use an x86_64 host")


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST_PYTHON:
        return Check("python", Verdict.OK, found)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return Check("python", Verdict.REFUSED, f"{found} is too old", f"use Python {oldest} or newer")


def _cgroups() -> Check:
    mount = cgroup.find_mount()
    if mount is None:
        return Check(
            "cgroups",
            Verdict.REFUSED,
            "no cgroup v2 hierarchy is mounted",
            "mount -t cgroup2 none /sys/fs/cgroup, or boot with systemd.unified_cgroup_hierarchy=1",
        )
    trial = mount / f"microvm-doctor-{secrets.token_hex(4)}"
    try:
        trial.mkdir()
        has_kill = (trial / "cgroup.kill").exists()
        trial.rmdir()
    except OSError as error:
        return Check("cgroups", Verdict.REFUSED, f"none can be made in {mount}: {error.strerror}", "run it as root")
    if not has_kill:
        return Check(
            "cgroups", Verdict.REFUSED, f"Linux {platform.release()} has no cgroup.kill", "boot 5.14 or newer"
        )
    return Check("cgroups", Verdict.OK, f"version 2 at {mount}, with cgroup.kill")


def _controllers() -> Check:
    mount = cgroup.find_mount()
    missing = cgroup.CONTROLLERS - (cgroup.controllers(mount) if mount else frozenset())
    if not missing:
        return Check("limits", Verdict.OK, "processors, memory and processes of a machine are bounded")
    return Check(
        "limits",
        Verdict.WEAKER,
        f"not bounded per machine: {', '.join(sorted(missing))}",
        "boot with systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all",
    )


def _tun() -> Check:
    if Path("/dev/net/tun").exists():
        return Check("tun", Verdict.OK, "/dev/net/tun")
    return Check("tun", Verdict.REFUSED, "no /dev/net/tun", "modprobe tun")


def _program(program: str, package: str, absence: Verdict) -> Check:
    found = shutil.which(program, path=PLAIN_ENVIRONMENT["PATH"])
    if found is not None:
        return Check(program, Verdict.OK, found)
    return Check(program, absence, f"{program} is not installed", f"apt-get install {package}")


def _state_dir(path: Path) -> Check:
    try:
        instance.check_state_dir(path)
    except instance.InstanceRefused as error:
        fact, _, mend = str(error).rpartition(": ")
        return Check("state directory", Verdict.REFUSED, fact, mend)
    return Check("state directory", Verdict.OK, f"{path}, root's alone")


def _directories(wanted: Wanted) -> Iterator[Check]:
    """Image, state and jail directory on one file system that makes reflinks, without nodev and noexec."""
    if not wanted.state_dir.is_dir():
        return
    try:
        disk.probe_reflink_now(wanted.state_dir)
        yield Check("reflink", Verdict.OK, f"copies are made in {wanted.state_dir}")
    except disk.NotReflinkable as error:
        yield Check("reflink", Verdict.REFUSED, f"no reflink copies in {wanted.state_dir}", error.mend)
    except OSError as error:
        yield Check("reflink", Verdict.REFUSED, f"{wanted.state_dir}: {error.strerror}", "run it as root")
    for name, path in (("image directory", wanted.image_dir), ("jail directory", wanted.jail_dir)):
        there = _nearest(path)
        if there.stat().st_dev == wanted.state_dir.stat().st_dev:
            yield Check(name, Verdict.OK, f"{path}, on the file system of the state directory")
        else:
            mend = f"put it below {wanted.state_dir}"
            yield Check(name, Verdict.REFUSED, f"{path} is on another file system than the state directory", mend)
    for path in dict.fromkeys((wanted.state_dir, _nearest(wanted.jail_dir))):
        yield _mount_options(path)


def _nearest(path: Path) -> Path:
    """The directory itself, or what it will be made in."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _mount_options(path: Path) -> Check:
    flags = os.statvfs(path).f_flag
    wrong = [name for name, flag in (("nodev", os.ST_NODEV), ("noexec", os.ST_NOEXEC)) if flags & flag]
    if not wrong:
        return Check("mount options", Verdict.OK, f"{path}: neither nodev nor noexec")
    mend = f"mount -o remount,dev,exec {_mount_point(path)}"
    return Check("mount options", Verdict.REFUSED, f"{path} is mounted {' and '.join(wrong)}", mend)


def _mount_point(path: Path) -> Path:
    while not path.is_mount():
        path = path.parent
    return path


def _users(wanted: Wanted) -> Check:
    first, last = wanted.uid_base, wanted.uid_base + wanted.uid_count - 1
    users = [entry.pw_name for entry in pwd.getpwall() if first <= entry.pw_uid <= last]
    groups = [entry.gr_name for entry in grp.getgrall() if first <= entry.gr_gid <= last]
    if users or groups:
        names = ", ".join([*users, *groups][:3])
        return Check("user ids", Verdict.REFUSED, f"{first} to {last} include {names}", "set another uid_base")
    strangers = _strangers(first, last, _own_machines(wanted.state_dir))
    if strangers:
        pids = ", ".join(map(str, strangers[:3]))
        fact = f"{first} to {last} are in use by processes that are none of ours: {pids}"
        return Check("user ids", Verdict.REFUSED, fact, "set another uid_base, or end them")
    return Check("user ids", Verdict.OK, f"{first} to {last} are unused")


def _own_machines(state_dir: Path) -> frozenset[int]:
    mount = cgroup.find_mount()
    try:
        own = instance.read_instance_id(state_dir)
    except (OSError, instance.InstanceRefused):
        return frozenset()
    if mount is None or own is None:
        return frozenset()
    tag = instance.tag_of(own)
    parent = cgroup.parent(mount, tag)
    return frozenset(pid for name in cgroup.leaves(mount, tag) for pid in cgroup.pids(parent / name))


def _strangers(first: int, last: int, own: frozenset[int]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        try:
            if first <= entry.stat().st_uid <= last:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _subordinate_users(wanted: Wanted) -> Check:
    first, last = wanted.uid_base, wanted.uid_base + wanted.uid_count - 1
    for path in (Path("/etc/subuid"), Path("/etc/subgid")):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        for owner, start, count in parse_subordinates(text):
            if start <= last and first < start + count:
                fact = f"{first} to {last} overlap the range that {path} gives to {owner}"
                return Check("subordinate ids", Verdict.REFUSED, fact, "set another uid_base")
    return Check("subordinate ids", Verdict.OK, "no range of another user overlaps")


def parse_subordinates(text: str) -> list[tuple[str, int, int]]:
    ranges = []
    for line in text.splitlines():
        owner, _, rest = line.strip().partition(":")
        start, _, count = rest.partition(":")
        if start.isdecimal() and count.isdecimal():
            ranges.append((owner, int(start), int(count)))
    return ranges


def _space(wanted: Wanted) -> Check:
    path = _nearest(wanted.state_dir)
    free, least = disk.free_bytes(path), wanted.min_free_bytes + GIB
    fact = f"{free / GIB:.1f} GiB free for {wanted.state_dir}"
    if free >= least:
        return Check("space", Verdict.OK, fact)
    mend = f"free at least {least / GIB:.0f} GiB, or give it a larger file system"
    return Check("space", Verdict.REFUSED, f"{fact}, too little for one machine and min_free_gib", mend)
