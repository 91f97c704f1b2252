"""The application that `app` serves: both doors behind one gate, and the few paths beside them. Routes, no more.

Routing is a table of exact paths, so that every path is in one spelling and every miss is the same JSON error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from microvm_mcp import __version__
from microvm_mcp.errors import MethodNotAllowed, NotFound
from microvm_mcp.service.catalog import INSTRUCTIONS, TOOLS
from microvm_mcp.service.openapi import openapi
from microvm_mcp.service.service import Service
from microvm_mcp.transport.answers import render_json, send_json
from microvm_mcp.transport.calls import Calls
from microvm_mcp.transport.doors import DoorSettings, Listing, ToolService
from microvm_mcp.transport.gate import Gate
from microvm_mcp.transport.http import TOOL_PREFIX, HttpDoor
from microvm_mcp.transport.mcp import McpDoor

ROUTES: dict[str, str] = {
    "/mcp": "POST",
    "/v1/tools/{tool_name}": "POST",
    "/openapi.json": "GET",
    "/healthz": "GET",
}
"""Every path there is and its method, for the walk that tries them all without a credential."""


class Application:
    """ASGI 3. Serve it inside `running()`, and leave that in the task that entered it."""

    def __init__(self, service: ToolService, listing: Listing, settings: DoorSettings) -> None:
        self.settings = settings
        self._calls = Calls(service)
        self._mcp = McpDoor(self._calls, listing, settings)
        self._http = HttpDoor(self._calls, settings.limits.body_bytes)
        self._openapi = render_json(listing.openapi)
        self._gate: ASGIApp = Gate(self._route, service, settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate(scope, receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._mcp.running():
            try:
                yield
            finally:
                await self.drain(0.0)

    async def drain(self, deadline_s: float) -> int:
        """Take no further calls, wait for those in progress; the number that had to be cut off."""
        return await self._calls.drain(deadline_s)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        tool = path.removeprefix(TOOL_PREFIX)
        if tool != path and tool and "/" not in tool:
            path = "/v1/tools/{tool_name}"
        method = ROUTES.get(path)
        if method is None or scope["type"] != "http":
            raise NotFound("There is nothing at this path; GET /openapi.json describes what there is.")
        if scope["method"] not in (("GET", "HEAD") if method == "GET" else (method,)):
            allow = "GET, HEAD" if method == "GET" else method
            raise MethodNotAllowed(f"This path takes {allow} only.", details={"allow": allow})
        if path == "/mcp":
            await self._mcp(scope, receive, send)
        elif path == "/healthz":
            await send_json(scope, send, '{"status":"ok"}')
        elif path == "/openapi.json":
            await send_json(scope, send, self._openapi)
        else:
            await self._http(scope, receive, send)


def build_app(service: Service, settings: DoorSettings) -> Application:
    """The doors of the real service, advertising its catalogue."""
    listing = Listing(
        version=__version__,
        instructions=INSTRUCTIONS,
        tools=[tool.listing() for tool in service.tools()],
        openapi=openapi(TOOLS, version=__version__),
    )
    return Application(service, listing, settings)
