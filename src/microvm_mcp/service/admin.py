"""Administration: workspaces and their tokens. For the operator only; no tool reaches this module.

The token itself never comes here: whoever asks for one makes it, keeps it, and registers its SHA-256. The same code
answers over the service's local socket and, when no service runs, inside the command's own process; what is said to
it is checked as strictly as a tool's arguments. A workspace that was revoked stays revoked: its name is spent.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from microvm_mcp.errors import (
    Conflict,
    Detail,
    FailedPrecondition,
    InvalidArguments,
    MicrovmError,
    NotFound,
    Unavailable,
)
from microvm_mcp.model import Limits, Token, TokenId, Workspace, WorkspaceName
from microvm_mcp.service.clock import Clock
from microvm_mcp.service.fields import Omittable
from microvm_mcp.service.schemas import Arguments
from microvm_mcp.service.validation import parse
from microvm_mcp.store import tokens, workspaces
from microvm_mcp.store.database import Database

log = logging.getLogger(__name__)

TOKEN_PREFIX = "mvm_"  # noqa: S105 - what every token begins with, so that scanners for leaked secrets know it
TOKEN_BYTES = 32
MIN_TTL_S = 60
MAX_TTL_S = 400 * 86_400

LimitName = Literal["max_vms", "max_memory_mib", "max_storage_gib"]

_Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")]
_Count = Omittable[Annotated[int, Field(ge=1, le=1_000_000_000)]]
StopWorkspace = Callable[[WorkspaceName], Awaitable[int]]


class IssueToken(Arguments):
    workspace: _Name
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    ttl_seconds: Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]
    allow_network: bool = False
    max_vms: _Count = None
    max_memory_mib: _Count = None
    max_storage_gib: _Count = None


class SetWorkspace(Arguments):
    """What is left out stays. `reset` names limits that shall follow the configuration's defaults again."""

    workspace: _Name
    allow_network: Omittable[bool] = None
    max_vms: _Count = None
    max_memory_mib: _Count = None
    max_storage_gib: _Count = None
    reset: list[LimitName] = Field(default_factory=list)


class RevokeToken(Arguments):
    token_id: Annotated[str, Field(min_length=1, max_length=64)]


class RevokeWorkspace(Arguments):
    workspace: _Name
    stop: bool = False


class Nothing(Arguments):
    pass


class Issued(NamedTuple):
    token: Token
    workspace: Workspace


def new_token() -> str:
    """A secret of 256 random bits. To be written to its owner's file and nowhere else."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def digest_of(token: str) -> str:
    """What the database knows of a token."""
    return hashlib.sha256(token.encode("ascii")).hexdigest()


async def issue_token(db: Database, request: IssueToken, *, now: float) -> Issued:
    """Register a token; the first for a name makes the workspace, a further one joins it."""
    issued = await db.write(lambda tx: _issue(tx, request, now))
    log.info("token issued workspace=%s token_id=%s", issued.workspace.name, issued.token.token_id)
    return issued


async def set_workspace(db: Database, request: SetWorkspace) -> Workspace:
    workspace = await db.write(lambda tx: _set_policy(tx, request))
    log.info("workspace changed workspace=%s", workspace.name)
    return workspace


async def revoke_token(db: Database, request: RevokeToken, *, now: float) -> Token:
    """Repeating it is harmless."""
    token = await db.write(lambda tx: tokens.revoke(tx, TokenId(request.token_id), now=now))
    if token is None:
        raise NotFound("There is no token with this id; the id was printed when the token was issued.")
    log.info("token revoked workspace=%s token_id=%s", token.workspace, token.token_id)
    return token


async def revoke_workspace(
    db: Database, request: RevokeWorkspace, *, now: float, stop: StopWorkspace
) -> tuple[Workspace, int]:
    """All tokens of the name are dead when this returns or raises; with `stop` its VMMs are, when it returns."""
    name = WorkspaceName(request.workspace)
    workspace = await db.write(lambda tx: workspaces.revoke(tx, name, now=now))
    if workspace is None:
        raise _no_such_workspace()
    log.info("workspace revoked workspace=%s", name)
    if not request.stop:
        return workspace, 0
    try:
        stopped = await stop(name)
    except MicrovmError as error:
        raise Unavailable(
            f"The workspace is revoked, but whether all of its machines have ended is not certain: {error.message}",
            details=error.details,
        ) from error
    log.info("workspace stopped workspace=%s machines=%d", name, stopped)
    return workspace, stopped


class Administration:
    """The calls above by name, with plain JSON in and out: what the local socket carries."""

    def __init__(
        self, db: Database, clock: Clock, *, stop: StopWorkspace, about: Mapping[str, Detail] | None = None
    ) -> None:
        self._db = db
        self._clock = clock
        self._stop = stop
        self._about = dict(about or {})
        self._methods: dict[str, Callable[[object], Awaitable[dict[str, Detail]]]] = {
            "ping": self._ping,
            "issue_token": self._issue_token,
            "set_workspace": self._set_workspace,
            "revoke_token": self._revoke_token,
            "revoke_workspace": self._revoke_workspace,
        }

    async def call(self, method: str, params: object) -> dict[str, Detail]:
        """Raises only MicrovmError, as far as what went wrong is the caller's to know."""
        handler = self._methods.get(method)
        if handler is None:
            raise InvalidArguments(f"There is no such method; there are {', '.join(self._methods)}.")
        return await handler(params)

    async def _ping(self, params: object) -> dict[str, Detail]:
        parse(Nothing, params, {})
        return dict(self._about)

    async def _issue_token(self, params: object) -> dict[str, Detail]:
        issued = await issue_token(self._db, parse(IssueToken, params, {}), now=self._clock.wall())
        return {
            "token_id": issued.token.token_id,
            "expires_at": issued.token.expires_at,
            "policy": _policy(issued.workspace),
        }

    async def _set_workspace(self, params: object) -> dict[str, Detail]:
        return {"policy": _policy(await set_workspace(self._db, parse(SetWorkspace, params, {})))}

    async def _revoke_token(self, params: object) -> dict[str, Detail]:
        token = await revoke_token(self._db, parse(RevokeToken, params, {}), now=self._clock.wall())
        return {"token_id": token.token_id, "workspace": token.workspace, "revoked_at": token.revoked_at}

    async def _revoke_workspace(self, params: object) -> dict[str, Detail]:
        request = parse(RevokeWorkspace, params, {})
        workspace, stopped = await revoke_workspace(self._db, request, now=self._clock.wall(), stop=self._stop)
        return {"workspace": workspace.name, "revoked_at": workspace.revoked_at, "stopped": stopped}


def _issue(tx: sqlite3.Connection, request: IssueToken, now: float) -> Issued:
    name = WorkspaceName(request.workspace)
    asked = Limits(request.max_vms, request.max_memory_mib, request.max_storage_gib)
    workspace = workspaces.get(tx, name)
    if workspace is None:
        workspace = Workspace(name, allow_network=request.allow_network, limits=asked, created_at=now)
        workspaces.insert(tx, workspace)
    elif workspace.revoked_at is not None:
        raise FailedPrecondition("This workspace is revoked, for good; choose another name.")
    else:
        _refuse_other_policy(workspace, request, asked)
    token = Token(
        token_id=TokenId(f"tok-{secrets.token_hex(8)}"),
        workspace=name,
        digest=request.token_sha256,
        created_at=now,
        expires_at=now + request.ttl_seconds,
    )
    tokens.insert(tx, token)
    return Issued(token, workspace)


def _refuse_other_policy(present: Workspace, request: IssueToken, asked: Limits) -> None:
    same = not request.allow_network or present.allow_network
    for value, kept in (
        (asked.max_vms, present.limits.max_vms),
        (asked.max_memory_mib, present.limits.max_memory_mib),
        (asked.max_storage_gib, present.limits.max_storage_gib),
    ):
        same = same and value in (None, kept)
    if not same:
        raise Conflict(
            f"This workspace exists already with {_words(present)}; leave those options out to join it, or change "
            "it with set-workspace.",
            details={"policy": _policy(present)},
        )


def _set_policy(tx: sqlite3.Connection, request: SetWorkspace) -> Workspace:
    name = WorkspaceName(request.workspace)
    present = workspaces.get(tx, name)
    if present is None:
        raise _no_such_workspace()
    if present.revoked_at is not None:
        raise FailedPrecondition("This workspace is revoked, for good; there is nothing to change any more.")
    given: dict[LimitName, int | None] = {
        "max_vms": request.max_vms,
        "max_memory_mib": request.max_memory_mib,
        "max_storage_gib": request.max_storage_gib,
    }
    changes: dict[str, int | None] = {limit: value for limit, value in given.items() if value is not None}
    for limit in request.reset:
        if given[limit] is not None:
            raise InvalidArguments.field(limit, "can't be set and reset at once")
        changes[limit] = None
    if not changes and request.allow_network is None:
        raise InvalidArguments("Nothing to change was given; name a limit or the network permission.")
    allow = present.allow_network if request.allow_network is None else request.allow_network
    changed = workspaces.set_policy(
        tx,
        name,
        allow_network=allow,
        limits=replace(present.limits, **changes),
    )
    assert changed is not None
    return changed


def _no_such_workspace() -> NotFound:
    return NotFound("There is no workspace of this name; the first token issued for a name makes it.")


def _policy(workspace: Workspace) -> dict[str, Detail]:
    """None: the configuration's default applies."""
    return {
        "allow_network": workspace.allow_network,
        "max_vms": workspace.limits.max_vms,
        "max_memory_mib": workspace.limits.max_memory_mib,
        "max_storage_gib": workspace.limits.max_storage_gib,
    }


def _words(workspace: Workspace) -> str:
    named = [f"network {'allowed' if workspace.allow_network else 'not allowed'}"]
    for name, value in _policy(workspace).items():
        if name != "allow_network":
            named.append(f"{name} {'default' if value is None else value}")
    return ", ".join(named)
