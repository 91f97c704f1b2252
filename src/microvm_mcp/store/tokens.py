"""Rows of tokens, found by digest. Nothing is judged here: expiry and revocation are the caller's check."""

# ruff: noqa: S608 - only constants of the store are put into SQL text; values are always bound

from __future__ import annotations

import sqlite3

from microvm_mcp.model import Token, TokenId, Workspace, WorkspaceName
from microvm_mcp.store import workspaces

_COLUMNS = "token_id, workspace, digest, created_at, expires_at, revoked_at"


def insert(tx: sqlite3.Connection, token: Token) -> None:
    tx.execute(
        f"INSERT INTO tokens ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
        (
            token.token_id,
            token.workspace,
            token.digest,
            token.created_at,
            token.expires_at,
            token.revoked_at,
        ),
    )


def by_digest(tx: sqlite3.Connection, digest: str) -> tuple[Token, Workspace] | None:
    """The token and the workspace that it opens, both as of the same moment."""
    row = tx.execute(f"SELECT {_COLUMNS} FROM tokens WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        return None
    token = _from_row(row)
    workspace = workspaces.get(tx, token.workspace)
    return None if workspace is None else (token, workspace)


def of_workspace(tx: sqlite3.Connection, workspace: WorkspaceName) -> list[Token]:
    """Oldest first, revoked and expired ones included."""
    rows = tx.execute(
        f"SELECT {_COLUMNS} FROM tokens WHERE workspace = ? ORDER BY created_at, token_id", (workspace,)
    )
    return [_from_row(row) for row in rows]


def revoke(tx: sqlite3.Connection, token_id: TokenId, *, now: float) -> Token | None:
    """The time of the first revocation stays. None for an unknown id."""
    row = tx.execute(
        f"UPDATE tokens SET revoked_at = coalesce(revoked_at, ?) WHERE token_id = ? RETURNING {_COLUMNS}",
        (now, token_id),
    ).fetchone()
    return None if row is None else _from_row(row)


def delete(tx: sqlite3.Connection, token_id: TokenId) -> None:
    """Takes back a token that never reached its owner."""
    tx.execute("DELETE FROM tokens WHERE token_id = ?", (token_id,))


def _from_row(row: sqlite3.Row) -> Token:
    return Token(
        token_id=TokenId(row["token_id"]),
        workspace=WorkspaceName(row["workspace"]),
        digest=row["digest"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
