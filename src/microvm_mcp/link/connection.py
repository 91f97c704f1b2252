"""One attached connection: it was greeted once, carries any number of requests, and is never mended.

Whatever ends it (the other end, a lie, us) fails every pending request with the cause, once. A reader task owns the
receiving half; requests are written by whoever asks.
"""

from __future__ import annotations

import asyncio
import itertools
import os

from microvm_mcp.link.dial import Dial, DialFailed, Streams
from microvm_mcp.link.port import GuestLied, GuestRefused
from microvm_mcp.wire.fields import LocalError, WireError
from microvm_mcp.wire.frames import MAX_CHUNK
from microvm_mcp.wire.messages import MAX_WAITING, ErrorCode, Refused, Reply, Request, Welcome
from microvm_mcp.wire.session import Answered, HostSession, Welcomed

_HELLO_AGAIN_S = (0.3, 1.0, 2.0, 4.0)
"""Pauses before a hello is repeated. A booting guest gets the first one as soon as it opens its port; repeating is
for a supervisor that sits in a torn frame."""
_HELLO_LAST_S = 8.0


class Gone(Exception):
    """The connection is over. `sent`: the request was handed to it before."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


Outcome = Reply | Refused | Gone | GuestLied


async def attach(dial: Dial) -> Connection:
    """One attempt; Gone when nobody is there. Waits for the welcome for as long as the caller does."""
    try:
        connection = Connection(await dial())
    except DialFailed as error:
        raise Gone(str(error)) from error
    try:
        await connection.greet()
    except BaseException:
        connection.close("attaching failed")
        raise
    return connection


class Connection:
    def __init__(self, streams: Streams) -> None:
        self._reader, self._writer = streams
        self._session = HostSession(os.urandom(16))
        loop = asyncio.get_running_loop()
        self._welcomed: asyncio.Future[Welcome | Refused | Gone | GuestLied] = loop.create_future()
        self._pending: dict[int, asyncio.Future[Outcome]] = {}
        self._over: Gone | GuestLied | None = None
        self._round_trip_s: float | None = None
        self._receiver = asyncio.create_task(self._receive(), name="link receiver")

    def __repr__(self) -> str:
        return f"<Connection {'over' if self._over else 'open'} pending={len(self._pending)}>"

    @property
    def is_open(self) -> bool:
        return self._over is None

    @property
    def round_trip_s(self) -> float:
        """The quickest answer so far: no request's own work or wait is in it for long."""
        return self._round_trip_s or 0.0

    async def greet(self) -> Welcome:
        for pause in itertools.chain(_HELLO_AGAIN_S, itertools.repeat(_HELLO_LAST_S)):
            # While our last hello has not left, the guest has not even opened its port.
            if self._writer.transport.get_write_buffer_size() == 0 and self.is_open:
                self._writer.write(self._session.hello())
            done, _ = await asyncio.wait({self._welcomed}, timeout=pause)
            if done:
                break
        welcome = self._welcomed.result()
        if isinstance(welcome, Refused):
            raise GuestRefused(welcome.code.value, welcome.message)
        if isinstance(welcome, Exception):
            raise welcome
        return welcome

    @property
    def welcome(self) -> Welcome:
        welcome = self._welcomed.result()
        assert isinstance(welcome, Welcome)
        return welcome

    async def ask(self, request: Request) -> Reply:
        """Raises GuestRefused, GuestLied or Gone."""
        if self._over is not None:
            raise Gone(str(self._over))
        if self._session.waiting >= MAX_WAITING:
            raise GuestRefused(ErrorCode.BUSY.value, f"{MAX_WAITING} calls wait for this machine already")
        try:
            number, data = self._session.ask(request)
        except LocalError as error:
            raise GuestRefused(ErrorCode.INVALID.value, str(error)) from error
        loop = asyncio.get_running_loop()
        started = loop.time()
        answer: asyncio.Future[Outcome] = loop.create_future()
        self._pending[number] = answer
        self._writer.write(data)
        try:
            outcome = await answer
        finally:
            # An answer that nobody waits for any more is still checked, and dropped.
            self._pending.pop(number, None)
        if isinstance(outcome, Refused):
            raise GuestRefused(outcome.code.value, outcome.message)
        if isinstance(outcome, Exception):
            raise outcome
        took = loop.time() - started
        self._round_trip_s = took if self._round_trip_s is None else min(took, self._round_trip_s)
        return outcome

    def close(self, why: str) -> None:
        """At once, and any number of times; pending requests fail as sent."""
        self._end(Gone(why, sent=True))
        self._receiver.cancel()

    async def _receive(self) -> None:
        try:
            while data := await self._reader.read(MAX_CHUNK):
                for event in self._session.receive(data):
                    self._deliver(event)
        except WireError as error:
            self._end(GuestLied(f"the guest broke the protocol: {error}"))
        except OSError as error:
            self._end(Gone(f"connection lost: {error.strerror}", sent=True))
        else:
            self._end(Gone("the other end closed the connection", sent=True))

    def _deliver(self, event: Welcomed | Answered) -> None:
        if isinstance(event, Welcomed):
            # It may have been refused in the same breath.
            if not self._welcomed.done():
                self._welcomed.set_result(event.welcome)
        elif event.request == 0 and isinstance(event.answer, Refused):
            if not self._welcomed.done():
                self._welcomed.set_result(event.answer)
        else:
            answer = self._pending.get(event.request)
            if answer is not None and not answer.done():
                answer.set_result(event.answer)

    def _end(self, cause: Gone | GuestLied) -> None:
        if self._over is not None:
            return
        self._over = cause
        # Not `close`, which first waits until the guest has read what was written: one that never reads would keep
        # descriptor and buffer for ever, and the VMM, which serves one connection at a time, from the next one.
        self._writer.transport.abort()
        if not self._welcomed.done():
            self._welcomed.set_result(cause)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_result(cause)
