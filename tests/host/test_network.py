"""Real namespaces: one TAP, no way out, made and removed as often as asked."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator

import pytest

from microvm_mcp.host import command, network

pytestmark = pytest.mark.needs("root", "netns")

UID = 3_900_000_007


@pytest.fixture
async def name() -> AsyncIterator[str]:
    made = f"mvm-{secrets.token_hex(4)}-0"
    yield made
    await network.remove(made)


async def ip(*words: str) -> str:
    return (await command.run(["ip", *words], timeout_s=20)).text


async def test_a_namespace_holds_loopback_and_the_tap_and_no_route(name: str) -> None:
    await network.ensure(name, tap="tap0", uid=UID)
    links = json.loads(await ip("-n", name, "-j", "-d", "link", "show"))
    by_name = {link["ifname"]: link for link in links}
    assert {"lo", "tap0"} <= by_name.keys()
    # The kernel may add fallback tunnels (sit0, tunl0) to every namespace; they are down.
    assert all("UP" not in link["flags"] for name_, link in by_name.items() if name_ not in ("lo", "tap0"))
    assert "UP" in by_name["lo"]["flags"]
    assert by_name["tap0"]["address"] == network.GATEWAY_MAC
    assert network.parse_owner(json.dumps([by_name["tap0"]])) == UID
    assert (await ip("-n", name, "route", "show", "table", "all")).find("tap0") == -1
    assert "tap0" not in await ip("-n", name, "-o", "addr", "show")


async def test_ensuring_again_keeps_what_is_right_and_replaces_what_is_not(name: str) -> None:
    await network.ensure(name, tap="tap0", uid=UID)
    before = network.path(name).stat().st_ino
    await network.ensure(name, tap="tap0", uid=UID)
    assert network.path(name).stat().st_ino == before
    await network.ensure(name, tap="tap0", uid=UID + 1)
    shown = await ip("-n", name, "-j", "-d", "link", "show", "dev", "tap0")
    assert network.parse_owner(shown) == UID + 1


async def test_a_half_made_namespace_is_made_whole(name: str) -> None:
    await ip("netns", "add", name)
    await network.ensure(name, tap="tap0", uid=UID)
    assert "tap0" in await ip("-n", name, "-o", "link", "show")


async def test_a_name_without_a_namespace_behind_it_is_no_obstacle(name: str) -> None:
    network.NAMESPACES.mkdir(exist_ok=True)
    network.path(name).touch()
    await network.ensure(name, tap="tap0", uid=UID)
    assert "tap0" in await ip("-n", name, "-o", "link", "show")


async def test_removing_twice_is_removing_once(name: str) -> None:
    await network.ensure(name, tap="tap0", uid=UID)
    assert name in network.names(name[:12])
    await network.remove(name)
    await network.remove(name)
    assert name not in network.names(name[:12])


@pytest.mark.parametrize("bad", ["", "../etc", "a/b", "-x", "A", "a b", "x" * 64])
async def test_a_name_that_is_none_of_ours_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        await network.ensure(bad, tap="tap0", uid=UID)
    with pytest.raises(ValueError, match="not a name"):
        await network.remove(bad)


@pytest.mark.parametrize(
    "shown", ["", "[]", "{}", '[{"linkinfo":{"info_kind":"veth"},"flags":["UP"]}]', '[{"flags":["UP"]}]', "null"]
)
def test_what_is_no_tap_has_no_owner(shown: str) -> None:
    assert network.parse_owner(shown) is None
