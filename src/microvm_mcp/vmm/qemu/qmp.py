"""QEMU's control socket with deadlines: `qemu.qmp` speaks the protocol, this bounds every wait.

Whoever answers is a VMM that a hostile guest may have taken over: an answer is checked for its type before it is
used, and none is waited for without a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from qemu.qmp import EventListener, Message, QMPClient, QMPError
from qemu.qmp.protocol import ConnectError, StateError

_WATCHED = ("SHUTDOWN", "GUEST_PANICKED", "MIGRATION")


MAX_PENDING = 64
"""Events that wait to be looked at. A healthy VMM has a handful; more are dropped."""


class _Events(EventListener):
    """Keeps no history and no more than MAX_PENDING: the library's own listener grows while events come."""

    def accept(self, event: Message) -> bool:
        self._history.clear()
        return super().accept(event) and self._queue.qsize() < MAX_PENDING


class QmpFailed(Exception):
    """Refused, lost or late; the message says which command."""


class Qmp:
    """One connection. Made by `connect`; after an error that is no refusal it is of no use any more."""

    def __init__(self, client: QMPClient, events: EventListener) -> None:
        self._client = client
        self._events = events

    @classmethod
    async def connect(cls, path: Path, *, timeout_s: float) -> Qmp:
        """QEMU listens before it is up: connecting succeeds at once, the greeting comes when it is."""
        client = QMPClient(path.parent.name)
        client.logger.setLevel(logging.CRITICAL)
        events = _Events(_WATCHED)
        client.register_listener(events)
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(str(path))
        except TimeoutError as error:
            raise QmpFailed(f"no greeting within {timeout_s:g} s") from error
        except (ConnectError, OSError) as error:
            raise QmpFailed(f"no connection: {error}") from error
        return cls(client, events)

    async def execute(
        self, command: str, arguments: Mapping[str, object] | None = None, *, timeout_s: float
    ) -> object:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.execute(command, arguments)
        except TimeoutError as error:
            raise QmpFailed(f"{command}: no answer within {timeout_s:g} s") from error
        except (QMPError, StateError, OSError) as error:
            raise QmpFailed(f"{command}: {error}") from error

    async def query(self, command: str, key: str, *, timeout_s: float) -> str:
        """One string of an answer."""
        answer = await self.execute(command, timeout_s=timeout_s)
        value = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(value, str):
            raise QmpFailed(f"{command}: an answer without {key}")
        return value

    async def give(self, name: str, fd: int, *, timeout_s: float) -> None:
        """Hands over a descriptor, which QEMU then knows by `name`."""
        try:
            self._client.send_fd_scm(fd)
        except (QMPError, StateError, OSError) as error:
            raise QmpFailed(f"getfd: {error}") from error
        await self.execute("getfd", {"fdname": name}, timeout_s=timeout_s)

    async def next_event(self) -> tuple[str, Mapping[str, object]]:
        """Waits for as long as it takes: the only wait without a deadline, and its caller watches the process."""
        event = await self._events.get()
        data = event.get("data")
        return str(event.get("event")), data if isinstance(data, dict) else {}

    async def close(self) -> None:
        with suppress(Exception):
            async with asyncio.timeout(5):
                await self._client.disconnect()
