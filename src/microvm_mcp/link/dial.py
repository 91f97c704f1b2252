"""Reaching the supervisor's end of the channel: one stream, however the machine offers it.

`unix`: the socket behind QEMU's virtio port; connect and talk. `vsock_uds`: Firecracker's Unix socket, where the
first line asks for a port of the guest. A dial makes one attempt and raises DialFailed; trying again is up to the
client.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[], Awaitable[Streams]]

_READ_LIMIT = 65_536
_MAX_ANSWER = 32
_ANSWER = re.compile(rb"OK (\d{1,10})\n")


class DialFailed(Exception):
    """Nothing listens there (yet), or it hung up before a word."""


def dialer(kind: Literal["unix", "vsock_uds"], path: Path, port: int) -> Dial:
    if kind == "unix":
        return lambda: dial_unix(path)
    return lambda: dial_vsock_uds(path, port)


async def dial_unix(path: Path) -> Streams:
    try:
        return await asyncio.open_unix_connection(str(path), limit=_READ_LIMIT)
    except OSError as error:
        raise DialFailed(f"no connection: {error.strerror}") from error


async def dial_vsock_uds(path: Path, port: int) -> Streams:
    reader, writer = await dial_unix(path)
    try:
        writer.write(render_connect(port))
        parse_connect_answer(await _read_line(reader))
    except BaseException:
        writer.close()
        raise
    return reader, writer


def render_connect(port: int) -> bytes:
    return f"CONNECT {port}\n".encode("ascii")


def parse_connect_answer(line: bytes) -> int:
    """The port of the host's end. The VMM closes the connection instead when nobody listens in the guest."""
    match = _ANSWER.fullmatch(line)
    if match is None:
        raise DialFailed("the VMM did not open the port" if not line else "the VMM's answer is no OK line")
    return int(match.group(1))


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Byte by byte up to a short limit: what follows the line is the guest's already."""
    line = b""
    try:
        while len(line) < _MAX_ANSWER and not line.endswith(b"\n"):
            byte = await reader.read(1)
            if not byte:
                break
            line += byte
    except OSError as error:
        raise DialFailed(f"no answer: {error.strerror}") from error
    return line
