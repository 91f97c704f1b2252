"""Who wants to hear of which descriptor. One epoll, one thread, no policy."""

from __future__ import annotations

import select
from collections.abc import Callable

Handler = Callable[[int], None]
"""Called with the events. It may be called once more than there was something, so it never blocks."""

READABLE = select.EPOLLIN
CHANGED = select.EPOLLPRI
EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET


class Poller:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}

    def add(self, fd: int, mask: int, handler: Handler) -> None:
        self._epoll.register(fd, mask)
        self._handlers[fd] = handler

    def remove(self, fd: int) -> None:
        """Before the descriptor is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def turn(self, timeout_s: float | None) -> None:
        for fd, events in self._epoll.poll(timeout_s):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(events)
