"""A service over a real database and the fake engine, with two workspaces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from microvm_mcp.model import Limits, Principal, TokenId, Workspace, WorkspaceName
from microvm_mcp.service.call import ServiceSettings
from microvm_mcp.service.clock import SystemClock
from microvm_mcp.service.jsonschema import JsonObject
from microvm_mcp.service.service import Service
from microvm_mcp.store import workspaces
from microvm_mcp.store.database import Database
from tests.support.fake_engine import FakeEngine


def principal(name: str, *, allow_network: bool = False, limits: Limits | None = None) -> Principal:
    return Principal(WorkspaceName(name), TokenId(f"tok-{name}"), allow_network, limits or Limits())


ALICE = principal("alice")
BOB = principal("bob", allow_network=True)


@dataclass
class Rig:
    """One running service and the things under it."""

    db: Database
    engine: FakeEngine
    service: Service
    made: int = field(default=0)

    async def call(self, name: str, arguments: object, who: Principal = ALICE) -> JsonObject:
        return await self.service.invoke(name, arguments, who)

    async def vm(self, who: Principal = ALICE) -> str:
        self.made += 1
        created = await self.call("vm_create", {"request_id": f"make-{self.made}"}, who)
        return str(created["vm_id"])


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Database]:
    async with await Database.open(tmp_path / "service.db") as database:
        for who in (ALICE, BOB):
            row = Workspace(who.workspace, who.allow_network, who.limits, created_at=1.0)
            await database.write(lambda tx, row=row: workspaces.insert(tx, row))  # type: ignore[misc]
        yield database


@pytest.fixture
async def rig(db: Database) -> AsyncIterator[Rig]:
    engine = FakeEngine(db)
    service = Service(db, engine, ServiceSettings(calls_per_second=1000, call_burst=10_000), SystemClock())
    yield Rig(db, engine, service)
    await service.close()
