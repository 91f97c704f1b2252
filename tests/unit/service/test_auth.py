"""Tokens on a real database: who gets in, and that a revocation holds from the next request on."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from microvm_mcp.errors import Unauthenticated
from microvm_mcp.model import Limits, Token, TokenId, WorkspaceName
from microvm_mcp.service.auth import Authenticator
from microvm_mcp.store import tokens, workspaces
from microvm_mcp.store.database import Database
from tests.unit.service.conftest import ALICE

TOKEN = "mvm_" + "x" * 43


class SetClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def auth(db: Database, clock: SetClock) -> Authenticator:
    row = Token(
        token_id=TokenId("t1"),
        workspace=ALICE.workspace,
        digest=hashlib.sha256(TOKEN.encode()).hexdigest(),
        created_at=1.0,
        expires_at=2000.0,
    )
    await db.write(lambda tx: tokens.insert(tx, row))
    return Authenticator(db, clock)


async def test_a_token_opens_its_workspace(auth: Authenticator) -> None:
    principal = await auth.authenticate(TOKEN)
    assert principal.workspace == "alice"
    assert principal.token_id == "t1"
    assert principal.allow_network is False


@pytest.mark.parametrize(
    "token", ["", "nobody", TOKEN + " ", TOKEN.upper(), "é", "\ud800", "x" * 100_000, TOKEN + "\0"]
)
async def test_anything_else_opens_nothing(auth: Authenticator, token: str) -> None:
    with pytest.raises(Unauthenticated):
        await auth.authenticate(token)


async def test_expiry_holds_to_the_second_also_for_remembered_tokens(auth: Authenticator, clock: SetClock) -> None:
    await auth.authenticate(TOKEN)
    clock.now = 1999.9
    await auth.authenticate(TOKEN)
    clock.now = 2000.0
    with pytest.raises(Unauthenticated):
        await auth.authenticate(TOKEN)


async def test_a_second_process_revokes_a_token(auth: Authenticator, tmp_path: Path) -> None:
    await auth.authenticate(TOKEN)
    other = sqlite3.connect(tmp_path / "service.db")
    with other:
        other.execute("UPDATE tokens SET revoked_at = 5.0 WHERE token_id = 't1'")
    other.close()
    with pytest.raises(Unauthenticated):
        await auth.authenticate(TOKEN)


async def test_a_revoked_workspace_lets_no_token_in(auth: Authenticator, db: Database) -> None:
    await auth.authenticate(TOKEN)
    await db.write(lambda tx: workspaces.revoke(tx, WorkspaceName("alice"), now=5.0))
    with pytest.raises(Unauthenticated):
        await auth.authenticate(TOKEN)


async def test_a_changed_policy_holds_from_the_next_request_on(auth: Authenticator, db: Database) -> None:
    await auth.authenticate(TOKEN)
    limits = Limits(max_vms=3)
    await db.write(lambda tx: workspaces.set_policy(tx, WorkspaceName("alice"), allow_network=True, limits=limits))
    principal = await auth.authenticate(TOKEN)
    assert (principal.allow_network, principal.limits) == (True, limits)


async def test_a_known_token_costs_no_read(
    auth: Authenticator, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await auth.authenticate(TOKEN)

    def refuse(fn: Callable[..., object]) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(db, "read", refuse)
    await auth.authenticate(TOKEN)


async def test_all_refusals_look_alike_and_neither_error_nor_log_has_the_token(
    auth: Authenticator, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await auth.authenticate(TOKEN)
    clock.now = 5000.0
    messages = set()
    for token in (TOKEN, "mvm_unknown", ""):
        with pytest.raises(Unauthenticated) as caught:
            await auth.authenticate(token)
        messages.add(str(caught.value.body()))
    assert len(messages) == 1
    assert "mvm_" not in messages.pop() + caplog.text
