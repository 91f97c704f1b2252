"""The gate round both doors: Host, Origin, credential and size of the head, before anything else runs.

It promises the application behind it: exactly one Host header from the allow-list, a principal in
`scope["state"]["principal"]` on every path but `/healthz`, and that whatever goes wrong ends as one JSON error.
A WebSocket runs through the same checks before its handshake is accepted. Tokens and rejected values never reach
a log or an answer.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microvm_mcp.errors import (
    HeadersTooLarge,
    HostNotAllowed,
    Internal,
    MethodNotAllowed,
    MicrovmError,
    NotFound,
    OriginNotAllowed,
    Unauthenticated,
)
from microvm_mcp.model import Principal
from microvm_mcp.transport.answers import Header, send_error
from microvm_mcp.transport.body import ClientGone, discard_body
from microvm_mcp.transport.doors import DoorSettings, ToolService

log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/healthz"})
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")
"""RFC 6750's alphabet. Longer or other values cannot be ours and are not looked up."""
_CHALLENGE: Final = b'Bearer realm="microvm-mcp"'


class Gate:
    def __init__(self, app: ASGIApp, service: ToolService, settings: DoorSettings) -> None:
        self._app = app
        self._service = service
        self._hosts = frozenset(host.lower() for host in settings.hosts)
        self._origins = frozenset(origin.lower() for origin in settings.origins)
        self._limits = settings.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            raise RuntimeError(f"unexpected ASGI scope: {scope['type']}")
        exchange = _Exchange(receive, send)
        try:
            await self._admit(scope)
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            return
        except MicrovmError as error:
            await self._refuse(scope, exchange, error)
        except Exception:
            log.exception("a request failed door=%s", "mcp" if scope["path"] == "/mcp" else "http")
            await self._refuse(scope, exchange, Internal())

    async def _refuse(self, scope: Scope, exchange: _Exchange, error: MicrovmError) -> None:
        if exchange.answered:
            return
        headers: list[Header] = []
        if isinstance(error, Unauthenticated):
            # No resource_metadata: clients that find some start an OAuth dance that cannot end well here.
            sent_one = any(name == b"authorization" for name, _ in scope["headers"])
            headers.append((b"www-authenticate", _CHALLENGE + (b', error="invalid_token"' if sent_one else b"")))
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", str(error.details.get("allow", "")).encode("ascii")))
        try:
            unread = scope["type"] == "http" and not exchange.received
            if unread and not await discard_body(scope, exchange.receive):
                headers.append((b"connection", b"close"))
            await send_error(scope, exchange.send, error, headers=headers)
        except ClientGone:
            return

    async def _admit(self, scope: Scope) -> None:
        """Check and rewrite the scope in place, or raise the refusal."""
        raw: list[Header] = []
        sent: dict[bytes, list[str]] = {b"host": [], b"origin": [], b"authorization": []}
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        for given, blank in scope["headers"]:
            # RFC 9110 takes blanks round a value off; not every HTTP parser does.
            name, value = given.lower(), blank.strip(b" \t")
            size += len(name) + len(value) + 4
            if name in sent:
                value = value if name == b"authorization" else value.lower()
                sent[name].append(value.decode("latin-1"))
            raw.append((name, value))
        if size > self._limits.head_bytes:
            raise HeadersTooLarge(f"Request line and headers are limited to {self._limits.head_bytes} bytes.")
        hosts, origins = sent[b"host"], sent[b"origin"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            raise HostNotAllowed(
                "The Host header is not one of this service's names; the operator lists them in allowed_hosts."
            )
        if origins and (len(origins) > 1 or origins[0] not in self._origins):
            raise OriginNotAllowed(
                "The Origin header is not one this service accepts; the operator lists them in allowed_origins."
            )
        scope["headers"] = raw
        if scope["path"] == "/mcp/":
            # Not a redirect: clients drop the Authorization header or the body on one.
            scope["path"], scope["raw_path"] = "/mcp", b"/mcp"
        if scope["path"].startswith("/.well-known/"):
            raise NotFound("There is no metadata here: access is by a bearer token that the operator issues.")
        if scope["path"] in OPEN_PATHS:
            return
        scope["state"] = {**scope.get("state", {}), "principal": await self._authenticate(sent[b"authorization"])}

    async def _authenticate(self, values: list[str]) -> Principal:
        scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        token = token.strip(" ")
        if scheme.lower() != "bearer" or not _TOKEN.fullmatch(token):
            raise Unauthenticated(
                "Send exactly one header `Authorization: Bearer TOKEN` with a token that the operator issued."
            )
        return await self._service.authenticate(token)


class _Exchange:
    """Receive and send, knowing how far they got: a begun answer is the only one, a whole body is not awaited."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.received = False
        self.answered = False

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self.received = True
        return message

    async def send(self, message: Message) -> None:
        self.answered = True
        await self._send(message)
