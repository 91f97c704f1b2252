"""One instance on this host: its state directory, its identity, and its claim to user ids and addresses.

The state directory is root's alone (0700) and locked by the one service that uses it. The instance id is made
once, durably; its first eight digits, the tag, are in the name of everything the instance makes. User id and
address ranges are claimed in a registry that all instances of the host share; a claim stands while its service
holds the lock or any of its machines lives.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import logging
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from microvm_mcp.host import cgroup
from microvm_mcp.host.disk import write_durable_now
from microvm_mcp.model import InstanceId

logger = logging.getLogger(__name__)

RUN_DIR = Path("/run/microvm-mcp")
_ID = re.compile(r"[0-9a-f]{32}")
_TAG = re.compile(r"[0-9a-f]{8}")
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class InstanceRefused(Exception):
    """The fact, then the way out; safe to show to the operator."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What an instance takes of the host: `uid_count` users from `uid_base` on, and an address range."""

    tag: str
    uid_base: int
    uid_count: int
    network_range: str | None = None
    """None: it gives its machines no addresses on the host."""


def tag_of(instance_id: InstanceId) -> str:
    return instance_id[:8]


def unit_name(tag: str, slot: int) -> str:
    """Name on the host of whatever belongs to one machine."""
    return f"mvm-{tag}-{slot}"


def unit_prefix(tag: str) -> str:
    return f"mvm-{tag}-"


def check_state_dir(path: Path) -> None:
    """Refuses a state directory that anyone else could look into or redirect."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise InstanceRefused(f"{path} does not exist: install -d -m 0700 {path}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise InstanceRefused(f"{path} is no directory (symlinks are not followed): name the directory itself")
    if found.st_uid != os.geteuid():
        raise InstanceRefused(f"{path} belongs to user {found.st_uid}: chown {os.geteuid()} {path}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise InstanceRefused(f"{path} is open to others (mode {mode:04o}): chmod 0700 {path}")


def ensure_state_dir(path: Path) -> None:
    """Makes it if it is missing; refuses it if it is wider than 0700."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    check_state_dir(path)


def ensure_instance_id(state_dir: Path) -> InstanceId:
    """The id of this state directory, made and made durable at the first call. Call it with the lock held."""
    found = read_instance_id(state_dir)
    if found is not None:
        return found
    made = InstanceId(secrets.token_hex(16))
    write_durable_now(state_dir / "instance", f"{made}\n".encode())
    return made


def read_instance_id(state_dir: Path) -> InstanceId | None:
    """None where no service has used the directory yet; for commands that run beside the service."""
    try:
        text = (state_dir / "instance").read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    if not _ID.fullmatch(text):
        raise InstanceRefused(f"{state_dir / 'instance'} holds no instance id: restore it from a backup")
    return InstanceId(text)


def expect_instance(state_dir: Path, expected: str) -> None:
    """Refuses a directory of another instance or of none, before anything is made in it."""
    found = read_instance_id(state_dir)
    if found != expected:
        holds = "no instance id" if found is None else f"instance {found}"
        raise InstanceRefused(
            f"{state_dir} holds {holds}, not {expected}: mount the volume that belongs there, or correct `instance`"
        )


class Lock:
    """An flock that lasts as long as this object, and no longer than the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """None if somebody else holds it."""
        fd = os.open(path, _LOCK_FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def write(self, text: str) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_state_dir(state_dir: Path) -> Lock:
    """One service per state directory."""
    lock = Lock.take(state_dir / "lock")
    if lock is None:
        holder = (state_dir / "lock").read_text(encoding="ascii", errors="replace").strip() or "another process"
        raise InstanceRefused(
            f"{state_dir} is in use by {holder[:40]}: stop that service or give this one its own state_dir"
        )
    lock.write(f"pid {os.getpid()}\n")
    return lock


class Registration:
    """A claim in force. `release` gives it up; machines that live on keep it standing."""

    def __init__(self, lock: Lock, path: Path) -> None:
        self._lock = lock
        self._path = path

    def release(self, *, cgroup_mount: Path | None) -> None:
        if not _machines_live(cgroup_mount, self._path.stem):
            self._path.unlink(missing_ok=True)
        self._lock.release()


def register(claim: Claim, *, cgroup_mount: Path | None, run_dir: Path = RUN_DIR) -> Registration:
    """Refuses a range that overlaps another instance's, naming that instance."""
    registry = run_dir / "instances"
    run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    registry.mkdir(mode=0o700, exist_ok=True)
    # Held for the few milliseconds of looking and entering, so that two starts cannot pass each other.
    gate = os.open(registry / ".lock", _LOCK_FLAGS, 0o600)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for path in sorted(registry.glob("*.json")):
            if path.stem != claim.tag and _stands(path, cgroup_mount):
                other = _read(path)
                if other is not None:
                    _refuse_overlap(claim, other)
        own = registry / f"{claim.tag}.json"
        lock = Lock.take(own)
        if lock is None:
            raise InstanceRefused(f"instance {claim.tag} runs already: two state directories have the same id")
        lock.write(json.dumps(asdict(claim)))
    finally:
        os.close(gate)
    return Registration(lock, own)


def _stands(path: Path, cgroup_mount: Path | None) -> bool:
    """Whether another instance's claim is in force; removes it if not."""
    lock = Lock.take(path)
    if lock is None:
        return True
    try:
        if _machines_live(cgroup_mount, path.stem):
            return True
        path.unlink(missing_ok=True)
        return False
    finally:
        lock.release()


def _machines_live(cgroup_mount: Path | None, tag: str) -> bool:
    if cgroup_mount is None or not _TAG.fullmatch(tag):
        return False
    return cgroup.is_populated(cgroup.parent(cgroup_mount, tag))


def _read(path: Path) -> Claim | None:
    try:
        fields = json.loads(path.read_text())
        network = fields["network_range"]
        return Claim(
            str(fields["tag"]),
            int(fields["uid_base"]),
            int(fields["uid_count"]),
            None if network is None else str(ipaddress.ip_network(network)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        logger.warning("unreadable claim path=%s", path)
        return None


def _refuse_overlap(claim: Claim, other: Claim) -> None:
    if uids_overlap(claim, other):
        raise InstanceRefused(
            f"user ids {claim.uid_base} to {claim.uid_base + claim.uid_count - 1} overlap those of instance "
            f"{other.tag} ({other.uid_base} to {other.uid_base + other.uid_count - 1}): set another uid_base"
        )
    if claim.network_range is None or other.network_range is None:
        return
    if ipaddress.ip_network(claim.network_range).overlaps(ipaddress.ip_network(other.network_range)):
        raise InstanceRefused(
            f"network_range {claim.network_range} overlaps that of instance {other.tag} ({other.network_range}): "
            "set another network_range"
        )


def uids_overlap(one: Claim, other: Claim) -> bool:
    return one.uid_base < other.uid_base + other.uid_count and other.uid_base < one.uid_base + one.uid_count
