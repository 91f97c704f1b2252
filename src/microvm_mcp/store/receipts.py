"""Rows of receipts: one per request id and workspace, in phases. They make a repeated call harmless.

A row is made in the transaction in which its request takes effect, never before: what has no row was not sent. A
row that exists is never taken over by another request. What a phase means for a caller is the service's business.
"""

# ruff: noqa: S608 - only constants of the store are put into SQL text; values are always bound

from __future__ import annotations

import sqlite3

from microvm_mcp.errors import ResourceExhausted
from microvm_mcp.model import JobId, Receipt, ReceiptClaim, ReceiptPhase, RequestId, VmId, WorkspaceName

_COLUMNS = "workspace, request_id, tool, arguments_digest, phase, created_at, finished_at, vm_id, job_id"


class ReceiptTaken(Exception):
    """The request id has a receipt already, whatever its phase."""


def get(tx: sqlite3.Connection, workspace: WorkspaceName, request_id: RequestId) -> Receipt | None:
    row = tx.execute(
        f"SELECT {_COLUMNS} FROM receipts WHERE workspace = ? AND request_id = ?", (workspace, request_id)
    ).fetchone()
    return None if row is None else _from_row(row)


def insert(tx: sqlite3.Connection, receipt: Receipt) -> None:
    tx.execute(
        f"INSERT INTO receipts ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            receipt.workspace,
            receipt.request_id,
            receipt.tool,
            receipt.arguments_digest,
            receipt.phase,
            receipt.created_at,
            receipt.finished_at,
            receipt.vm_id,
            receipt.job_id,
        ),
    )


def claim(
    tx: sqlite3.Connection,
    workspace: WorkspaceName,
    request_id: RequestId,
    asked: ReceiptClaim,
    phase: ReceiptPhase,
    *,
    now: float,
    vm_id: VmId,
    job_id: JobId | None = None,
) -> Receipt:
    """The receipt of a request that takes effect in this transaction.

    ReceiptTaken if there is one, ResourceExhausted if none may go to make room for it.
    """
    if get(tx, workspace, request_id) is not None:
        raise ReceiptTaken
    if not make_room(tx, workspace, now=now, keep_s=asked.keep_s, max_rows=asked.max_rows):
        hours = asked.keep_s // 3600
        raise ResourceExhausted(
            f"This workspace has {asked.max_rows} request ids that must be kept for {hours} hours; try again when "
            "the oldest are older.",
            details={"limit": "request_ids", "allowed": asked.max_rows, "kept_hours": hours},
        )
    receipt = Receipt(
        workspace=workspace,
        request_id=request_id,
        tool=asked.tool,
        arguments_digest=asked.arguments_digest,
        phase=phase,
        created_at=now,
        finished_at=now if phase is ReceiptPhase.DONE else None,
        vm_id=vm_id,
        job_id=job_id,
    )
    insert(tx, receipt)
    return receipt


def finish(
    tx: sqlite3.Connection, workspace: WorkspaceName, request_id: RequestId, job_id: JobId, *, now: float
) -> Receipt | None:
    """The guest has that job: its receipt, if it was left sent, is done. Returns the receipt as it is then."""
    tx.execute(
        "UPDATE receipts SET phase = 'done', finished_at = ? "
        "WHERE workspace = ? AND request_id = ? AND phase = 'sent' AND job_id = ?",
        (now, workspace, request_id, job_id),
    )
    return get(tx, workspace, request_id)


def take_back(tx: sqlite3.Connection, workspace: WorkspaceName, request_id: RequestId, job_id: JobId) -> None:
    """That job was certainly not started: the id is free again."""
    tx.execute(
        "DELETE FROM receipts WHERE workspace = ? AND request_id = ? AND phase = 'sent' AND job_id = ?",
        (workspace, request_id, job_id),
    )


def make_room(
    tx: sqlite3.Connection, workspace: WorkspaceName, *, now: float, keep_s: int = 86_400, max_rows: int = 4096
) -> bool:
    """True if one more receipt fits, after the oldest ones past `keep_s` went as far as needed.

    Sent ones stay for good: they say that an outcome is unknown.
    """
    present = int(tx.execute("SELECT count(*) FROM receipts WHERE workspace = ?", (workspace,)).fetchone()[0])
    surplus = present - max_rows + 1
    if surplus <= 0:
        return True
    done = tx.execute(
        "DELETE FROM receipts WHERE workspace = ? AND request_id IN (SELECT request_id FROM receipts "
        "WHERE workspace = ? AND phase = 'done' AND finished_at < ? "
        "ORDER BY created_at, request_id LIMIT ?)",
        (workspace, workspace, now - keep_s, surplus),
    )
    return done.rowcount == surplus


def _from_row(row: sqlite3.Row) -> Receipt:
    return Receipt(
        workspace=WorkspaceName(row["workspace"]),
        request_id=RequestId(row["request_id"]),
        tool=row["tool"],
        arguments_digest=row["arguments_digest"],
        phase=ReceiptPhase(row["phase"]),
        created_at=row["created_at"],
        finished_at=row["finished_at"],
        vm_id=row["vm_id"],
        job_id=row["job_id"],
    )
