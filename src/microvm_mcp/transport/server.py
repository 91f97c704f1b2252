"""Serving the application on a listening socket, inside the service's own event loop, and ending within a bound.

The loop, its signals and the other tasks belong to the caller. The socket is bound by `listen` before anything else
starts, so that an address in use is an error of the start. At the stop no further connection is accepted, calls in
progress get `stop_s` to answer, clients that have sent no complete request get nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator

import uvicorn

from microvm_mcp.errors import FailedPrecondition
from microvm_mcp.transport.application import Application
from microvm_mcp.transport.connection import guarded_protocol

log = logging.getLogger(__name__)

_LAST_ANSWERS_S = 1.0


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, IPv4 or IPv6 by the look of the address; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=256)
        # Inherited by what it accepts. asyncio sets it only on sockets made with a protocol number, and without
        # it every answer waits 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise FailedPrecondition(
            f"Cannot listen on {host} port {port} ({error.strerror}); change [listen] or stop what uses it."
        ) from error


async def serve_http(app: Application, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then end. Owns the listener. The longest end takes `stop_s` and a few seconds."""
    limits = app.settings.limits
    config = uvicorn.Config(
        app,
        http=guarded_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.head_bytes,
        # `GuardedProtocol` has a deadline of its own for this; uvicorn's takes whole seconds only.
        timeout_keep_alive=math.ceil(limits.idle_s) + 1,
        timeout_graceful_shutdown=math.ceil(limits.stop_s) + 2,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _Server(config)
    async with app.running():
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
        stopping = asyncio.create_task(stop.wait(), name="http stop")
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            left = await app.drain(limits.stop_s)
            if left:
                log.warning("calls cut off at the stop count=%d", left)
            # Answers on their way get a moment; then nobody's slowness counts any more.
            await asyncio.wait({serving}, timeout=_LAST_ANSWERS_S)
            server.abort_connections()
            await serving
        finally:
            stopping.cancel()
            serving.cancel()
            server.abort_connections()
            server.close_listeners()
            listener.close()
            await asyncio.wait({serving}, timeout=_LAST_ANSWERS_S)


class _Server(uvicorn.Server):
    """Leaves the signals of the process to its owner, and can be ended without waiting for anybody."""

    servers: list[asyncio.Server]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def close_listeners(self) -> None:
        for server in getattr(self, "servers", []):
            server.close()
