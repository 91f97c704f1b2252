"""The root file system's tree, from the unpacked packages to what lands on the disk.

Owns overlay, users, links, masks, permissions and the supervisor's place. Owners are numbers, checked at the end
against the tree's own user and group files: an owner of the build host cannot slip in.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from microvm_mcp.host.command import run
from microvm_mcp.imaging.cache import remove
from microvm_mcp.imaging.debian import PACKAGES_FILE
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.recipe import Variant
from microvm_mcp.imaging.supervisor import Supervisor, render_zip

USER_ID = 1000
SUPERVISOR_PATH = "usr/lib/microvm/supervisor.pyz"
_EMPTY = ("dev", "proc", "sys", "run", "tmp", "var/tmp", "var/log", "boot", "var/cache/apt", "var/lib/apt/lists")
_LEFT_BEHIND = (
    "etc/.pwd.lock",
    "etc/passwd-",
    "etc/group-",
    "etc/shadow-",
    "etc/gshadow-",
    "etc/subuid-",
    "etc/subgid-",
)
_PRIVATE = {"etc/shadow": 0o600, "etc/gshadow": 0o600, "root": 0o700, "home/user": 0o755}
_ID_SIDS = stat.S_ISUID | stat.S_ISGID


async def finish_tree(tree: Path, variant: Variant, supervisor: Supervisor) -> None:
    """Everything after packages, kernel modules and Node are in place."""
    _empty_directories(tree)
    for name in (*_LEFT_BEHIND, PACKAGES_FILE, "etc/resolv.conf"):
        remove(tree / name)
    for name in variant.remove:
        remove(tree / name)
    for host_key in (tree / "etc/ssh").glob("ssh_host_*"):
        host_key.unlink()
    for source in (tree / "etc/apt/sources.list.d").glob("*"):
        source.unlink()
    _write_overlay(tree, variant)
    _add_user(tree)
    _write_links(tree, variant)
    # Empty, not absent: systemd then makes an id in memory at each boot and takes the boot for no first one.
    (tree / "etc/machine-id").write_bytes(b"")
    await _install_supervisor(tree, supervisor)
    set_owners_and_modes(tree)
    check_owners(tree)


def _empty_directories(tree: Path) -> None:
    for name in _EMPTY:
        remove(tree / name)
        (tree / name).mkdir(mode=0o755, parents=True)
    for name in ("tmp", "var/tmp"):
        (tree / name).chmod(0o1777)
    (tree / "var/lib/microvm").mkdir(mode=0o755, parents=True, exist_ok=True)


def _write_overlay(tree: Path, variant: Variant) -> None:
    for item in variant.overlay:
        path = tree / item.path
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        remove(path)
        path.write_bytes(item.data)
        path.chmod(0o755 if item.executable else 0o644)


def _add_user(tree: Path) -> None:
    """`*` and not `!` for the user: no password matches, and sshd still takes a key."""
    _replace_line(tree / "etc/passwd", "user", f"user:x:{USER_ID}:{USER_ID}::/home/user:/bin/bash")
    _replace_line(tree / "etc/group", "user", f"user:x:{USER_ID}:")
    _replace_line(tree / "etc/shadow", "user", "user:*:20000:0:99999:7:::")
    _replace_line(tree / "etc/shadow", "root", "root:!*:20000:0:99999:7:::")
    for name in ("home/user", "home/user/.local/bin", "workspace", "root"):
        (tree / name).mkdir(mode=0o755, parents=True, exist_ok=True)


def _replace_line(path: Path, key: str, line: str) -> None:
    kept = [old for old in path.read_text("utf-8").splitlines() if old.partition(":")[0] != key]
    path.write_text("".join(f"{text}\n" for text in (*kept, line)), "utf-8")


def _write_links(tree: Path, variant: Variant) -> None:
    """A masked unit loses its wants too: systemd would look each of them up at every boot."""
    for units in ("etc/systemd/system", "usr/lib/systemd/system"):
        for unit in variant.mask:
            for wanted in (tree / units).glob(f"*.wants/{unit}"):
                wanted.unlink()
    links = [
        *variant.links,
        *((f"etc/systemd/system/{unit}", "/dev/null") for unit in variant.mask),
    ]
    for name, target in links:
        path = tree / name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        remove(path)
        path.symlink_to(target)


async def _install_supervisor(tree: Path, supervisor: Supervisor) -> None:
    """With its byte code, compiled by the image's own Python: a guest would compile at each boot, not once."""
    scratch = tree / "tmp/supervisor"
    for name, data in supervisor.sources.items():
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_bytes(data)
    compiler = [
        "/usr/bin/python3",
        "-I",
        "-S",
        "-m",
        "compileall",
        "-q",
        "-b",
        "--invalidation-mode=unchecked-hash",
    ]
    compiler += ["-s", "/tmp/supervisor", "-p", f"/{SUPERVISOR_PATH}", "/tmp/supervisor"]  # noqa: S108 - in the tree
    await run(["chroot", tree, *compiler], timeout_s=120)
    files = {
        path.relative_to(scratch).as_posix(): path.read_bytes() for path in scratch.rglob("*.py*") if path.is_file()
    }
    target = tree / SUPERVISOR_PATH
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    target.write_bytes(render_zip(files))
    shutil.rmtree(scratch)


def set_owners_and_modes(tree: Path) -> None:
    for directory, names, files in os.walk(tree):
        for name in (*names, *files):
            path = Path(directory, name)
            info = path.lstat()
            # Nobody in the guest may become somebody else: no program changes its user or group by being run.
            if stat.S_ISREG(info.st_mode) and info.st_mode & _ID_SIDS:
                path.chmod(stat.S_IMODE(info.st_mode) & ~_ID_SIDS)
    for name in ("home/user", "workspace"):
        for path in (tree / name, *(tree / name).rglob("*")):
            os.chown(path, USER_ID, USER_ID, follow_symlinks=False)
    for name, mode in _PRIVATE.items():
        if (tree / name).exists():
            (tree / name).chmod(mode)
    tree.chmod(0o755)


def check_owners(tree: Path) -> None:
    users, groups = _ids(tree / "etc/passwd"), _ids(tree / "etc/group")
    for directory, names, files in os.walk(tree):
        for name in (*names, *files):
            path = Path(directory, name)
            info = path.lstat()
            inside = path.relative_to(tree)
            if info.st_uid not in users or info.st_gid not in groups:
                raise ImageError(
                    f"/{inside} belongs to {info.st_uid}:{info.st_gid}, unknown in the image; fix the recipe."
                )
            own = inside.parts[0] == "workspace" or inside.parts[:2] == ("home", "user")
            if own != (info.st_uid == USER_ID):
                raise ImageError(f"/{inside} has the wrong owner {info.st_uid}; fix the recipe.")


def _ids(path: Path) -> frozenset[int]:
    return frozenset(int(line.split(":")[2]) for line in path.read_text("utf-8").splitlines() if line)
