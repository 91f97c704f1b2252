"""What an MCP message must look like before the SDK sees it. Pure: headers and a parsed body in, a refusal out.

The SDK answers some malformed messages with silence (an id of null is taken for a notification) and some with the
text of a validation error, which repeats what was sent. Both end here: every refusal is a JSON-RPC error that says
what is supported and carries the service's own error object as `data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Final

from mcp_types.jsonrpc import INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR, UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import KNOWN_PROTOCOL_VERSIONS

from microvm_mcp.errors import Detail, InvalidArguments
from microvm_mcp.transport.json_body import JsonValue

PROTOCOL_VERSIONS: Final = KNOWN_PROTOCOL_VERSIONS
METHODS: Final = frozenset({"initialize", "ping", "server/discover", "tools/list", "tools/call"})
"""What the server behind this answers. The SDK repeats the name of any other method to whoever sent it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    code: int
    message: str
    request_id: str | int | None = None
    supported: Sequence[str] = ()
    status: int = 400

    def body(self) -> dict[str, Detail]:
        data: dict[str, Detail] = {"error": InvalidArguments(self.message).body()}
        if self.supported:
            data["supported"] = list(self.supported)
        error: dict[str, Detail] = {"code": self.code, "message": self.message, "data": data}
        return {"jsonrpc": "2.0", "id": self.request_id, "error": error}


def parse_refusal(error: InvalidArguments) -> Refusal:
    return Refusal(PARSE_ERROR, error.message)


def check_message(message: JsonValue, version_headers: Sequence[str]) -> Refusal | None:
    """None for one request or notification in a known protocol version (or none given: the oldest rules hold)."""
    if isinstance(message, list):
        return Refusal(INVALID_REQUEST, "Batches are not supported: send one JSON-RPC message per POST.")
    if not isinstance(message, dict):
        return Refusal(INVALID_REQUEST, "The body must be one JSON-RPC request or notification object.")
    request_id: str | int | None = None
    if "id" in message:
        given = message["id"]
        if isinstance(given, bool) or not isinstance(given, str | int):
            return Refusal(INVALID_REQUEST, "The request id must be a string or an integer.")
        request_id = given
    versions = _check_versions(version_headers, request_id)
    # The newest generation has a status for it; older clients read errors from a 200 only.
    unknown_status = 404 if list(version_headers) == [PROTOCOL_VERSIONS[-1]] else 200
    return versions or _check_shape(message, request_id, unknown_status)


def _check_versions(headers: Sequence[str], request_id: str | int | None) -> Refusal | None:
    if len(headers) > 1 or (headers and headers[0] not in PROTOCOL_VERSIONS):
        return Refusal(
            UNSUPPORTED_PROTOCOL_VERSION,
            f"The MCP-Protocol-Version header must be one of {', '.join(PROTOCOL_VERSIONS)}.",
            request_id,
            PROTOCOL_VERSIONS,
        )
    return None


def _check_shape(
    message: dict[str, JsonValue], request_id: str | int | None, unknown_status: int
) -> Refusal | None:
    if message.get("jsonrpc") != "2.0":
        return Refusal(INVALID_REQUEST, '`jsonrpc` must be "2.0".', request_id)
    method = message.get("method")
    if not isinstance(method, str):
        problem = "Only requests and notifications are accepted here: `method` must be a string."
        return Refusal(INVALID_REQUEST, problem, request_id)
    if not isinstance(message.get("params"), dict | NoneType):
        return Refusal(INVALID_REQUEST, "`params` must be an object.", request_id)
    if method == "subscriptions/listen":
        # The one method that the SDK answers with a stream, whatever is configured, or with a bodiless 406.
        problem = "There are no change events to listen to; ask again with the vm tools."
        return Refusal(METHOD_NOT_FOUND, problem, request_id, status=404)
    if "id" not in message and not method.startswith("notifications/"):
        return Refusal(INVALID_REQUEST, "This method needs a request id, a string or an integer.")
    if "id" in message and method not in METHODS:
        problem = f"There is no such method here; there are {', '.join(sorted(METHODS))}."
        return Refusal(METHOD_NOT_FOUND, problem, request_id, status=unknown_status)
    return None
