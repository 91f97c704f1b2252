"""From a bearer token to a principal. Knows tokens by their SHA-256 only, and never logs or echoes one.

Answers come from memory as long as nobody has committed anything to the database, in this process or another: so a
revocation holds from the next request on. Whether a token is unknown, expired or revoked is the same answer.
"""

from __future__ import annotations

import hashlib

from microvm_mcp.errors import Unauthenticated
from microvm_mcp.model import Limits, Principal, Token, Workspace
from microvm_mcp.service.clock import Clock
from microvm_mcp.store import tokens
from microvm_mcp.store.database import Database

NO_LIMITS = Limits()
_MAX_TOKEN_CHARS = 512
_MAX_CACHED = 1024


class Authenticator:
    def __init__(self, db: Database, clock: Clock, default_limits: Limits = NO_LIMITS) -> None:
        self._default_limits = default_limits
        self._db = db
        self._clock = clock
        self._revision: int | None = None
        self._known: dict[str, tuple[Token, Workspace]] = {}

    async def authenticate(self, token: str) -> Principal:
        """The principal, or Unauthenticated."""
        if not token or len(token) > _MAX_TOKEN_CHARS or not token.isascii():
            raise unauthenticated()
        digest = hashlib.sha256(token.encode("ascii")).hexdigest()
        # The revision is read before the row: a commit in between makes the entry stale, never too fresh.
        revision = self._db.revision()
        if revision != self._revision:
            self._known.clear()
            self._revision = revision
        found = self._known.get(digest)
        if found is None:
            found = await self._db.read(lambda tx: tokens.by_digest(tx, digest))
            if found is None:
                raise unauthenticated()
            self._remember(digest, found, revision)
        row, workspace = found
        expired = row.expires_at <= self._clock.wall()
        if expired or row.revoked_at is not None or workspace.revoked_at is not None:
            raise unauthenticated()
        return Principal(
            workspace=workspace.name,
            token_id=row.token_id,
            allow_network=workspace.allow_network,
            limits=effective_limits(workspace.limits, self._default_limits),
        )

    def _remember(self, digest: str, found: tuple[Token, Workspace], revision: int) -> None:
        if revision != self._revision:
            return
        if len(self._known) >= _MAX_CACHED:
            self._known.clear()
        self._known[digest] = found


def effective_limits(own: Limits, defaults: Limits) -> Limits:
    """A workspace's own limits, with the configuration's where it has none."""
    return Limits(
        max_vms=defaults.max_vms if own.max_vms is None else own.max_vms,
        max_memory_mib=defaults.max_memory_mib if own.max_memory_mib is None else own.max_memory_mib,
        max_storage_gib=defaults.max_storage_gib if own.max_storage_gib is None else own.max_storage_gib,
    )


def unauthenticated() -> Unauthenticated:
    return Unauthenticated(
        "A valid workspace token is required as Authorization: Bearer TOKEN; the operator issues one with "
        "`microvm-mcp issue-token`."
    )
