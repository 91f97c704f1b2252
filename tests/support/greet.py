"""The shortest conversation with a supervisor: a new connection, a hello, its welcome."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from microvm_mcp.wire.messages import NONCE_BYTES, Welcome
from microvm_mcp.wire.session import HostSession, Welcomed

_AGAIN_S = 0.25
"""A guest that is not there yet loses what was written: the hello is repeated."""


async def greet(path: Path, *, deadline_s: float) -> Welcome:
    session = HostSession(os.urandom(NONCE_BYTES))
    async with asyncio.timeout(deadline_s):
        reader, writer = await asyncio.open_unix_connection(str(path))
        try:
            while True:
                writer.write(session.hello())
                await writer.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_S):
                        return await _welcome(session, reader)
        finally:
            writer.close()


async def _welcome(session: HostSession, reader: asyncio.StreamReader) -> Welcome:
    while data := await reader.read(65536):
        for event in session.receive(data):
            if isinstance(event, Welcomed):
                return event.welcome
    raise ConnectionError("the other side hung up")
