"""Workspaces, tokens and facts of the service."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

from microvm_mcp.model import Limits, Token, TokenId, Workspace, WorkspaceName
from microvm_mcp.store import meta, tokens, workspaces
from microvm_mcp.store.database import Database
from tests.unit.store.rows import DEMO, OTHER, add_workspaces

TOKEN = Token(TokenId("tok-1"), DEMO, digest="ab" * 32, created_at=10.0, expires_at=1000.0)


async def test_a_workspace_comes_back_as_it_went_in(db: Database) -> None:
    workspace = Workspace(DEMO, allow_network=True, limits=Limits(3, None, 40), created_at=5.5)
    await db.write(lambda tx: workspaces.insert(tx, workspace))
    assert await db.read(lambda tx: workspaces.get(tx, DEMO)) == workspace
    assert await db.read(workspaces.list_all) == [workspace]
    assert await db.read(lambda tx: workspaces.get(tx, OTHER)) is None


async def test_a_policy_is_replaced_as_a_whole(db: Database) -> None:
    await db.write(add_workspaces)
    after = await db.write(
        lambda tx: workspaces.set_policy(tx, DEMO, allow_network=True, limits=Limits(max_memory_mib=2048))
    )
    assert after is not None
    assert (after.allow_network, after.limits) == (True, Limits(max_memory_mib=2048))
    other = await db.read(lambda tx: workspaces.get(tx, OTHER))
    assert other is not None
    assert not other.allow_network
    unknown = WorkspaceName("unknown")
    assert (
        await db.write(lambda tx: workspaces.set_policy(tx, unknown, allow_network=True, limits=Limits())) is None
    )


async def test_revoking_twice_keeps_the_first_time(db: Database) -> None:
    await db.write(add_workspaces)
    await db.write(lambda tx: tokens.insert(tx, TOKEN))

    def revoke_both(tx: sqlite3.Connection, now: float) -> tuple[float | None, float | None]:
        workspace = workspaces.revoke(tx, DEMO, now=now)
        token = tokens.revoke(tx, TOKEN.token_id, now=now)
        assert workspace is not None
        assert token is not None
        return workspace.revoked_at, token.revoked_at

    assert await db.write(lambda tx: revoke_both(tx, 50.0)) == (50.0, 50.0)
    assert await db.write(lambda tx: revoke_both(tx, 60.0)) == (50.0, 50.0)
    assert await db.write(lambda tx: workspaces.revoke(tx, WorkspaceName("unknown"), now=1.0)) is None
    assert await db.write(lambda tx: tokens.revoke(tx, TokenId("tok-unknown"), now=1.0)) is None


async def test_a_digest_leads_to_its_token_and_workspace_and_no_other(db: Database) -> None:
    await db.write(add_workspaces)
    second = replace(TOKEN, token_id=TokenId("tok-2"), digest="cd" * 32, workspace=OTHER)
    await db.write(lambda tx: tokens.insert(tx, TOKEN))
    await db.write(lambda tx: tokens.insert(tx, second))
    found = await db.read(lambda tx: tokens.by_digest(tx, "cd" * 32))
    assert found is not None
    assert found[0] == second
    assert found[1].name == OTHER
    assert await db.read(lambda tx: tokens.by_digest(tx, "ef" * 32)) is None
    assert await db.read(lambda tx: tokens.of_workspace(tx, DEMO)) == [TOKEN]


async def test_a_digest_is_unique_and_complete(db: Database) -> None:
    await db.write(add_workspaces)
    await db.write(lambda tx: tokens.insert(tx, TOKEN))
    with pytest.raises(Exception, match="UNIQUE"):
        await db.write(lambda tx: tokens.insert(tx, replace(TOKEN, token_id=TokenId("tok-2"))))
    with pytest.raises(Exception, match="CHECK"):
        await db.write(lambda tx: tokens.insert(tx, replace(TOKEN, token_id=TokenId("tok-3"), digest="short")))


async def test_a_revocation_by_a_second_connection_shows_at_once(db: Database) -> None:
    await db.write(add_workspaces)
    await db.write(lambda tx: tokens.insert(tx, TOKEN))
    seen = db.revision()
    async with await Database.open(db.path) as second:
        await second.write(lambda tx: tokens.revoke(tx, TOKEN.token_id, now=99.0))
    assert db.revision() != seen
    found = await db.read(lambda tx: tokens.by_digest(tx, TOKEN.digest))
    assert found is not None
    assert found[0].revoked_at == 99.0


async def test_facts_are_put_replaced_and_deleted(db: Database) -> None:
    await db.write(lambda tx: meta.put(tx, "instance", "a"))
    await db.write(lambda tx: meta.put(tx, "instance", "b"))
    assert await db.read(lambda tx: meta.get(tx, "instance")) == "b"
    await db.write(lambda tx: meta.delete(tx, "instance"))
    assert await db.read(lambda tx: meta.get(tx, "instance")) is None
