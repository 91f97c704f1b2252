"""Both ends of the conversation as state machines without I/O: bytes in, events out, bytes to send out.

    HostSession   greeting ──WELCOME──▶ open          one per connection and nonce; made anew to attach anew
    GuestSession  deaf ──HELLO──▶ open ──HELLO──▶ open …   one for ever; a new nonce replaces the session

Errors are local (LocalError: we must not send that; nothing changed) or remote (WireError). The host's side raises
on the first thing that no honest supervisor sends, and is broken from then on. The guest's side never raises: it
answers a request that it cannot read with `invalid` and ignores what belongs to no request.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from microvm_mcp.wire.fields import Fields, LocalError, WireError, decode_json, encode_json
from microvm_mcp.wire.frames import MAX_PAYLOAD, PADDING, Frame, FrameReader, Kind, encode_frame
from microvm_mcp.wire.messages import (
    BOOT_ID,
    MAX_DATA,
    MAX_WAITING,
    NONCE_BYTES,
    SUPERVISOR,
    SUPPORTED_VERSIONS,
    ErrorCode,
    Hello,
    Refused,
    Reply,
    Request,
    Welcome,
)
from microvm_mcp.wire.replies import encode_reply, parse_refusal, parse_reply, refusal_document
from microvm_mcp.wire.requests import encode_request, parse_request

MAX_NOISE = 4 * 1024 * 1024
"""Bytes of earlier sessions that the host skips before the WELCOME: far above what a supervisor queues."""
MAX_DAMAGED = 8
_LENGTH = struct.Struct(">I")


class Welcomed(NamedTuple):
    welcome: Welcome


class Answered(NamedTuple):
    request: int
    answer: Reply | Refused


class Greeted(NamedTuple):
    """A hello to be answered with `GuestSession.welcome`. `fresh`: it replaced the session."""

    fresh: bool


class Asked(NamedTuple):
    request: int
    question: Request


class Send(NamedTuple):
    """An answer that the session gives by itself."""

    data: bytes


class _Message(NamedTuple):
    kind: Kind
    request: int
    control: object
    data: bytes


class _Assembler:
    """One message at a time: its head, then DATA frames of the same id until its data are complete."""

    def __init__(self) -> None:
        self._head: Frame | None = None
        self._missing = 0
        self._data = bytearray()

    def reset(self) -> None:
        self._head, self._missing = None, 0
        self._data.clear()

    def add(self, frame: Frame) -> _Message | None:
        """WireError leaves the assembler ready for the next message."""
        if frame.kind is Kind.DATA:
            head = self._head
            if head is None or frame.request != head.request or not 0 < len(frame.payload) <= self._missing:
                self.reset()
                raise WireError("data that belong to no message")
            self._data += frame.payload
            self._missing -= len(frame.payload)
        else:
            torn = self._head is not None
            self.reset()
            if torn:
                raise WireError("a message begins inside another")
            if len(frame.payload) < _LENGTH.size or _LENGTH.unpack_from(frame.payload)[0] > MAX_DATA:
                raise WireError("message without a length, or with too much data")
            head = self._head = frame
            self._missing = _LENGTH.unpack_from(frame.payload)[0]
        if self._missing:
            return None
        data = bytes(self._data)
        self.reset()
        return _Message(head.kind, head.request, decode_json(head.payload[_LENGTH.size :]), data)


def encode_message(kind: Kind, tag: int, request: int, control: dict[str, object], data: bytes) -> bytes:
    payload = _LENGTH.pack(len(data)) + encode_json(control)
    if len(payload) > MAX_PAYLOAD or len(data) > MAX_DATA:
        raise LocalError("message over its limit")
    pieces = (data[start : start + MAX_PAYLOAD] for start in range(0, len(data), MAX_PAYLOAD))
    head = encode_frame(kind, tag, request, payload)
    return b"".join((head, *(encode_frame(Kind.DATA, tag, request, piece) for piece in pieces)))


class HostSession:
    def __init__(self, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise LocalError("nonce of a wrong length")
        self._nonce = nonce
        self._tag = _tag(nonce)
        self._reader = FrameReader(tag=self._tag)
        self._assembler = _Assembler()
        self._welcome: Welcome | None = None
        self._hellos = 0
        self._last_request = 0
        self._open: dict[int, Request] = {}

    @property
    def waiting(self) -> int:
        """Requests without an answer so far; at most MAX_WAITING."""
        return len(self._open)

    def hello(self) -> bytes:
        """To be sent first, and again while it stays unanswered: then behind padding."""
        padding = PADDING if self._hellos else b""
        self._hellos += 1
        document = {"nonce": self._nonce.hex(), "versions": list(SUPPORTED_VERSIONS)}
        return padding + encode_frame(Kind.HELLO, self._tag, 0, encode_json(document))

    def ask(self, request: Request) -> tuple[int, bytes]:
        if self._welcome is None:
            raise LocalError("not welcomed yet")
        if len(self._open) >= MAX_WAITING:
            raise LocalError("too many requests without an answer")
        control, data = encode_request(request)
        number = self._last_request + 1
        encoded = encode_message(Kind.REQUEST, self._tag, number, control, data)
        self._last_request = number
        self._open[number] = request
        return number, encoded

    def receive(self, data: bytes) -> list[Welcomed | Answered]:
        self._reader.feed(data)
        events: list[Welcomed | Answered] = []
        quiet = self._reader.skipped if self._welcome is not None else None
        while (frame := self._reader.next_frame()) is not None:
            event = self._take(frame)
            if event is not None:
                events.append(event)
                if isinstance(event, Welcomed) and quiet is None:
                    quiet = self._reader.skipped
        if quiet is not None and self._reader.skipped != quiet:
            raise WireError("bytes that are no frame of this session")
        if self._reader.skipped > MAX_NOISE or self._reader.damaged > MAX_DAMAGED:
            raise WireError("noise without end")
        return events

    def _take(self, frame: Frame) -> Welcomed | Answered | None:
        if frame.kind is Kind.WELCOME:
            return self._take_welcome(frame)
        message = self._assembler.add(frame)
        if message is None:
            return None
        if message.kind is Kind.ERROR and message.request == 0 and self._welcome is None:
            refused = parse_refusal(message.control, message.data)
            return Answered(0, refused)
        request = self._open.pop(message.request, None)
        if request is None:
            raise WireError("answer to no question")
        if message.kind is Kind.ERROR:
            return Answered(message.request, parse_refusal(message.control, message.data))
        if message.kind is not Kind.REPLY:
            raise WireError("a frame that only the host sends")
        return Answered(message.request, parse_reply(request, message.control, message.data))

    def _take_welcome(self, frame: Frame) -> Welcomed | None:
        welcome = _parse_welcome(decode_json(frame.payload))
        if welcome.nonce != self._nonce or welcome.version not in SUPPORTED_VERSIONS or self._hellos == 0:
            raise WireError("welcome to another hello")
        self._hellos -= 1
        if self._welcome is not None:
            return None
        self._welcome = welcome
        return Welcomed(welcome)


class GuestSession:
    def __init__(self) -> None:
        self._reader = FrameReader(hellos=True)
        self._assembler = _Assembler()
        self._hello: Hello | None = None
        self._tag = 0
        self._waiting: set[int] = set()

    @property
    def version(self) -> int | None:
        return None if self._hello is None else negotiate(self._hello.versions)

    def receive(self, data: bytes) -> list[Greeted | Asked | Send]:
        self._reader.feed(data)
        events: list[Greeted | Asked | Send] = []
        while (frame := self._reader.next_frame()) is not None:
            event = self._greet(frame) if frame.kind is Kind.HELLO else self._ask(frame)
            if event is not None:
                events.append(event)
        return events

    def welcome(self, *, supervisor: str, boot_id: str, active_jobs: int) -> bytes:
        """Answer to the last Greeted event."""
        if self._hello is None:
            raise LocalError("nobody to welcome")
        document = {
            "nonce": self._hello.nonce.hex(),
            "version": self.version,
            "supervisor": supervisor,
            "boot_id": boot_id,
            "active_jobs": active_jobs,
        }
        return encode_frame(Kind.WELCOME, self._tag, 0, encode_json(document))

    def answer(self, request: int, answer: Reply | Refused) -> bytes:
        """Empty for a request of an earlier session: its number counts for nothing any more."""
        if request not in self._waiting:
            return b""
        self._waiting.discard(request)
        if isinstance(answer, Refused):
            return encode_message(Kind.ERROR, self._tag, request, refusal_document(answer), b"")
        return encode_message(Kind.REPLY, self._tag, request, *encode_reply(answer))

    def _greet(self, frame: Frame) -> Greeted | Send | None:
        try:
            hello = _parse_hello(decode_json(frame.payload))
        except WireError:
            return None
        tag = _tag(hello.nonce)
        if tag != frame.tag:
            return None
        if negotiate(hello.versions) is None:
            speaks = ", ".join(map(str, SUPPORTED_VERSIONS))
            refused = Refused(ErrorCode.VERSION, f"this supervisor speaks wire version {speaks}")
            return Send(encode_message(Kind.ERROR, tag, 0, refusal_document(refused), b""))
        fresh = self._hello is None or hello.nonce != self._hello.nonce
        if fresh:
            self._assembler.reset()
            self._waiting = set()
        self._hello, self._tag, self._reader.tag = hello, tag, tag
        return Greeted(fresh)

    def _ask(self, frame: Frame) -> Asked | Send | None:
        try:
            message = self._assembler.add(frame)
            if message is None or message.kind is not Kind.REQUEST or message.request in self._waiting:
                return None
        except WireError as error:
            return (
                self._refuse(frame.request, ErrorCode.INVALID, str(error)) if frame.kind is Kind.REQUEST else None
            )
        try:
            question = parse_request(message.control, message.data)
        except WireError as error:
            return self._refuse(message.request, ErrorCode.INVALID, str(error))
        if len(self._waiting) >= MAX_WAITING:
            return self._refuse(message.request, ErrorCode.BUSY, f"{MAX_WAITING} requests are waiting already")
        self._waiting.add(message.request)
        return Asked(message.request, question)

    def _refuse(self, request: int, code: ErrorCode, message: str) -> Send:
        document = refusal_document(Refused(code, message))
        return Send(encode_message(Kind.ERROR, self._tag, request, document, b""))


def negotiate(theirs: tuple[int, ...]) -> int | None:
    return max((version for version in theirs if version in SUPPORTED_VERSIONS), default=None)


def _tag(nonce: bytes) -> int:
    return int.from_bytes(nonce[:8], "big")


def _parse_hello(document: object) -> Hello:
    fields = Fields(document)
    versions = fields.take("versions")
    if not isinstance(versions, list) or not 0 < len(versions) <= 8 or any(type(v) is not int for v in versions):
        raise WireError("versions: not a short list of integers")
    hello = Hello(_parse_nonce(fields), tuple(versions))
    fields.end()
    return hello


def _parse_welcome(document: object) -> Welcome:
    fields = Fields(document)
    welcome = Welcome(
        nonce=_parse_nonce(fields),
        version=fields.integer("version", 0, 255),
        supervisor=fields.text("supervisor", max_bytes=64, pattern=SUPERVISOR),
        boot_id=fields.text("boot_id", max_bytes=80, pattern=BOOT_ID),
        active_jobs=fields.integer("active_jobs", 0, 64),
    )
    fields.end()
    return welcome


def _parse_nonce(fields: Fields) -> bytes:
    text = fields.text("nonce", max_bytes=2 * NONCE_BYTES)
    try:
        nonce = bytes.fromhex(text)
    except ValueError as error:
        raise WireError("nonce: not hexadecimal") from error
    if len(nonce) != NONCE_BYTES or nonce.hex() != text:
        raise WireError("nonce: malformed")
    return nonce
