"""The MCP door: Streamable HTTP at `/mcp`, stateless, JSON answers, through the official SDK.

Nothing is kept between two requests, so nothing is lost at a restart and no two clients share a stream. The SDK
gets only messages that `envelope` has passed, as the very bytes that were checked. No exception leaves a handler:
on older protocol versions the SDK would send its text to the client.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import mcp_types as wire
from mcp import MCPError
from mcp.server import CacheHint, Server, ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from microvm_mcp.errors import Detail, Internal, InvalidArguments, MicrovmError
from microvm_mcp.model import Principal
from microvm_mcp.service.service import UnknownTool
from microvm_mcp.transport import envelope
from microvm_mcp.transport.answers import render_error, render_json, render_result, send_json
from microvm_mcp.transport.body import header_values, read_json_body
from microvm_mcp.transport.calls import Calls
from microvm_mcp.transport.doors import DoorSettings, Listing
from microvm_mcp.transport.json_body import parse_json

log = logging.getLogger(__name__)

_LIST_TTL_MS = 300_000
_Sdk = Server[dict[str, Any]]
_Context = ServerRequestContext[dict[str, Any]]


class McpDoor:
    def __init__(self, calls: Calls, listing: Listing, settings: DoorSettings) -> None:
        self._calls = calls
        self._body_limit = settings.limits.body_bytes
        # Made once: the SDK asks for a tool's schema on every call of the newest protocol version.
        self._tools = [wire.Tool.model_validate(tool) for tool in listing.tools]
        self._schemas = {tool.name: tool.input_schema for tool in self._tools}
        # At INFO it logs a line per request.
        logging.getLogger("mcp").setLevel(logging.WARNING)
        self._manager = StreamableHTTPSessionManager(
            app=self._server(listing),
            stateless=True,
            json_response=True,
            max_request_body_size=self._body_limit,
            # A second layer; the gate has checked exactly and rewritten both headers to lower case.
            security_settings=TransportSecuritySettings(
                allowed_hosts=sorted(settings.hosts), allowed_origins=sorted(settings.origins)
            ),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Once per door; leave it in the task that entered it."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json_body(scope, receive, self._body_limit)
        try:
            message = parse_json(body)
        except InvalidArguments as error:
            refusal: envelope.Refusal | None = envelope.parse_refusal(error)
        else:
            versions = [value.decode("latin-1") for value in header_values(scope, b"mcp-protocol-version")]
            refusal = envelope.check_message(message, versions)
        if refusal is not None:
            await send_json(scope, send, render_json(refusal.body()), status=refusal.status)
            return
        await self._manager.handle_request(_with_accept(scope), _replay(body, receive), send)

    def _server(self, listing: Listing) -> _Sdk:
        hint = CacheHint(ttl_ms=_LIST_TTL_MS, scope="public")
        return Server(
            "microvm-mcp",
            version=listing.version,
            title="microVM machines",
            instructions=listing.instructions,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            get_tool_input_schema=self._input_schema,
            cache_hints={"tools/list": hint, "server/discover": hint},
        )

    async def _list_tools(
        self, _context: _Context, _params: wire.PaginatedRequestParams | None
    ) -> wire.ListToolsResult:
        return wire.ListToolsResult(tools=self._tools)

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        return self._schemas.get(name)

    async def _call_tool(self, context: _Context, params: wire.CallToolRequestParams) -> wire.CallToolResult:
        try:
            principal: Principal = cast(Request, context.request).scope["state"]["principal"]
            arguments = params.arguments if params.arguments is not None else {}
            return _success(await self._calls.invoke(params.name, arguments, principal))
        except UnknownTool as error:
            # The one failure that the protocol wants as an error of its own.
            raise MCPError(wire.INVALID_PARAMS, error.message, {"error": error.body()}) from None
        except MicrovmError as error:
            return _failure(error)
        except Exception:
            log.exception("a call crashed door=mcp")
            return _failure(Internal())


def _success(result: Mapping[str, Detail]) -> wire.CallToolResult:
    text, structured = render_result(result)
    content: list[wire.ContentBlock] = [wire.TextContent(type="text", text=text)]
    return wire.CallToolResult(content=content, structured_content=structured)


def _failure(error: MicrovmError) -> wire.CallToolResult:
    """No structured content: common clients hold it against the output schema and lose the message."""
    return wire.CallToolResult(content=[wire.TextContent(type="text", text=render_error(error))], is_error=True)


def _with_accept(scope: Scope) -> Scope:
    """Every answer here is JSON. The SDK refuses a request that does not say so, partly without a body."""
    others = [(name, value) for name, value in scope["headers"] if name != b"accept"]
    return {**scope, "headers": [*others, (b"accept", b"application/json")]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read already, then whatever the connection has to say."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
