"""Administration on a real database: who gets what, what is refused, and what a revocation ends."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from microvm_mcp.errors import (
    Conflict,
    Detail,
    FailedPrecondition,
    Internal,
    InvalidArguments,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from microvm_mcp.model import Limits, WorkspaceName
from microvm_mcp.service.admin import Administration, digest_of, new_token
from microvm_mcp.service.auth import Authenticator
from microvm_mcp.store import tokens, workspaces
from microvm_mcp.store.database import Database

DAY_S = 86_400
DEMO = WorkspaceName("demo")


class TurnedClock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Desk:
    """An administration with its database, its clock and a record of what it stopped."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.clock = TurnedClock()
        self.stopped: list[WorkspaceName] = []
        self.stop_fails = False
        self.admin = Administration(db, self.clock, stop=self._stop, about={"version": "1"})

    async def _stop(self, workspace: WorkspaceName) -> int:
        row = await self.db.read(lambda tx: workspaces.get(tx, workspace))
        assert row is not None
        assert row.revoked_at is not None, "machines are ended after the tokens, so that none can be made anew"
        if self.stop_fails:
            raise Internal("one machine would not die")
        self.stopped.append(workspace)
        return 2

    async def issue(self, **params: Detail) -> tuple[str, dict[str, Detail]]:
        token = new_token()
        answer = await self.admin.call(
            "issue_token",
            {"workspace": "demo", "token_sha256": digest_of(token), "ttl_seconds": 3600, **params},
        )
        return token, answer

    async def works(self, token: str) -> bool:
        try:
            await Authenticator(self.db, self.clock).authenticate(token)
        except Unauthenticated:
            return False
        return True

    async def rows(self) -> tuple[int, int]:
        return await self.db.read(lambda tx: (len(workspaces.list_all(tx)), len(tokens.of_workspace(tx, DEMO))))


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with await Database.open(tmp_path / "service.db") as db:
        yield Desk(db)


def test_tokens_are_long_random_recognisable_and_fit_for_a_header() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    for token in made:
        # 32 bytes are 43 digits of 6 bits.
        assert re.fullmatch(r"mvm_[A-Za-z0-9_-]{43}", token)
        assert digest_of(token) == hashlib.sha256(token.encode()).hexdigest()


async def test_the_first_token_makes_the_workspace_with_its_policy(desk: Desk) -> None:
    token, answer = await desk.issue(allow_network=True, max_vms=3, max_storage_gib=50)
    assert answer == {
        "token_id": answer["token_id"],
        "expires_at": desk.clock.now + 3600,
        "policy": {"allow_network": True, "max_vms": 3, "max_memory_mib": None, "max_storage_gib": 50},
    }
    principal = await Authenticator(desk.db, desk.clock).authenticate(token)
    assert (principal.workspace, principal.allow_network, principal.limits) == (
        "demo",
        True,
        Limits(max_vms=3, max_storage_gib=50),
    )


async def test_neither_the_token_nor_anything_it_follows_from_is_in_the_database_files(
    desk: Desk, tmp_path: Path
) -> None:
    token, _ = await desk.issue()
    content = b"".join((tmp_path / name).read_bytes() for name in ("service.db", "service.db-wal"))
    assert digest_of(token).encode() in content
    assert token.removeprefix("mvm_").encode() not in content


async def test_a_second_token_joins_and_both_work(desk: Desk) -> None:
    first, answer = await desk.issue(max_vms=3, allow_network=True)
    second, again = await desk.issue()
    third, _ = await desk.issue(max_vms=3)
    assert again["policy"] == answer["policy"]
    assert again["token_id"] != answer["token_id"]
    assert [await desk.works(token) for token in (first, second, third)] == [True, True, True]


@pytest.mark.parametrize(
    "other", [{"max_vms": 4}, {"max_memory_mib": 1}, {"max_storage_gib": 9}, {"allow_network": True}]
)
async def test_a_second_token_with_another_policy_is_refused_showing_the_present_one(
    desk: Desk, other: dict[str, Detail]
) -> None:
    await desk.issue(max_vms=3)
    with pytest.raises(Conflict, match="network not allowed, max_vms 3, max_memory_mib default") as caught:
        await desk.issue(**other)
    policy = caught.value.details["policy"]
    assert policy == {"allow_network": False, "max_vms": 3, "max_memory_mib": None, "max_storage_gib": None}
    assert await desk.rows() == (1, 1)


@pytest.mark.parametrize("ttl", [60, 400 * DAY_S])
async def test_a_token_ends_with_its_time_and_not_before(desk: Desk, ttl: int) -> None:
    token, _ = await desk.issue(ttl_seconds=ttl)
    desk.clock.now += ttl - 1
    assert await desk.works(token)
    desk.clock.now += 1
    assert not await desk.works(token)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"ttl_seconds": 59}, "ttl_seconds"),
        ({"ttl_seconds": 400 * DAY_S + 1}, "ttl_seconds"),
        ({"ttl_seconds": "3600"}, "ttl_seconds"),
        ({"workspace": ""}, "workspace"),
        ({"workspace": "Demo"}, "workspace"),
        ({"workspace": "a/b"}, "workspace"),
        ({"workspace": "demo\n"}, "workspace"),
        ({"workspace": "x" * 64}, "workspace"),
        ({"token_sha256": "ab" * 31}, "token_sha256"),
        ({"max_vms": 0}, "max_vms"),
        ({"max_vms": -1}, "max_vms"),
        ({"max_memory_mib": True}, "max_memory_mib"),
        ({"max_storage_gib": None}, "max_storage_gib"),
        ({"token": "mvm_x"}, "token"),
    ],
)
async def test_a_bad_request_for_a_token_is_refused_by_field_and_leaves_nothing(
    desk: Desk, params: dict[str, Detail], field: str
) -> None:
    request: dict[str, Detail] = {"workspace": "demo", "token_sha256": "ab" * 32, "ttl_seconds": 3600, **params}
    with pytest.raises(InvalidArguments, match=field):
        await desk.admin.call("issue_token", request)
    assert await desk.rows() == (0, 0)


async def test_a_policy_changes_in_what_is_named_and_from_the_next_request_on(desk: Desk) -> None:
    token, _ = await desk.issue(max_vms=3, max_memory_mib=4096)
    auth = Authenticator(desk.db, desk.clock)
    assert not (await auth.authenticate(token)).allow_network
    answer = await desk.admin.call(
        "set_workspace",
        {"workspace": "demo", "allow_network": True, "max_storage_gib": 7, "reset": ["max_memory_mib"]},
    )
    assert answer == {"policy": {"allow_network": True, "max_vms": 3, "max_memory_mib": None, "max_storage_gib": 7}}
    principal = await auth.authenticate(token)
    assert (principal.allow_network, principal.limits) == (True, Limits(max_vms=3, max_storage_gib=7))


async def test_a_policy_change_that_makes_no_sense_is_refused(desk: Desk) -> None:
    await desk.issue(max_vms=3)
    with pytest.raises(NotFound):
        await desk.admin.call("set_workspace", {"workspace": "unknown", "max_vms": 1})
    with pytest.raises(InvalidArguments, match="Nothing to change"):
        await desk.admin.call("set_workspace", {"workspace": "demo"})
    with pytest.raises(InvalidArguments, match="set and reset"):
        await desk.admin.call("set_workspace", {"workspace": "demo", "max_vms": 1, "reset": ["max_vms"]})
    with pytest.raises(InvalidArguments, match="reset"):
        await desk.admin.call("set_workspace", {"workspace": "demo", "reset": ["owner"]})


async def test_revoking_one_token_leaves_the_other(desk: Desk) -> None:
    first, answer = await desk.issue()
    second, _ = await desk.issue()
    revoked = await desk.admin.call("revoke_token", {"token_id": answer["token_id"]})
    assert (revoked["token_id"], revoked["workspace"]) == (answer["token_id"], "demo")
    assert (await desk.works(first), await desk.works(second)) == (False, True)
    desk.clock.now += 5
    assert await desk.admin.call("revoke_token", {"token_id": answer["token_id"]}) == revoked
    with pytest.raises(NotFound):
        await desk.admin.call("revoke_token", {"token_id": "tok-unknown"})


async def test_a_revocation_holds_for_an_authenticator_that_knew_the_token(desk: Desk) -> None:
    token, answer = await desk.issue()
    auth = Authenticator(desk.db, desk.clock)
    await auth.authenticate(token)
    async with await Database.open(desk.db.path) as second:
        other_process = Administration(second, desk.clock, stop=desk._stop)
        await other_process.call("revoke_token", {"token_id": answer["token_id"]})
    with pytest.raises(Unauthenticated):
        await auth.authenticate(token)


async def test_a_revoked_workspace_has_no_tokens_and_gets_none(desk: Desk) -> None:
    first, _ = await desk.issue()
    second, _ = await desk.issue()
    other, _ = await desk.issue(workspace="other")
    answer = await desk.admin.call("revoke_workspace", {"workspace": "demo"})
    assert (answer["workspace"], answer["stopped"], desk.stopped) == ("demo", 0, [])
    assert [await desk.works(token) for token in (first, second, other)] == [False, False, True]
    with pytest.raises(FailedPrecondition, match="revoked"):
        await desk.issue()
    with pytest.raises(FailedPrecondition, match="revoked"):
        await desk.admin.call("set_workspace", {"workspace": "demo", "max_vms": 1})
    with pytest.raises(NotFound):
        await desk.admin.call("revoke_workspace", {"workspace": "unknown"})


async def test_revoking_again_with_stop_ends_the_machines(desk: Desk) -> None:
    await desk.issue()
    first = await desk.admin.call("revoke_workspace", {"workspace": "demo"})
    desk.clock.now += 5
    again = await desk.admin.call("revoke_workspace", {"workspace": "demo", "stop": True})
    assert again == {**first, "stopped": 2}
    assert desk.stopped == ["demo"]


async def test_a_stop_that_fails_says_that_the_tokens_are_dead_all_the_same(desk: Desk) -> None:
    token, _ = await desk.issue()
    desk.stop_fails = True
    with pytest.raises(Unavailable, match=r"is revoked, but .* one machine would not die"):
        await desk.admin.call("revoke_workspace", {"workspace": "demo", "stop": True})
    assert not await desk.works(token)


async def test_unknown_methods_and_parameters_are_refused(desk: Desk) -> None:
    assert await desk.admin.call("ping", {}) == {"version": "1"}
    with pytest.raises(InvalidArguments, match="no such method; there are ping, issue_token"):
        await desk.admin.call("__init__", {})
    wrong: list[object] = [None, [], {"x": 1}]
    for params in wrong:
        with pytest.raises(InvalidArguments):
            await desk.admin.call("ping", params)


async def test_limits_that_a_workspace_lacks_are_the_configured_ones(desk: Desk) -> None:
    token, _ = await desk.issue(max_vms=1)
    auth = Authenticator(desk.db, desk.clock, Limits(max_vms=5, max_memory_mib=6))
    assert (await auth.authenticate(token)).limits == Limits(max_vms=1, max_memory_mib=6)
