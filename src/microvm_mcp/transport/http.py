"""The plain HTTP door: `POST /v1/tools/{tool_name}`, the tool's arguments as a JSON object. Translates, no more."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from microvm_mcp.errors import InvalidArguments
from microvm_mcp.model import Principal
from microvm_mcp.transport.answers import render_json, send_json
from microvm_mcp.transport.body import read_json_body
from microvm_mcp.transport.calls import Calls
from microvm_mcp.transport.json_body import JsonValue, parse_json

TOOL_PREFIX = "/v1/tools/"


class HttpDoor:
    def __init__(self, calls: Calls, body_limit: int) -> None:
        self._calls = calls
        self._body_limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal: Principal = scope["state"]["principal"]
        body = await read_json_body(scope, receive, self._body_limit)
        arguments: JsonValue = parse_json(body) if body else {}
        if not isinstance(arguments, dict):
            raise InvalidArguments("The body must be one JSON object with the tool's arguments.")
        result = await self._calls.invoke(scope["path"].removeprefix(TOOL_PREFIX), arguments, principal)
        await send_json(scope, send, render_json(result))
