"""Rows of workspaces: policy and revocation. They are never deleted, so a revoked name stays revoked."""

# ruff: noqa: S608 - only constants of the store are put into SQL text; values are always bound

from __future__ import annotations

import sqlite3

from microvm_mcp.model import Limits, Workspace, WorkspaceName

COLUMNS = "name, allow_network, max_vms, max_memory_mib, max_storage_gib, created_at, revoked_at"


def get(tx: sqlite3.Connection, name: WorkspaceName) -> Workspace | None:
    row = tx.execute(f"SELECT {COLUMNS} FROM workspaces WHERE name = ?", (name,)).fetchone()
    return None if row is None else from_row(row)


def list_all(tx: sqlite3.Connection) -> list[Workspace]:
    return [from_row(row) for row in tx.execute(f"SELECT {COLUMNS} FROM workspaces ORDER BY name")]


def insert(tx: sqlite3.Connection, workspace: Workspace) -> None:
    tx.execute(
        f"INSERT INTO workspaces ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            workspace.name,
            workspace.allow_network,
            workspace.limits.max_vms,
            workspace.limits.max_memory_mib,
            workspace.limits.max_storage_gib,
            workspace.created_at,
            workspace.revoked_at,
        ),
    )


def set_policy(
    tx: sqlite3.Connection, name: WorkspaceName, *, allow_network: bool, limits: Limits
) -> Workspace | None:
    """The whole policy at once; None for an unknown name."""
    row = tx.execute(
        "UPDATE workspaces SET allow_network = ?, max_vms = ?, max_memory_mib = ?, max_storage_gib = ? "
        f"WHERE name = ? RETURNING {COLUMNS}",
        (allow_network, limits.max_vms, limits.max_memory_mib, limits.max_storage_gib, name),
    ).fetchone()
    return None if row is None else from_row(row)


def revoke(tx: sqlite3.Connection, name: WorkspaceName, *, now: float) -> Workspace | None:
    """For good; the time of the first revocation stays. None for an unknown name."""
    row = tx.execute(
        f"UPDATE workspaces SET revoked_at = coalesce(revoked_at, ?) WHERE name = ? RETURNING {COLUMNS}",
        (now, name),
    ).fetchone()
    return None if row is None else from_row(row)


def from_row(row: sqlite3.Row) -> Workspace:
    return Workspace(
        name=WorkspaceName(row["name"]),
        allow_network=bool(row["allow_network"]),
        limits=Limits(
            max_vms=row["max_vms"], max_memory_mib=row["max_memory_mib"], max_storage_gib=row["max_storage_gib"]
        ),
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )
