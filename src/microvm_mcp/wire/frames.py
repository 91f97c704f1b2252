"""Frames: bytes to frames and back, on a byte stream that may never be closed and may be torn anywhere.

    magic 4 | kind 1 | length 4 | session tag 8 | request id 4 | header CRC 4 | payload | payload CRC 4

Integers are big-endian. The header CRC (zlib.crc32) covers what stands before it; the payload CRC is seeded with
it, so that no payload passes behind another header. A payload has at most 64 KiB, a greeting at most 1 KiB.

The payload of a DATA frame is XORed with the session tag, repeated. Such payloads are the tenant's own bytes, and
the reader searches inside damaged frames: a file that looks like frames must not be found there as frames. The tag
is random and unknown to whoever wrote the file. Other payloads are JSON, which the magic is no part of.

The reader resynchronises: whatever is no intact frame of its session costs one byte and the search goes on *inside*
what is already buffered, so a hello that a torn frame swallowed is found as soon as that frame turns out damaged.
It takes headers of its own session only (a tag is 64 random bits that the other side's payloads cannot contain by
accident), greetings excepted where it is told to. It never holds more than one largest frame, and never raises.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"\xf1mV\x9e"
MAX_PAYLOAD = 65_536
MAX_GREETING = 1_024
"""Small, because a forged or torn greeting can hold up the reader for its length."""
MAX_CHUNK = 65_536
"""Most bytes that one `feed` takes; with one largest frame, the bound of the buffer."""

_HEADER = struct.Struct(">4sBIQI")
_CRC = struct.Struct(">I")
HEADER_BYTES = _HEADER.size + _CRC.size
MAX_FRAME = HEADER_BYTES + MAX_PAYLOAD + _CRC.size
PADDING = bytes(MAX_FRAME)
"""Sent before a hello that is tried again: completes whatever torn frame the other side still waits for."""


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    REPLY = 4
    ERROR = 5
    DATA = 6


_KINDS = {int(kind): kind for kind in Kind}
_GREETINGS = (Kind.HELLO, Kind.WELCOME)


class Frame(NamedTuple):
    kind: Kind
    tag: int
    request: int
    payload: bytes


class _Header(NamedTuple):
    kind: Kind
    length: int
    tag: int
    request: int
    crc: int


def encode_frame(kind: Kind, tag: int, request: int, payload: bytes) -> bytes:
    if len(payload) > (MAX_GREETING if kind in _GREETINGS else MAX_PAYLOAD):
        raise ValueError("payload over the limit of its kind")
    if kind is Kind.DATA:
        payload = _masked(payload, tag)
    head = _HEADER.pack(MAGIC, kind, len(payload), tag, request)
    crc = zlib.crc32(head)
    return b"".join((head, _CRC.pack(crc), payload, _CRC.pack(zlib.crc32(payload, crc))))


def _masked(payload: bytes, tag: int) -> bytes:
    """Its own inverse. Through one large integer, which takes microseconds where a loop takes milliseconds."""
    length = len(payload)
    mask = (tag.to_bytes(8, "big") * (length // 8 + 1))[:length]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(mask, "big")).to_bytes(length, "big")


class FrameReader:
    """Call `feed`, then `next_frame` until it returns None. `tag` may be changed between frames.

    `hellos`: take hellos of any session (the side that is greeted). `tag` None: take nothing else.
    """

    def __init__(self, *, tag: int | None = None, hellos: bool = False) -> None:
        self.tag = tag
        self.skipped = 0
        """Bytes thrown away so far. The peer's choice: the caller bounds it where it matters."""
        self.damaged = 0
        """Frames with an intact header of this session whose payload was not. Each may cost a CRC over 64 KiB."""
        self._hellos = hellos
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        if len(data) > MAX_CHUNK:
            raise ValueError("chunk over MAX_CHUNK")
        self._buffer += data

    def next_frame(self) -> Frame | None:
        buffer = self._buffer
        while self._seek_magic():
            if len(buffer) < HEADER_BYTES:
                return None
            header = self._header()
            if header is None:
                self._skip(1)
                continue
            end = HEADER_BYTES + header.length + _CRC.size
            if len(buffer) < end:
                return None
            payload = bytes(buffer[HEADER_BYTES : end - _CRC.size])
            if _CRC.unpack_from(buffer, end - _CRC.size)[0] != zlib.crc32(payload, header.crc):
                self.damaged += 1
                self._skip(1)
                continue
            del buffer[:end]
            if header.kind is Kind.DATA:
                payload = _masked(payload, header.tag)
            return Frame(header.kind, header.tag, header.request, payload)
        return None

    def _seek_magic(self) -> bool:
        """Move the next magic to the front; without one keep only what may become one."""
        buffer = self._buffer
        start = buffer.find(MAGIC)
        if start < 0:
            keep = next((n for n in range(min(3, len(buffer)), 0, -1) if buffer.endswith(MAGIC[:n])), 0)
            self._skip(len(buffer) - keep)
            return False
        self._skip(start)
        return True

    def _header(self) -> _Header | None:
        _, kind_number, length, tag, request = _HEADER.unpack_from(self._buffer)
        crc = zlib.crc32(self._buffer[: _HEADER.size])
        kind = _KINDS.get(kind_number)
        if kind is None or _CRC.unpack_from(self._buffer, _HEADER.size)[0] != crc:
            return None
        if length > (MAX_GREETING if kind in _GREETINGS else MAX_PAYLOAD):
            return None
        if tag != self.tag and not (self._hellos and kind is Kind.HELLO):
            return None
        return _Header(kind, length, tag, request, crc)

    def _skip(self, count: int) -> None:
        if count:
            self.skipped += count
            del self._buffer[:count]
