"""Rows of jobs: what is known of a command, also when its machine is gone. Output is never in here."""

# ruff: noqa: S608 - only constants of the store are put into SQL text; values are always bound

from __future__ import annotations

import sqlite3

from microvm_mcp.model import Job, JobId, JobState, RequestId, VmId, WorkspaceName

_COLUMN_NAMES = (
    "job_id",
    "vm_id",
    "workspace",
    "request_id",
    "state",
    "started_at",
    "finished_at",
    "exit_code",
    "signal",
    "truncated",
    "detached",
    "timeout_seconds",
    "log_path",
)
_COLUMNS = ", ".join(_COLUMN_NAMES)
_KEYS = frozenset({"job_id", "vm_id", "workspace"})


def insert(tx: sqlite3.Connection, job: Job) -> None:
    marks = ", ".join(f":{column}" for column in _COLUMN_NAMES)
    tx.execute(f"INSERT INTO jobs ({_COLUMNS}) VALUES ({marks})", _values(job))


def get_owned(tx: sqlite3.Connection, workspace: WorkspaceName, vm_id: VmId, job_id: JobId) -> Job | None:
    row = tx.execute(
        f"SELECT {_COLUMNS} FROM jobs WHERE workspace = ? AND vm_id = ? AND job_id = ?", (workspace, vm_id, job_id)
    ).fetchone()
    return None if row is None else _from_row(row)


def of_vm(tx: sqlite3.Connection, vm_id: VmId) -> list[Job]:
    """In the order in which they were recorded."""
    return [
        _from_row(row) for row in tx.execute(f"SELECT {_COLUMNS} FROM jobs WHERE vm_id = ? ORDER BY seq", (vm_id,))
    ]


def count(tx: sqlite3.Connection, vm_id: VmId) -> int:
    return int(tx.execute("SELECT count(*) FROM jobs WHERE vm_id = ?", (vm_id,)).fetchone()[0])


def update(tx: sqlite3.Connection, job: Job) -> bool:
    """Everything but the keys; False if the row is gone (displaced meanwhile)."""
    sets = ", ".join(f"{column} = :{column}" for column in _COLUMN_NAMES if column not in _KEYS)
    keys = " AND ".join(f"{column} = :{column}" for column in sorted(_KEYS))
    return tx.execute(f"UPDATE jobs SET {sets} WHERE {keys}", _values(job)).rowcount == 1


def delete(tx: sqlite3.Connection, job_id: JobId) -> None:
    tx.execute("DELETE FROM jobs WHERE job_id = ?", (job_id,))


def mark_lost(tx: sqlite3.Connection, vm_id: VmId, now: float) -> list[Job]:
    """What ran when memory was lost is lost; returns those jobs as they are now.

    Detached processes of finished jobs went with the memory as well.
    """
    tx.execute("UPDATE jobs SET detached = 0 WHERE vm_id = ? AND detached <> 0", (vm_id,))
    rows = tx.execute(
        "UPDATE jobs SET state = 'lost', finished_at = ? WHERE vm_id = ? AND state = 'running' "
        f"RETURNING {_COLUMNS}",
        (now, vm_id),
    ).fetchall()
    return [_from_row(row) for row in rows]


def _values(job: Job) -> dict[str, str | int | float | None]:
    return {column: getattr(job, column) for column in _COLUMN_NAMES}


def _from_row(row: sqlite3.Row) -> Job:
    return Job(
        job_id=JobId(row["job_id"]),
        vm_id=VmId(row["vm_id"]),
        workspace=WorkspaceName(row["workspace"]),
        request_id=RequestId(row["request_id"]),
        state=JobState(row["state"]),
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        exit_code=row["exit_code"],
        signal=row["signal"],
        truncated=bool(row["truncated"]),
        detached=row["detached"],
        timeout_seconds=row["timeout_seconds"],
        log_path=row["log_path"],
    )
