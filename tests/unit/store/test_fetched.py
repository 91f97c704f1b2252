"""Fetched output in rows: any order, overlaps and gaps; bounded; never a byte that was not fetched."""

from __future__ import annotations

import sqlite3
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm_mcp.model import JobId, JobReport, JobState, OutputPage, RequestId, StreamPage
from microvm_mcp.store import fetched
from microvm_mcp.store.migrate import shipped_migrations, split_statements
from tests.unit.store.rows import DEMO, add_job, add_vm, add_workspaces

_number = count(1)


def memory() -> sqlite3.Connection:
    tx = sqlite3.connect(":memory:", isolation_level=None)
    tx.row_factory = sqlite3.Row
    tx.execute("PRAGMA foreign_keys = ON")
    for migration in shipped_migrations():
        for statement in split_statements(migration.sql):
            tx.execute(statement)
    add_workspaces(tx)
    return tx


@pytest.fixture(scope="module")
def tx() -> sqlite3.Connection:
    return memory()


def new_job(tx: sqlite3.Connection) -> JobId:
    number = next(_number)
    return add_job(tx, number, add_vm(tx, number)).job_id


def a_page(
    job_id: JobId, offset: int, data: bytes, written: int, *, err: bytes = b"", over: bool = False
) -> OutputPage:
    state = JobState.COMPLETED if over else JobState.RUNNING
    report = JobReport(
        job_id, RequestId("r"), state, 1.0, None, None, None, truncated=False, detached=0, log_path=""
    )
    return OutputPage(report, StreamPage(offset, data, written, 0, 0), StreamPage(0, err, len(err), 0, 0))


def byte(at: int) -> int:
    return at * 7 % 251


def read_all(tx: sqlite3.Connection, job_id: JobId, limit: int) -> tuple[dict[int, int], int]:
    """Every byte by offset, the way a client follows its cursor; and what was written."""
    seen: dict[int, int] = {}
    at = written = 0
    while True:
        found = fetched.read(tx, job_id, stdout=at, stderr=0, limit=limit)
        if found is None:
            return seen, written
        page = found.stdout
        written = page.written
        seen.update(enumerate(page.data, page.offset))
        end = page.offset + len(page.data)
        if end == at:
            return seen, written
        assert end > at
        jumped = page.offset - at
        assert jumped == 0 or page.gap_from <= at < page.offset == page.gap_from + page.gap_bytes
        at = end


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=12), st.integers(1, 64))
def test_exactly_the_fetched_bytes_come_back_at_their_offsets(
    tx: sqlite3.Connection, spans: list[tuple[int, int]], limit: int
) -> None:
    job_id = new_job(tx)
    expected: dict[int, int] = {}
    written = 0
    for start, size in spans:
        data = bytes(byte(at) for at in range(start, start + size))
        expected.update(enumerate(data, start))
        written = max(written, start + size + 3)
        fetched.keep(tx, DEMO, a_page(job_id, start, data, written))
    assert read_all(tx, job_id, limit) == (expected, written if spans else 0)


def test_one_gap_is_told_of_on_every_page_and_adds_up(tx: sqlite3.Connection) -> None:
    job_id = new_job(tx)
    fetched.keep(tx, DEMO, a_page(job_id, 0, b"head", 20))
    fetched.keep(tx, DEMO, a_page(job_id, 16, b"tail", 20, over=True))
    for at, offset, data in ((0, 0, b"head"), (4, 16, b"tail"), (9, 16, b"tail"), (18, 18, b"il"), (20, 20, b"")):
        found = fetched.read(tx, job_id, stdout=at, stderr=0, limit=99)
        assert found is not None
        assert found.stdout == StreamPage(offset, data, 20, 4, 12)
        assert found.complete


def test_a_follower_of_a_flood_leaves_the_head_and_the_newest_within_the_bound(tx: sqlite3.Connection) -> None:
    job_id, size = new_job(tx), 16 * 1024
    for at in range(0, 1024 * 1024, size):
        fetched.keep(tx, DEMO, a_page(job_id, at, bytes([at // size]) * size, at + size, err=b"oops"))
    seen, _ = read_all(tx, job_id, size)
    assert fetched.MAX_JOB_BYTES - size <= len(seen) + 4 <= fetched.MAX_JOB_BYTES
    assert all(at in seen for at in range(fetched.HEAD_BYTES))
    assert all(at in seen for at in range(1024 * 1024 - fetched.HEAD_BYTES, 1024 * 1024))
    assert all(value == at // size for at, value in seen.items())
    found = fetched.read(tx, job_id, stdout=0, stderr=0, limit=99)
    assert found is not None
    assert found.stderr.data == b"oops"


def test_odd_cursors_make_no_more_than_so_many_pieces(tx: sqlite3.Connection) -> None:
    job_id = new_job(tx)
    for at in range(0, 600, 2):
        fetched.keep(tx, DEMO, a_page(job_id, at, b"x", 600))
    (pieces,) = tx.execute("SELECT count(*) FROM fetched_pieces WHERE job_id = ?", (job_id,)).fetchone()
    assert pieces == fetched.MAX_PIECES


def test_small_pages_of_a_slow_job_become_one_piece(tx: sqlite3.Connection) -> None:
    job_id = new_job(tx)
    for at in range(300):
        fetched.keep(tx, DEMO, a_page(job_id, at, b"x", at + 1))
    (pieces,) = tx.execute("SELECT count(*) FROM fetched_pieces WHERE job_id = ?", (job_id,)).fetchone()
    assert pieces == 1


def test_the_oldest_jobs_of_a_workspace_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "MAX_WORKSPACE_BYTES", 10)
    tx = memory()
    jobs = [new_job(tx) for _ in range(3)]
    for job_id in jobs:
        fetched.keep(tx, DEMO, a_page(job_id, 0, b"four", 4))
    assert [fetched.read(tx, job_id, stdout=0, stderr=0, limit=9) is not None for job_id in jobs] == [
        False,
        True,
        True,
    ]


def test_a_job_without_a_row_keeps_nothing(tx: sqlite3.Connection) -> None:
    fetched.keep(tx, DEMO, a_page(JobId("job-gone"), 0, b"x", 1))
    assert fetched.read(tx, JobId("job-gone"), stdout=0, stderr=0, limit=9) is None
