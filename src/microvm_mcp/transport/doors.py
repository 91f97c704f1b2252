"""What the doors need of the rest, and what they are told: ports and settings as plain data. No behaviour.

The service behind the doors is anything with these three parts; `app` passes the real one, tests of the doors may
pass one of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from microvm_mcp.errors import Detail
from microvm_mcp.model import Principal


class ToolService(Protocol):
    async def authenticate(self, token: str) -> Principal:
        """Raises Unauthenticated for a token that is unknown, expired or revoked."""

    async def invoke(self, name: str, arguments: object, principal: Principal) -> Mapping[str, Detail]:
        """Look up, validate, authorise, run. Raises only MicrovmError; the result is the tool's full answer."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The catalogue as the doors advertise it, made once at start."""

    version: str
    instructions: str
    tools: Sequence[Mapping[str, Detail]]
    """Entries of MCP's `tools/list`, in the order that clients see."""
    openapi: Mapping[str, Detail]


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Sizes in bytes, times in seconds. The defaults are the contract's; only tests have reason to change them."""

    head_bytes: int = 16 * 1024
    head_s: float = 10.0
    """From the connection, or from the first byte of a further request, to the end of its headers."""
    body_bytes: int = 512 * 1024
    body_s: float = 30.0
    """From the end of the headers to the end of the body."""
    idle_s: float = 30.0
    """A connection between two requests."""
    write_s: float = 30.0
    """A client that takes none of its answer."""
    linger_s: float = 2.0
    """How long a refused client's further bytes are read and dropped, so that it gets to see the refusal."""
    max_connections: int = 512
    """Beyond that the connection that has waited longest without a request makes room."""
    stop_s: float = 10.0
    """What calls in progress get to answer once the service stops."""


@dataclass(frozen=True, slots=True)
class DoorSettings:
    hosts: frozenset[str]
    """Exact Host header values, lower case, with the port where clients send one."""
    origins: frozenset[str] = frozenset()
    limits: DoorLimits = field(default_factory=DoorLimits)
