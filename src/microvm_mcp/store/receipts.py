"""Rows of receipts: one per request id and workspace, in phases. They make a repeated call harmless.

What a phase means for a caller is the service's business. A phase changes only from the one that was expected.
"""

# ruff: noqa: S608 - only constants of the store are put into SQL text; values are always bound

from __future__ import annotations

import sqlite3

from microvm_mcp.model import JobId, Receipt, ReceiptPhase, RequestId, VmId, WorkspaceName

_COLUMNS = "workspace, request_id, tool, arguments_digest, phase, created_at, finished_at, vm_id, job_id"


class StaleReceipt(Exception):
    """The receipt is not in the expected phase; `actual` is None if there is none."""

    def __init__(self, expected: ReceiptPhase, actual: ReceiptPhase | None) -> None:
        super().__init__(f"the receipt is {actual or 'unknown'}, expected {expected}")
        self.expected = expected
        self.actual = actual


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


def set_phase(
    tx: sqlite3.Connection,
    workspace: WorkspaceName,
    request_id: RequestId,
    *,
    expect: ReceiptPhase,
    to: ReceiptPhase,
    now: float,
    vm_id: VmId | None = None,
    job_id: JobId | None = None,
) -> Receipt:
    """Compare and set. Forward, ids that are not given stay; back to accepted they go. Raises StaleReceipt."""
    present = get(tx, workspace, request_id)
    if present is None or present.phase is not expect:
        raise StaleReceipt(expect, None if present is None else present.phase)
    forward = to is not ReceiptPhase.ACCEPTED
    row = tx.execute(
        "UPDATE receipts SET phase = ?, finished_at = ?, vm_id = ?, job_id = ? "
        f"WHERE workspace = ? AND request_id = ? RETURNING {_COLUMNS}",
        (
            to,
            now if to is ReceiptPhase.DONE else None,
            vm_id or (present.vm_id if forward else None),
            job_id or (present.job_id if forward else None),
            workspace,
            request_id,
        ),
    ).fetchone()
    return _from_row(row)


def delete(tx: sqlite3.Connection, workspace: WorkspaceName, request_id: RequestId) -> None:
    tx.execute("DELETE FROM receipts WHERE workspace = ? AND request_id = ?", (workspace, request_id))


def make_room(
    tx: sqlite3.Connection, workspace: WorkspaceName, *, now: float, keep_s: int = 86_400, max_rows: int = 4096
) -> bool:
    """True if one more receipt fits, after the oldest ones past `keep_s` went as far as needed.

    Accepted ones go as well: no call lasts that long, so theirs was refused or cut off before anything was sent.
    Sent ones stay for good: they say that an outcome is unknown.
    """
    present = int(tx.execute("SELECT count(*) FROM receipts WHERE workspace = ?", (workspace,)).fetchone()[0])
    surplus = present - max_rows + 1
    if surplus <= 0:
        return True
    done = tx.execute(
        "DELETE FROM receipts WHERE workspace = ? AND request_id IN (SELECT request_id FROM receipts "
        "WHERE workspace = ? AND phase <> 'sent' AND coalesce(finished_at, created_at) < ? "
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
