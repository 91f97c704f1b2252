"""What leaves through the doors: results and errors as JSON text, and ASGI answers that carry it.

Both doors render with these functions, so that what an MCP client reads as text is byte for byte what an HTTP
client reads as body.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import cast

from starlette.types import Scope, Send

from microvm_mcp.errors import Detail, MicrovmError, RateLimited

Header = tuple[bytes, bytes]


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def render_json(value: Mapping[str, Detail]) -> str:
    return render_result(value)[0]


def render_result(value: Mapping[str, Detail]) -> tuple[str, dict[str, Detail]]:
    """Compact JSON that is valid Unicode whatever the strings hold, and the value that it says.

    A lone surrogate, which no JSON peer can read, becomes `?` in both.
    """
    text = _ENCODER.encode(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = text.encode("utf-8", "replace").decode("utf-8")
        return text, cast(dict[str, Detail], json.loads(text))
    return text, dict(value)


def render_error(error: MicrovmError) -> str:
    return render_json({"error": error.body()})


def error_headers(error: MicrovmError) -> list[Header]:
    if isinstance(error, RateLimited):
        return [(b"retry-after", str(error.retry_after_s).encode("ascii"))]
    return []


async def send_json(
    scope: Scope, send: Send, text: str, *, status: int = 200, headers: Iterable[Header] = ()
) -> None:
    """One whole answer. For a WebSocket that is not accepted yet it is the refusal of its handshake."""
    body = text.encode("utf-8")
    websocket = scope["type"] == "websocket"
    if websocket and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    prefix = "websocket.http.response" if websocket else "http.response"
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode("ascii")),
        (b"cache-control", b"no-store"),
        *headers,
    ]
    await send({"type": f"{prefix}.start", "status": status, "headers": head})
    await send({"type": f"{prefix}.body", "body": body})


async def send_error(scope: Scope, send: Send, error: MicrovmError, *, headers: Iterable[Header] = ()) -> None:
    await send_json(
        scope, send, render_error(error), status=error.http_status, headers=[*error_headers(error), *headers]
    )
