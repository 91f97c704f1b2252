"""Request bodies: read whole and bounded, or dropped. One rule for both doors.

How long a client may take is the connection's business (`connection.py`); here a client that is gone, or that was
cut off for being slow, shows as ClientGone, and nobody waits for an answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from starlette.types import Receive, Scope

from microvm_mcp.errors import InvalidArguments, TooLarge, UnsupportedMediaType

_DROPPED_BYTES: Final = 4 * 1024 * 1024
_DROPPING_S: Final = 2.0
"""A client that declares a body and never sends it gets its refusal after this, not after its time for a body."""


class ClientGone(Exception):
    """The connection ended before the request did."""


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


async def read_json_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, at most `limit` bytes, declared as JSON. A body that is not there needs no declaration."""
    declared = _declared_length(scope)
    if declared is not None and declared > limit:
        raise _too_large(limit)
    chunks = bytearray()
    async for chunk in _chunks(receive):
        chunks += chunk
        if len(chunks) > limit:
            raise _too_large(limit)
    if chunks or header_values(scope, b"content-type"):
        _check_kind(scope)
    return bytes(chunks)


async def discard_body(scope: Scope, receive: Receive) -> bool:
    """Take what a refused client still sends, within bounds, so that it reads the refusal and not a reset.

    False: more may come, so that the connection is of no further use.
    """
    if any(value.lower() == b"100-continue" for value in header_values(scope, b"expect")):
        return True
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DROPPING_S):
            async for chunk in _chunks(receive):
                dropped += len(chunk)
                if dropped > _DROPPED_BYTES:
                    return False
            return True
    return False


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _declared_length(scope: Scope) -> int | None:
    values = header_values(scope, b"content-length")
    if not values:
        return None
    if len(values) > 1 or not values[0].isdigit() or len(values[0]) > 18:
        raise InvalidArguments("The Content-Length header is not one number.")
    return int(values[0])


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"A request body is limited to {limit} bytes; send files in pieces with `offset`.")


def _check_kind(scope: Scope) -> None:
    """`application/json`, in UTF-8, not compressed."""
    kinds = header_values(scope, b"content-type")
    media, _, parameters = (kinds[0] if len(kinds) == 1 else b"").lower().partition(b";")
    charset = parameters.replace(b" ", b"").replace(b'"', b"")
    encodings = header_values(scope, b"content-encoding")
    if (
        media.strip() != b"application/json"
        or (charset.startswith(b"charset=") and charset != b"charset=utf-8")
        or any(encoding.lower() != b"identity" for encoding in encodings)
    ):
        raise UnsupportedMediaType("Send `Content-Type: application/json`, in UTF-8 and not compressed.")
