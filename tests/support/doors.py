"""A small service to stand behind the doors, and the ways to knock: in process, on loopback, with raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import httpx2

from microvm_mcp.errors import (
    Busy,
    Conflict,
    Detail,
    FailedPrecondition,
    InvalidArguments,
    MicrovmError,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    RateLimited,
    ResourceExhausted,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from microvm_mcp.model import Limits, Principal, TokenId, WorkspaceName
from microvm_mcp.service.service import UnknownTool
from microvm_mcp.transport.application import Application
from microvm_mcp.transport.doors import DoorLimits, DoorSettings, Listing
from microvm_mcp.transport.server import listen, serve_http

HOST = "service.test:8090"
ORIGIN = "http://service.test:8090"
TOKENS = {"token-alice": "alice", "token-bob": "bob"}

RAISED: dict[str, MicrovmError] = {
    "invalid_arguments": InvalidArguments.field("size", "must be at most 10"),
    "permission_denied": PermissionDenied("This workspace may not use the network; retry with network=off."),
    "not_found": NotFound("No such machine in this workspace; vm_list names those there are."),
    "busy": Busy("2 jobs are running; end them first.", details={"jobs": ["job-1", "job-2"]}),
    "conflict": Conflict("This request_id was used with other arguments; choose a new one."),
    "failed_precondition": FailedPrecondition("The machine is stopped; vm_resume with cold=true boots it."),
    "outcome_unknown": OutcomeUnknown("An earlier attempt may have run; vm_status lists the jobs."),
    "too_large": TooLarge("A command is limited to 65536 bytes; write it into a file."),
    "rate_limited": RateLimited("Too many calls; wait.", retry_after_s=7),
    "unavailable": Unavailable("The machine did not answer in time; try again."),
    "resource_exhausted": ResourceExhausted("No memory is left.", details={"free_mib": 12, "asked_mib": 1024}),
}


def _tool(name: str, description: str, properties: dict[str, Detail]) -> dict[str, Detail]:
    output: dict[str, Detail] = {"workspace": {"type": "string"}}
    return {
        "name": name,
        "title": name,
        "description": description,
        "inputSchema": {"type": "object", "properties": properties, "additionalProperties": False},
        "outputSchema": {"type": "object", "properties": output, "required": ["workspace"]},
        "annotations": {"readOnlyHint": True},
    }


LISTING = Listing(
    version="9.8.7",
    instructions="Say echo.",
    tools=[
        _tool("echo", "Gives back `value` and the workspace.", {"value": {"type": "string"}}),
        _tool("fail", "Raises the error of that code.", {"code": {"type": "string"}}),
        _tool("crash", "Has a bug.", {}),
        _tool("slow", "Waits until it is let go.", {}),
    ],
    openapi={"openapi": "3.1.0", "info": {"title": "test", "version": "9.8.7"}, "paths": {}},
)


@dataclass
class SmallService:
    """What the doors need. `go` lets `slow` end."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0

    async def authenticate(self, token: str) -> Principal:
        self.asked += 1
        workspace = TOKENS.get(token)
        if workspace is None:
            raise Unauthenticated("The token is unknown, expired or revoked; ask the operator for another one.")
        return Principal(WorkspaceName(workspace), TokenId("t1"), allow_network=False, limits=Limits())

    async def invoke(self, name: str, arguments: object, principal: Principal) -> Mapping[str, Detail]:
        assert isinstance(arguments, dict)
        if name == "echo":
            if unknown := sorted(set(arguments) - {"value"}):
                raise InvalidArguments.field(f"argument {len(unknown)}", "is unknown")
            return {"workspace": principal.workspace, "value": arguments.get("value"), "none": None}
        if name == "fail":
            raise RAISED[str(arguments["code"])]
        if name == "crash":
            raise RuntimeError("INNERMOST-DETAIL")
        if name == "slow":
            self.started.set()
            await self.go.wait()
            self.ended.set()
            return {"workspace": principal.workspace}
        raise UnknownTool("There is no such tool; tools/list names those there are.")


def small_app(service: SmallService, *, limits: DoorLimits | None = None, host: str = HOST) -> Application:
    settings = DoorSettings(
        hosts=frozenset({host}), origins=frozenset({ORIGIN, f"http://{host}"}), limits=limits or DoorLimits()
    )
    return Application(service, LISTING, settings)


@contextlib.asynccontextmanager
async def in_process(app: Application, *, token: str | None = "token-alice") -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.running(),
        httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}", headers=headers) as client,
    ):
        yield client


@dataclass(frozen=True)
class Served:
    """One application on loopback. `stop` ends it; `task` is done once it has ended."""

    port: int
    service: SmallService
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def head(self, request_line: str, *extra: str, token: str | None = "token-alice") -> bytes:
        lines = [request_line, f"Host: {self.host}", *extra]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    async def exchange(self, data: bytes, *, deadline_s: float = 10.0) -> bytes:
        """Send, then read until the other side closes."""
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(data)
                await writer.drain()
                return await reader.read()
            finally:
                writer.close()


@contextlib.asynccontextmanager
async def on_loopback(limits: DoorLimits | None = None) -> AsyncIterator[Served]:
    service = SmallService()
    listener = listen("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    app = small_app(service, limits=limits, host=f"127.0.0.1:{port}")
    stop = asyncio.Event()
    task = asyncio.create_task(serve_http(app, listener, stop))
    try:
        yield Served(port, service, stop, task)
    finally:
        service.go.set()
        stop.set()
        async with asyncio.timeout(20):
            await task
