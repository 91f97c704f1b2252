"""The real service on the fake engine behind the real doors, and one way to call it through each of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

from microvm_mcp.errors import Detail
from microvm_mcp.model import Limits, Token, TokenId, Workspace, WorkspaceName
from microvm_mcp.service.call import ServiceSettings
from microvm_mcp.service.clock import SystemClock
from microvm_mcp.service.service import Service
from microvm_mcp.store import tokens, workspaces
from microvm_mcp.store.database import Database
from microvm_mcp.transport.application import Application, build_app
from microvm_mcp.transport.doors import DoorSettings
from tests.support.doors import HOST
from tests.support.fake_engine import FakeEngine

DoorName = Literal["http", "mcp auto", "mcp legacy", "mcp 2026-07-28"]
DOORS: tuple[DoorName, ...] = get_args(DoorName)
ALICE = "alice-token-0123456789"
BOB = "bob-token-0123456789"
EXPIRED = "expired-token-0123456789"
REVOKED = "revoked-token-0123456789"

JsonDict = dict[str, Detail]


@dataclass(frozen=True)
class Answer:
    """`error_code` is None for success. `text` is what the door gave as JSON text."""

    error_code: str | None
    body: Mapping[str, Detail]
    text: str


@dataclass
class Rig:
    db: Database
    engine: FakeEngine
    service: Service
    app: Application
    door: DoorName

    @contextlib.asynccontextmanager
    async def http(self, token: str | None = ALICE) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}", headers=headers) as client:
            yield client

    @contextlib.asynccontextmanager
    async def mcp(self, mode: Literal["auto", "legacy", "2026-07-28"], token: str = ALICE) -> AsyncIterator[Client]:
        async with self.http(token) as http:
            url = f"http://{HOST}/mcp"
            async with Client(streamable_http_client(url, http_client=http), mode=mode, cache=None) as client:
                yield client

    async def call(self, tool: str, arguments: JsonDict, token: str = ALICE) -> Answer:
        """Through the door under test; a client that has listed the tools also checks the result's schema."""
        if self.door == "http":
            async with self.http(token) as http:
                response = await http.post(f"/v1/tools/{tool}", json=arguments)
            return _answer(response.text, response.status_code == 200)
        mode = {"mcp auto": "auto", "mcp legacy": "legacy", "mcp 2026-07-28": "2026-07-28"}[self.door]
        async with self.mcp(mode, token) as client:  # type: ignore[arg-type]
            await client.list_tools()
            try:
                result = await client.call_tool(tool, arguments)
            except MCPError as error:
                return _answer(json.dumps(error.error.data), ok=False)
        return mcp_answer(result)

    async def vm(self, token: str = ALICE, request_id: str = "make") -> str:
        answer = await self.call("vm_create", {"request_id": request_id}, token)
        assert answer.error_code is None, answer.text
        return str(answer.body["vm_id"])


def mcp_answer(result: CallToolResult) -> Answer:
    [content] = result.content
    assert isinstance(content, TextContent)
    if result.is_error:
        assert result.structured_content is None
    else:
        assert result.structured_content == json.loads(content.text)
    return _answer(content.text, not result.is_error)


def _answer(text: str, ok: bool) -> Answer:
    body = json.loads(text)
    return Answer(None, body, text) if ok else Answer(body["error"]["code"], body["error"], text)


@contextlib.asynccontextmanager
async def rig(directory: Path, door: DoorName = "http") -> AsyncIterator[Rig]:
    async with await Database.open(directory / "service.db") as db:
        clock = SystemClock()
        await _issue(db, "alice", ALICE, expires_at=clock.wall() + 3600)
        await _issue(db, "alice", EXPIRED, expires_at=clock.wall() - 1)
        await _issue(db, "alice", REVOKED, expires_at=clock.wall() + 3600, revoked_at=1.0)
        await _issue(db, "bob", BOB, expires_at=clock.wall() + 3600)
        engine = FakeEngine(db)
        service = Service(db, engine, ServiceSettings(calls_per_second=1000, call_burst=10_000), clock)
        app = build_app(service, DoorSettings(hosts=frozenset({HOST})))
        up, down = asyncio.Event(), asyncio.Event()

        # In a task of its own, because a fixture may be set up and torn down in different ones.
        async def run() -> None:
            async with app.running():
                up.set()
                await down.wait()

        running = asyncio.create_task(run())
        await up.wait()
        try:
            yield Rig(db, engine, service, app, door)
        finally:
            down.set()
            await running
            await service.close()


async def _issue(
    db: Database, workspace: str, token: str, *, expires_at: float, revoked_at: float | None = None
) -> None:
    name = WorkspaceName(workspace)
    digest = hashlib.sha256(token.encode()).hexdigest()
    row = Token(TokenId(f"tok-{digest[:8]}"), name, digest, 1.0, expires_at, revoked_at)

    if await db.read(lambda tx: workspaces.get(tx, name)) is None:
        await db.write(
            lambda tx: workspaces.insert(tx, Workspace(name, allow_network=False, limits=Limits(), created_at=1.0))
        )
    await db.write(lambda tx: tokens.insert(tx, row))
