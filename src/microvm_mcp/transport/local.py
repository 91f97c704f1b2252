"""The service's local socket: administration by root and the group `microvm`, and by nobody else.

One connection carries one request and one answer, each a line of JSON of at most 64 KiB:

    {"method": "revoke_token", "params": {"token_id": "tok-..."}}
    {"result": {...}}  or  {"error": {"code": ..., "message": ..., "retryable": ..., "details"?: ...}}

Who may speak is decided by what the kernel says of the peer, not by the socket's mode alone. A peer that is slow,
silent or talks too much loses its connection and costs nobody else anything. Tokens never travel here.
"""

from __future__ import annotations

import asyncio
import errno
import grp
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from microvm_mcp.errors import (
    PUBLIC_ERRORS,
    Detail,
    FailedPrecondition,
    Internal,
    InvalidArguments,
    MicrovmError,
    OutcomeUnknown,
    PermissionDenied,
    TooLarge,
    Unavailable,
)
from microvm_mcp.transport.json_body import parse_json

log = logging.getLogger(__name__)

GROUP = "microvm"
MAX_LINE_BYTES = 64 * 1024
REQUEST_S = 10.0
"""From the connection to the end of the request; an answer must be taken within the same time."""
MAX_CONNECTIONS = 32

_SO_PEERGROUPS = 59
"""Linux's number for x86 and arm64; the socket module has no name for it. The peer's groups when it connected."""
_UCRED = struct.Struct("iII")
_MAX_OPTION_BYTES = 1024
"""What Python's getsockopt takes."""

Answer = Callable[[str, object], Awaitable[dict[str, Detail]]]


class NotRunning(Exception):
    """Nobody listens on the socket."""


def socket_path(run_dir: Path, tag: str) -> Path:
    return run_dir / tag / "service.sock"


class LocalSocket:
    """Serves `answer(method, params)`. To be started by the one process that holds the instance's lock."""

    def __init__(self, path: Path, answer: Answer, *, group: str = GROUP) -> None:
        self._path = path
        self._answer = answer
        self._group_name = group
        self._gid: int | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        try:
            self._gid = grp.getgrnam(self._group_name).gr_gid
        except KeyError:
            self._gid = None
        listener = _bind(self._path, self._gid)
        self._server = await asyncio.start_unix_server(self._on_connection, sock=listener, limit=MAX_LINE_BYTES)

    async def close(self, *, deadline_s: float = 5.0) -> None:
        """Take no more, give what is in progress `deadline_s`, remove the socket. Any number of times."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        self._path.unlink(missing_ok=True)
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=deadline_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await server.wait_closed()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._converse(reader, writer), name="local-socket")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                answer: dict[str, Detail] = {"result": await self._respond(reader, writer)}
            except MicrovmError as error:
                answer = {"error": error.body()}
            except ConnectionError:
                return
            except Exception:
                log.exception("a local request failed")
                answer = {"error": Internal().body()}
            writer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(REQUEST_S):
                    await writer.drain()
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Detail]:
        pid, uid = self._admit(writer.get_extra_info("socket"))
        if len(self._connections) > MAX_CONNECTIONS:
            raise Unavailable("Too many administrative commands at once; try again in a moment.")
        try:
            async with asyncio.timeout(REQUEST_S):
                line = await reader.readuntil(b"\n")
        except TimeoutError:
            raise Unavailable(f"No request came within {REQUEST_S:.0f} s; send one line of JSON.") from None
        except asyncio.IncompleteReadError:
            raise InvalidArguments("The request has no end; send one line of JSON.") from None
        except asyncio.LimitOverrunError:
            raise TooLarge(f"A request is one line of at most {MAX_LINE_BYTES // 1024} KiB.") from None
        request = parse_json(line)
        if not isinstance(request, dict) or not request.keys() <= {"method", "params"}:
            raise InvalidArguments("A request is an object with method and params.")
        method = request.get("method")
        if not isinstance(method, str):
            raise InvalidArguments.field("method", "must be a string")
        log.info("local request pid=%d uid=%d", pid, uid)
        return await self._answer(method, request.get("params", {}))

    def _admit(self, peer: socket.socket) -> tuple[int, int]:
        pid, uid, gid = peer_credentials(peer)
        if uid not in (0, os.geteuid()) and (
            self._gid is None or (gid != self._gid and self._gid not in peer_groups(peer))
        ):
            log.warning("local request refused pid=%d uid=%d", pid, uid)
            raise _not_allowed()
        return pid, uid


def peer_credentials(peer: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid of whoever connected, as the kernel noted them then."""
    pid, uid, gid = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def peer_groups(peer: socket.socket) -> frozenset[int]:
    """Supplementary groups of whoever connected; none for one who is in more than 256, who is refused then."""
    try:
        raw = peer.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_OPTION_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return frozenset()
    return frozenset(struct.unpack(f"{len(raw) // 4}I", raw))


def call(path: Path, method: str, params: Mapping[str, Detail], *, deadline_s: float) -> dict[str, Detail]:
    """The other end, blocking: what the administrative commands use. Raises NotRunning or what the service says."""
    request = json.dumps({"method": method, "params": dict(params)}).encode() + b"\n"
    deadline = time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(deadline_s)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            raise NotRunning from None
        except PermissionError:
            raise _not_allowed() from None
        except OSError as error:
            raise Unavailable(f"The service's socket does not take a connection: {error.strerror}.") from error
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                # A refusal may be there before the request is through.
                connection.sendall(request)
            line = _read_line(connection, deadline)
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            raise OutcomeUnknown(
                "The service gave no answer; look at its log, and repeat the command once it answers."
            ) from error
    return _result(answer)


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(line) > MAX_LINE_BYTES:
            raise TimeoutError(errno.ETIMEDOUT, "no whole answer in time")
        connection.settimeout(left)
        part = connection.recv(65_536)
        if not part:
            raise ConnectionError(errno.ECONNRESET, "closed without an answer")
        line += part
    return bytes(line)


def _result(answer: object) -> dict[str, Detail]:
    if isinstance(answer, dict):
        result, error = answer.get("result"), answer.get("error")
        if isinstance(result, dict):
            return result
        if isinstance(error, dict):
            raise _error(error)
    raise Internal("The service's answer makes no sense; do the command and the service have the same version?")


def _error(body: dict[str, object]) -> MicrovmError:
    """The same class as at the other end, so that the exit status is the same on both ways."""
    message, details = str(body.get("message", "")), body.get("details")
    kind = next((known for known in PUBLIC_ERRORS if known.code == body.get("code")), Internal)
    error = kind.__new__(kind)
    MicrovmError.__init__(error, message, details=details if isinstance(details, dict) else None)
    return error


def _not_allowed() -> PermissionDenied:
    return PermissionDenied(
        f"Administration is for root and members of the group {GROUP}; run the command as such."
    )


def _bind(path: Path, gid: int | None) -> socket.socket:
    """The directory keeps everyone else out before the socket has its own mode."""
    directory = path.parent
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if directory.is_symlink() or not directory.is_dir() or found.st_uid != os.geteuid():
        raise FailedPrecondition(f"{directory} is not this service's own directory; remove it.")
    directory.chmod(0o700)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        if gid is None:
            path.chmod(0o600)
        else:
            os.chown(path, -1, gid)
            path.chmod(0o660)
            os.chown(directory, -1, gid)
            directory.chmod(0o750)
        listener.listen(MAX_CONNECTIONS)
        listener.settimeout(0)
    except BaseException:
        listener.close()
        raise
    return listener
