"""What callers have fetched of the output of jobs, kept for when the guest that held it is gone.

Raw bytes at their true offsets, as the guest sent them; what was not fetched is a gap and never made up. Bounded
per job like the guest's own memory (the head of each stream and what came last; the middle goes first) and per
workspace (the oldest jobs go first). A job's output goes with its row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from microvm_mcp.model import JobId, OutputPage, StreamPage, WorkspaceName
from microvm_mcp.output import is_complete

MAX_JOB_BYTES = 256 * 1024
"""Both streams of one job together."""
HEAD_BYTES = 64 * 1024
MAX_WORKSPACE_BYTES = 64 * 1024 * 1024
MAX_PIECES = 128
"""Per job: odd cursors must not make thousands of tiny ones."""
_PIECE_BYTES = 16 * 1024

Piece = tuple[int, bytes]
"""Offset and bytes."""


@dataclass(frozen=True, slots=True)
class Fetched:
    stdout: StreamPage
    stderr: StreamPage
    complete: bool
    """All that was ever written is in the pages or in their gaps."""


def keep(tx: sqlite3.Connection, workspace: WorkspaceName, page: OutputPage) -> None:
    """Add what is new in that page. Nothing happens if the job has no row (any more)."""
    job_id = page.report.job_id
    if tx.execute("SELECT 1 FROM jobs WHERE job_id = ?", (job_id,)).fetchone() is None:
        return
    tx.execute(
        "INSERT INTO fetched (job_id, workspace, stdout_written, stderr_written, complete, bytes) "
        "VALUES (?, ?, ?, ?, ?, 0) ON CONFLICT (job_id) DO UPDATE SET "
        "stdout_written = max(stdout_written, excluded.stdout_written), "
        "stderr_written = max(stderr_written, excluded.stderr_written), "
        "complete = max(complete, excluded.complete)",
        (job_id, workspace, page.stdout.written, page.stderr.written, is_complete(page.report)),
    )
    if not (page.stdout.data or page.stderr.data):
        return
    _add(tx, job_id, "stdout", page.stdout)
    _add(tx, job_id, "stderr", page.stderr)
    tx.execute("UPDATE fetched SET bytes = ? WHERE job_id = ?", (_trim(tx, job_id), job_id))
    _make_room(tx, workspace, job_id)


def read(tx: sqlite3.Connection, job_id: JobId, *, stdout: int, stderr: int, limit: int) -> Fetched | None:
    """Pages as the guest would give them. None if nothing is kept of that job."""
    row = tx.execute(
        "SELECT stdout_written, stderr_written, complete FROM fetched WHERE job_id = ?", (job_id,)
    ).fetchone()
    if row is None:
        return None
    return Fetched(
        page_of(_pieces(tx, job_id, "stdout"), row["stdout_written"], stdout, limit),
        page_of(_pieces(tx, job_id, "stderr"), row["stderr_written"], stderr, limit),
        bool(row["complete"]),
    )


def page_of(pieces: Sequence[Piece], written: int, offset: int, limit: int) -> StreamPage:
    """One page of ordered pieces that do not overlap; what lies between and behind them is gaps.

    A page tells of one gap: the one that the cursor lay in, else the next one behind it, else the last. A cursor in
    a gap moves to its end; where another gap follows, the bytes come with the next page, which tells of that one.
    """
    gaps: list[tuple[int, int]] = []
    at = 0
    for start, data in pieces:
        if start > at:
            gaps.append((at, start))
        at = start + len(data)
    written = max(written, at)
    if written > at:
        gaps.append((at, written))
    jumped = next((gap for gap in gaps if gap[0] <= offset < gap[1]), None)
    begin = offset if jumped is None else jumped[1]
    behind = next((gap for gap in gaps if gap[0] >= begin), None)
    if jumped is not None and behind is not None:
        return StreamPage(begin, b"", written, jumped[0], jumped[1] - jumped[0])
    end = min(begin + limit, written if behind is None else behind[0])
    data = b"".join(
        data[max(begin - start, 0) : end - start]
        for start, data in pieces
        if start < end and start + len(data) > begin
    )
    told = behind or jumped or (gaps[-1] if gaps else (written, written))
    return StreamPage(begin, data, written, told[0], told[1] - told[0])


def _pieces(tx: sqlite3.Connection, job_id: JobId, stream: str) -> list[Piece]:
    rows = tx.execute(
        "SELECT start, data FROM fetched_pieces WHERE job_id = ? AND stream = ? ORDER BY start", (job_id, stream)
    )
    return [(row["start"], row["data"]) for row in rows]


def _add(tx: sqlite3.Connection, job_id: JobId, stream: str, page: StreamPage) -> None:
    if not page.data:
        return
    spans = [
        (int(row[0]), int(row[1]))
        for row in tx.execute(
            "SELECT start, start + length(data) FROM fetched_pieces WHERE job_id = ? AND stream = ? ORDER BY start",
            (job_id, stream),
        )
    ]
    for start, end in _uncovered(spans, page.offset, page.offset + len(page.data)):
        data = page.data[start - page.offset : end - page.offset]
        before = next((span for span in spans if span[1] == start and end - span[0] <= _PIECE_BYTES), None)
        if before is not None:
            # Somebody who follows a slow job fetches a few bytes at a time.
            key = (job_id, stream, before[0])
            (old,) = tx.execute(
                "SELECT data FROM fetched_pieces WHERE job_id = ? AND stream = ? AND start = ?", key
            ).fetchone()
            start, data = before[0], old + data
        tx.execute("INSERT OR REPLACE INTO fetched_pieces VALUES (?, ?, ?, ?)", (job_id, stream, start, data))


def _uncovered(spans: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    for begin, over in spans:
        if begin >= end:
            break
        if over <= start:
            continue
        if begin > start:
            yield start, begin
        start = max(start, over)
    if start < end:
        yield start, end


def _trim(tx: sqlite3.Connection, job_id: JobId) -> int:
    """Bytes that are kept afterwards."""
    sizes: dict[str, list[tuple[int, int]]] = {"stdout": [], "stderr": []}
    for row in tx.execute(
        "SELECT stream, start, length(data) FROM fetched_pieces WHERE job_id = ? ORDER BY start", (job_id,)
    ):
        sizes[row[0]].append((row[1], row[2]))
    while True:
        total = sum(size for pieces in sizes.values() for _, size in pieces)
        many = sum(len(pieces) for pieces in sizes.values()) > MAX_PIECES
        if not many and total <= MAX_JOB_BYTES:
            return total
        stream = max(sizes, key=lambda name: len(sizes[name]) if many else sum(size for _, size in sizes[name]))
        pieces = sizes[stream]
        victim = next((piece for piece in pieces if piece[0] >= HEAD_BYTES), pieces[-1])
        pieces.remove(victim)
        tx.execute(
            "DELETE FROM fetched_pieces WHERE job_id = ? AND stream = ? AND start = ?", (job_id, stream, victim[0])
        )


def _make_room(tx: sqlite3.Connection, workspace: WorkspaceName, but: JobId) -> None:
    total = int(tx.execute("SELECT sum(bytes) FROM fetched WHERE workspace = ?", (workspace,)).fetchone()[0])
    if total <= MAX_WORKSPACE_BYTES:
        return
    oldest = tx.execute(
        "SELECT job_id, bytes FROM fetched WHERE workspace = ? AND job_id <> ? ORDER BY seq", (workspace, but)
    ).fetchall()
    for row in oldest:
        if total <= MAX_WORKSPACE_BYTES:
            break
        tx.execute("DELETE FROM fetched WHERE job_id = ?", (row["job_id"],))
        total -= row["bytes"]
