"""The file: who writes when, what survives, and what a second process sees."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from microvm_mcp.errors import FailedPrecondition, ResourceExhausted, Unavailable
from microvm_mcp.store import meta
from microvm_mcp.store.database import Database
from tests.unit.store.rows import names_in


def put(key: str, value: str) -> Callable[[sqlite3.Connection], None]:
    return lambda tx: meta.put(tx, key, value)


def get(key: str) -> Callable[[sqlite3.Connection], str | None]:
    return lambda tx: meta.get(tx, key)


def run_python(script: str, *argv: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, argv)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


async def test_a_write_is_there_after_closing_and_opening_again(tmp_path: Path) -> None:
    async with await Database.open(tmp_path / "service.db") as db:
        await db.write(put("colour", "blue"))
    async with await Database.open(tmp_path / "service.db") as db:
        assert await db.read(get("colour")) == "blue"


async def test_all_files_are_private_to_their_owner(db: Database, tmp_path: Path) -> None:
    await db.write(put("colour", "blue"))
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names_in(tmp_path)}
    assert modes == {"service.db": 0o600, "service.db-wal": 0o600, "service.db-shm": 0o600}


async def test_a_file_with_a_wider_mode_is_narrowed(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    await (await Database.open(path)).close()
    path.chmod(0o644)
    await (await Database.open(path)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_symlink_in_place_of_the_file_is_refused_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "service.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedPrecondition, match="not a regular file"):
        await Database.open(tmp_path / "service.db")
    assert not (tmp_path / "elsewhere").exists()


async def test_every_connection_is_durable_and_checks_references(db: Database) -> None:
    def pragmas(tx: sqlite3.Connection) -> tuple[int, int, str]:
        one = [
            tx.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "foreign_keys", "journal_mode")
        ]
        return int(one[0]), int(one[1]), str(one[2])

    full = 2
    assert await db.write(pragmas) == (full, 1, "wal")
    assert (await db.read(pragmas))[1:] == (1, "wal")


async def test_a_write_that_raises_leaves_no_trace_and_its_error_reaches_the_caller(db: Database) -> None:
    def half(tx: sqlite3.Connection) -> None:
        meta.put(tx, "colour", "red")
        raise LookupError("half way")

    with pytest.raises(LookupError, match="half way"):
        await db.write(half)
    assert await db.read(get("colour")) is None
    await db.write(put("colour", "blue"))
    assert await db.read(get("colour")) == "blue"


async def test_a_query_function_that_commits_by_itself_is_an_error(db: Database) -> None:
    with pytest.raises(RuntimeError, match="ended the transaction"):
        await db.write(lambda tx: tx.execute("COMMIT"))
    await db.write(put("colour", "blue"))


async def test_a_read_cannot_write(db: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        await db.read(put("colour", "red"))
    assert await db.read(get("colour")) is None


async def test_a_read_sees_one_moment_while_others_write(db: Database) -> None:
    await db.write(put("colour", "blue"))
    first_seen = threading.Event()
    written = threading.Event()

    def twice(tx: sqlite3.Connection) -> tuple[str | None, str | None]:
        before = meta.get(tx, "colour")
        first_seen.set()
        assert written.wait(10)
        return before, meta.get(tx, "colour")

    reading = asyncio.create_task(db.read(twice))
    assert await asyncio.to_thread(first_seen.wait, 10)
    await db.write(put("colour", "red"))
    written.set()
    assert await reading == ("blue", "blue")
    assert await db.read(get("colour")) == "red"


async def test_a_cancelled_caller_does_not_tear_the_transaction_that_runs(db: Database) -> None:
    begun = threading.Event()
    go_on = threading.Event()

    def slow(tx: sqlite3.Connection) -> None:
        meta.put(tx, "first", "1")
        begun.set()
        assert go_on.wait(10)
        meta.put(tx, "second", "2")

    running = asyncio.create_task(db.write(slow))
    assert await asyncio.to_thread(begun.wait, 10)
    queued = asyncio.create_task(db.write(put("queued", "3")))
    await asyncio.sleep(0)
    for task in (running, queued):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    go_on.set()
    await db.write(put("after", "4"))
    assert await db.read(lambda tx: [meta.get(tx, key) for key in ("first", "second", "queued", "after")]) == [
        "1",
        "2",
        None,
        "4",
    ]


async def test_closing_finishes_what_was_asked_before_and_may_be_repeated(tmp_path: Path) -> None:
    db = await Database.open(tmp_path / "service.db")
    writes = [asyncio.create_task(db.write(put(f"key-{number}", "x"))) for number in range(50)]
    await asyncio.sleep(0)
    await asyncio.gather(db.close(), db.close())
    await db.close()
    await asyncio.gather(*writes)
    with pytest.raises(Unavailable):
        await db.write(put("late", "x"))
    with pytest.raises(Unavailable):
        await db.read(get("late"))
    async with await Database.open(tmp_path / "service.db") as again:
        assert await again.read(lambda tx: tx.execute("SELECT count(*) FROM meta").fetchone()[0]) == 50


async def test_revision_changes_with_own_and_foreign_writes_and_not_otherwise(db: Database, tmp_path: Path) -> None:
    start = db.revision()
    await db.read(get("colour"))
    assert db.revision() == start
    await db.write(put("colour", "blue"))
    after_own = db.revision()
    assert after_own != start

    script = (
        "import sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1]); c.execute(\"UPDATE meta SET value = 'red'\"); c.commit(); c.close()"
    )
    process = run_python(script, tmp_path / "service.db")
    await asyncio.to_thread(process.communicate, timeout=20)
    assert process.returncode == 0
    assert db.revision() != after_own
    assert await db.read(get("colour")) == "red"
    assert db.revision() == db.revision()


COUNT_UP = """
import asyncio, sys
from pathlib import Path
from microvm_mcp.store import meta
from microvm_mcp.store.database import Database

def step(tx):
    meta.put(tx, "count", str(int(meta.get(tx, "count") or 0) + 1))

async def main():
    async with await Database.open(Path(sys.argv[1])) as db:
        for _ in range(int(sys.argv[2])):
            await db.write(step)

asyncio.run(main())
"""


async def test_two_processes_that_make_the_file_and_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    processes = [run_python(COUNT_UP, path, 200) for _ in range(3)]
    for process in processes:
        await asyncio.to_thread(process.communicate, timeout=50)
        assert process.returncode == 0
    async with await Database.open(path) as db:
        assert await db.read(get("count")) == "600"


async def test_a_foreign_writer_that_holds_the_file_makes_a_write_unavailable_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    async with await Database.open(path, busy_timeout_s=0.2) as db:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        try:
            with pytest.raises(Unavailable):
                await db.write(put("colour", "blue"))
            assert await db.read(get("colour")) is None
        finally:
            holder.close()
        await db.write(put("colour", "blue"))
        assert await db.read(get("colour")) == "blue"


async def test_a_full_file_system_is_told_apart_and_the_next_write_works(db: Database) -> None:
    def limit(tx: sqlite3.Connection) -> int:
        pages = int(tx.execute("PRAGMA page_count").fetchone()[0])
        return int(tx.execute(f"PRAGMA max_page_count = {pages + 2}").fetchone()[0])

    await db.write(limit)
    with pytest.raises(ResourceExhausted, match="full"):
        await db.write(put("big", "x" * 100_000))
    await db.write(put("small", "x"))
    assert await db.read(get("big")) is None


WRITE_PAIRS = """
import asyncio, sys
from pathlib import Path
from microvm_mcp.store import meta
from microvm_mcp.store.database import Database

def step(number):
    def pair(tx):
        meta.put(tx, "left", str(number))
        tx.executemany("INSERT INTO meta VALUES (?, ?)", [(f"{number}-{i}", "x" * 500) for i in range(20)])
        meta.put(tx, "right", str(number))
    return pair

async def main():
    async with await Database.open(Path(sys.argv[1])) as db:
        number = int(sys.argv[2])
        while True:
            number += 1
            await db.write(step(number))
            print(number, flush=True)

asyncio.run(main())
"""


async def test_a_writer_killed_at_any_moment_leaves_whole_transactions_and_all_that_were_confirmed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "service.db"
    confirmed = 0
    for round_number in range(3):
        process = run_python(WRITE_PAIRS, path, confirmed)
        assert process.stdout is not None
        for _ in range(5 + 7 * round_number):
            line = await asyncio.to_thread(process.stdout.readline)
            confirmed = int(line)
        os.kill(process.pid, signal.SIGKILL)
        for line in await asyncio.to_thread(process.stdout.readlines):
            confirmed = int(line)
        process.communicate()
        async with await Database.open(path) as db:
            left, right = await db.read(lambda tx: (meta.get(tx, "left"), meta.get(tx, "right")))
            assert left == right
            assert left is not None
            assert int(left) >= confirmed
            assert await db.read(lambda tx: tx.execute("PRAGMA integrity_check").fetchone()[0]) == "ok"
            confirmed = int(left)


async def test_a_lazy_write_is_seen_by_the_next_read_and_later_writes_are_durable_again(db: Database) -> None:
    await db.write_lazily(lambda tx: meta.put(tx, "a", "1"))
    assert await db.read(lambda tx: meta.get(tx, "a")) == "1"
    mode = await db.write(lambda tx: tx.execute("PRAGMA synchronous").fetchone()[0])
    lazy = await db.write_lazily(lambda tx: tx.execute("PRAGMA synchronous").fetchone()[0])
    assert (mode, lazy) == (2, 1)
