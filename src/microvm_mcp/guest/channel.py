"""The way to the host: a virtio port that is one stream for ever, or a listener whose newest connection counts.

A port is watched edge-triggered, because it polls as hung up for as long as the host's end is closed: reads give 0
bytes then, writes EAGAIN, and the next edge tells that somebody is back. Writes may be short. What waits to be sent
is bounded: while it is too much, nothing more is read, so a slow host slows only its own requests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from microvm_mcp.guest.options import Options
from microvm_mcp.guest.poller import EDGES, READABLE, Poller
from microvm_mcp.wire.frames import MAX_CHUNK

PORT_NAME = "microvm.control"
VSOCK_PORT = 1024
MAX_QUEUED = 1024 * 1024
_PORTS = "/sys/class/virtio-ports"
_APPEARS_S = 10.0
_HOST_CID = 2
_GET_LOCAL_CID = 0x7B9
"""ioctl of /dev/vsock, linux/vm_sockets.h."""

Receive = Callable[[bytes], None]


class Stream:
    """One descriptor to the host. `gone` once it can never carry anything again."""

    def __init__(self, fd: int, poller: Poller, receive: Receive, *, for_ever: bool) -> None:
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)  # noqa: FBT003
        self.gone = False
        self._fd = fd
        self._poller = poller
        self._receive = receive
        self._for_ever = for_ever
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        poller.add(fd, EDGES, self._on_edge)

    def send(self, data: bytes) -> None:
        if data and not self.gone:
            self._queue.append(memoryview(data))
            self._queued += len(data)
            self._flush()

    def drop_unsent(self) -> None:
        self._queue.clear()
        self._queued = 0

    def close(self) -> None:
        if not self.gone:
            self.gone = True
            self.drop_unsent()
            self._poller.remove(self._fd)
            os.close(self._fd)

    def _on_edge(self, _: int) -> None:
        """Until nothing more can be read and written: there is no second edge for what is left over."""
        while not self.gone:
            self._flush()
            if self.gone or self._queued > MAX_QUEUED:
                return
            try:
                data = os.read(self._fd, MAX_CHUNK)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                if not self._for_ever:
                    self.close()
                return
            self._receive(data)

    def _flush(self) -> None:
        while self._queue:
            try:
                count = os.write(self._fd, self._queue[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if not self._for_ever:
                    self.close()
                elif error.errno in (errno.EPIPE, errno.ENODEV):
                    self.drop_unsent()
                return
            self._queued -= count
            rest = self._queue.popleft()[count:]
            if rest:
                self._queue.appendleft(rest)


class Listener:
    """Accepts the host's connections; `accepted` gets each and closes the one before."""

    def __init__(self, server: socket.socket, poller: Poller, accepted: Callable[[int], None]) -> None:
        self._server = server
        self._accepted = accepted
        server.setblocking(False)  # noqa: FBT003 - the signature of the standard library
        server.listen(8)
        poller.add(server.fileno(), READABLE, self._on_readable)

    def _on_readable(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, peer = self._server.accept()
            if self._server.family == getattr(socket, "AF_VSOCK", None) and peer[0] != _HOST_CID:
                connection.close()
                return
            self._accepted(connection.detach())


def open_channel(options: Options) -> int | socket.socket:
    """A stream's descriptor, or a bound socket to listen on."""
    if options.fd:
        return int(options.fd)
    if options.listen:
        server = socket.socket(socket.AF_UNIX)
        server.bind(options.listen)
        return server
    deadline = time.monotonic() + _APPEARS_S
    while time.monotonic() < deadline:
        port = find_port(_PORTS)
        if port is not None:
            return os.open(f"/dev/{port}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if _is_vsock_guest():
            server = socket.socket(socket.AF_VSOCK)
            server.bind((socket.VMADDR_CID_ANY, VSOCK_PORT))
            return server
        # Devices may still be appearing, and nothing tells without udev: every 20 ms, for 10 s.
        time.sleep(0.02)
    raise SystemExit(f"neither a virtio port named {PORT_NAME} nor a vsock device in this guest")


def find_port(ports: str) -> str | None:
    """Device name of the port with our name, from sysfs: /dev/virtio-ports would need udev."""
    with contextlib.suppress(FileNotFoundError), os.scandir(ports) as entries:
        for entry in entries:
            with contextlib.suppress(OSError), open(f"{entry.path}/name") as file:
                if file.read().strip() == PORT_NAME:
                    return entry.name
    return None


def _is_vsock_guest() -> bool:
    """The device file alone proves nothing: without a transport the local CID is `any`."""
    try:
        fd = os.open("/dev/vsock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        cid: int = struct.unpack("I", fcntl.ioctl(fd, _GET_LOCAL_CID, bytes(4)))[0]
    except OSError:
        return False
    finally:
        os.close(fd)
    return _HOST_CID < cid < 0xFFFF_FFFF
