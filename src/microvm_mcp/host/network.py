"""One network namespace per machine with one TAP in it, and no way out: no veth, no route, no address.

The TAP is persistent and owned by the machine's user; the launcher opens it inside the namespace. Its own MAC is
the same in every machine, so that a guest that wakes up elsewhere finds the neighbour it remembers. `ensure` and
`remove` are idempotent and touch only the name they are given.
"""

from __future__ import annotations

import json
import pwd
import re
from pathlib import Path

from microvm_mcp.host import command

NAMESPACES = Path("/run/netns")
GATEWAY_MAC = "02:fc:00:00:00:01"
"""The host's end of every TAP; locally administered."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_INTERFACE = re.compile(r"[a-z0-9]{1,15}")
_TIMEOUT_S = 20.0


class NetworkError(Exception):
    """`ip` refused; the message says what."""


def path(name: str) -> Path:
    return NAMESPACES / name


async def ensure(name: str, *, tap: str, uid: int) -> None:
    _check(name, tap)
    if path(name).exists():
        if await _is_ready(name, tap, uid):
            return
        # Half made: by us, since the name carries our instance.
        await remove(name)
    try:
        await command.run(["ip", "netns", "add", name], timeout_s=_TIMEOUT_S)
        await command.run(
            ["ip", "-n", name, "-batch", "-"], input=render_batch(tap, uid).encode(), timeout_s=_TIMEOUT_S
        )
    except command.CommandFailed as error:
        await remove(name)
        raise NetworkError(f"network namespace {name}: {error.tail or error.reason}") from error


def render_batch(tap: str, uid: int) -> str:
    """Commands for `ip -batch`. `addrgenmode none`: no IPv6 address appears by itself."""
    return "\n".join(
        (
            "link set lo up",
            f"tuntap add dev {tap} mode tap user {uid} vnet_hdr",
            f"link set dev {tap} address {GATEWAY_MAC} addrgenmode none",
            f"link set dev {tap} up",
            "",
        )
    )


async def remove(name: str) -> None:
    """Unnames the namespace; it and its TAP go when the last process in it is gone."""
    _check(name)
    if not path(name).exists():
        return
    try:
        await command.run(["ip", "netns", "del", name], timeout_s=_TIMEOUT_S)
    except command.CommandFailed as error:
        if path(name).exists():
            raise NetworkError(f"network namespace {name}: {error.tail or error.reason}") from error


def names(prefix: str) -> frozenset[str]:
    """Namespaces of this host whose name starts so: what recovery compares with its rows."""
    try:
        return frozenset(entry.name for entry in NAMESPACES.iterdir() if entry.name.startswith(prefix))
    except FileNotFoundError:
        return frozenset()


async def _is_ready(name: str, tap: str, uid: int) -> bool:
    try:
        shown = await command.run(["ip", "-n", name, "-j", "-d", "link", "show", "dev", tap], timeout_s=_TIMEOUT_S)
        return parse_owner(shown.text) == uid
    except command.CommandFailed:
        return False


def parse_owner(shown: str) -> int | None:
    """User of a TAP that is up, from `ip -j -d link show`; None for anything else."""
    try:
        link = json.loads(shown)[0]
        info = link["linkinfo"]
        if info["info_kind"] != "tun" or info["info_data"]["type"] != "tap" or "UP" not in link["flags"]:
            return None
        user = info["info_data"]["user"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return _user_id(str(user))


def _user_id(user: str) -> int | None:
    # `ip` prints a name where the passwd file has one for the number.
    if user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def _check(name: str, interface: str = "tap0") -> None:
    if not _NAME.fullmatch(name) or not _INTERFACE.fullmatch(interface):
        raise ValueError("not a name that this project gives")
