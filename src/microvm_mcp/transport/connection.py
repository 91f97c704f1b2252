"""One client connection: uvicorn's HTTP/1.1 protocol with a deadline on everything a client may be slow at.

Phases of a connection: `idle` (no byte of a request yet), `head`, `body`, `busy` (the request is complete, the
answer is ours to give). Each phase but the last has one deadline that runs from its beginning; a trickle of bytes
does not move it. A client that misses it, or sends no valid HTTP, gets a JSON error where one can still be sent;
then its side of the connection is read and dropped for a moment, so that the error is not lost in a reset. At
shutdown nothing waits for a client whose request is not complete.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ClassVar, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from microvm_mcp.errors import HeadersTooLarge, InvalidArguments, MicrovmError, SlowRequest, Unavailable
from microvm_mcp.transport.answers import render_error
from microvm_mcp.transport.doors import DoorLimits

Phase = Literal["idle", "head", "body", "busy"]


@dataclass(slots=True)
class Waiting:
    """The connections of one server that have no complete request, longest waiting first."""

    connections: dict[GuardedProtocol, None] = field(default_factory=dict)

    def make_room(self, total: int, limit: int) -> bool:
        """Close the longest waiting connection if there are too many in all; False if there is none to close."""
        if total <= limit:
            return True
        oldest = next(iter(self.connections), None)
        if oldest is None:
            return False
        oldest.drop()
        return True


class GuardedProtocol(H11Protocol):
    """Made through `guarded_protocol`, which sets the class's limits."""

    limits: ClassVar[DoorLimits]
    waiting: ClassVar[Waiting]

    _deadline: asyncio.TimerHandle | None = None
    _deadline_of: tuple[Phase, object] | None = None
    _write_deadline: asyncio.TimerHandle | None = None
    _lingering = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.waiting.make_room(len(self.connections), self.limits.max_connections):
            self._refuse(Unavailable("The service has as many connections as it takes; try again later."))
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_write_deadline()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self.limits.write_s, self.drop)

    def resume_writing(self) -> None:
        self._stop_write_deadline()
        super().resume_writing()

    # What uvicorn calls.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close_within(self.limits.write_s)
        elif not self._lingering:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls this from its `except` block; the status that h11 has in mind is in the exception only.
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if hint == 431:
            error: MicrovmError = HeadersTooLarge(f"Headers are limited to {self.limits.head_bytes} bytes.")
        else:
            error = InvalidArguments("The request is not valid HTTP/1.1.")
        self._refuse(error)

    def shutdown(self) -> None:
        if self._phase() == "busy" and not self._lingering:
            super().shutdown()
        else:
            self.drop()

    def _should_upgrade(self) -> bool:
        """No door speaks WebSocket: an upgrade is an ordinary request, which the gate checks like any other."""
        return False

    # Deadlines.

    def _phase(self) -> Phase:
        state = self.conn.their_state
        if state is h11.IDLE:
            return "head" if self.conn.trailing_data[0] else "idle"
        return "body" if state is h11.SEND_BODY else "busy"

    def _watch(self) -> None:
        """Arm the deadline of the present phase, unless it is running already."""
        if self.transport.is_closing() or self._lingering:
            return
        phase = self._phase()
        # The request that a phase belongs to tells a second body from the first one.
        key = (phase, self.cycle)
        if key == self._deadline_of:
            return
        first = self.cycle is None
        self._stop_watching()
        self._deadline_of = key
        if phase == "busy":
            return
        self.waiting.connections[self] = None
        if phase == "idle":
            delay_s = self.limits.head_s if first else self.limits.idle_s
        else:
            delay_s = self.limits.head_s if phase == "head" else self.limits.body_s
        self._deadline = self.loop.call_later(delay_s, self._too_slow, phase)

    def _stop_watching(self) -> None:
        self.waiting.connections.pop(self, None)
        self._deadline_of = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _too_slow(self, phase: Phase) -> None:
        if phase == "idle":
            self.drop()
            return
        what, limit_s = ("headers", self.limits.head_s) if phase == "head" else ("body", self.limits.body_s)
        self._refuse(
            SlowRequest(f"The {what} of a request must arrive within {limit_s:g} s; send it again faster.")
        )

    # Ends.

    def _refuse(self, error: MicrovmError) -> None:
        """Answer in the application's place if nothing was answered yet, then close after a moment."""
        self._leave_request()
        body = render_error(error).encode("utf-8")
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode("ascii")),
            (b"connection", b"close"),
        ]
        try:
            reason = HTTPStatus(error.http_status).phrase.encode("ascii")
            start = h11.Response(status_code=error.http_status, headers=head, reason=reason)
            self.transport.write(self.conn.send(start) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        except h11.LocalProtocolError:
            # An answer has begun: cutting it off is all that can be said.
            self.drop()
            return
        self._lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._close_within(self.limits.linger_s)

    def _leave_request(self) -> None:
        """The application behind a request in progress learns that its client is gone."""
        self._stop_watching()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _close_within(self, delay_s: float) -> None:
        self._stop_watching()
        self._deadline = self.loop.call_later(delay_s, self.transport.abort)

    def drop(self) -> None:
        """At once, whatever is buffered in either direction."""
        self._leave_request()
        self.transport.abort()


def guarded_protocol(limits: DoorLimits) -> type[GuardedProtocol]:
    """A protocol class with these limits and a table of waiting connections of its own."""
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": limits, "waiting": Waiting()})
