"""The schema: forward only, a copy first, and nothing foreign or newer is touched."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

from microvm_mcp.errors import FailedPrecondition
from microvm_mcp.store import meta
from microvm_mcp.store.database import Database
from microvm_mcp.store.migrate import Migration, shipped_migrations, split_statements
from tests.unit.store.rows import names_in

FIRST = shipped_migrations()
SECOND = Migration(
    len(FIRST) + 1,
    f"{len(FIRST) + 1:04d}_more.sql",
    "-- A comment; with a semicolon.\nCREATE TABLE more (x TEXT);\nUPDATE meta SET value = 'moved';\n",
)
BROKEN = Migration(
    len(FIRST) + 1,
    f"{len(FIRST) + 1:04d}_broken.sql",
    "CREATE TABLE more (x TEXT);\nINSERT INTO nowhere VALUES (1);\n",
)


def copy_of(path: Path, migration: Migration) -> Path:
    return path.with_name(f"{path.name}.before-{migration.number:04d}")


async def make_database(path: Path) -> None:
    async with await Database.open(path) as db:
        await db.write(lambda tx: meta.put(tx, "colour", "blue"))


def colour_in(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("SELECT value FROM meta WHERE key = 'colour'").fetchone()[0])
    finally:
        connection.close()


async def test_a_new_database_gets_the_schema_and_no_copy(tmp_path: Path) -> None:
    await make_database(tmp_path / "service.db")
    assert names_in(tmp_path) == ["service.db"]


async def test_an_existing_database_is_copied_before_a_migration_touches_it(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    await make_database(path)
    async with await Database.open(path, migrations=(*FIRST, SECOND)) as db:
        assert await db.read(lambda tx: meta.get(tx, "colour")) == "moved"
    kept = copy_of(path, SECOND)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert colour_in(kept) == "blue"
    assert not [name for name in names_in(tmp_path) if name.endswith(".partial")]


async def test_the_copy_holds_what_was_only_in_the_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    async with await Database.open(path) as old:
        await old.write(lambda tx: meta.put(tx, "colour", "green"))
        assert path.with_name("service.db-wal").stat().st_size > 0
        async with await Database.open(path, migrations=(*FIRST, SECOND)):
            pass
    assert colour_in(copy_of(path, SECOND)) == "green"


async def test_the_copy_opens_as_a_database_of_the_old_schema(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    await make_database(path)
    await (await Database.open(path, migrations=(*FIRST, SECOND))).close()
    async with await Database.open(copy_of(path, SECOND)) as old:
        assert await old.read(lambda tx: meta.get(tx, "colour")) == "blue"


async def test_a_migration_that_fails_leaves_the_old_schema_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    await make_database(path)
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        await Database.open(path, migrations=(*FIRST, BROKEN))
    async with await Database.open(path, migrations=(*FIRST, SECOND)) as db:
        assert await db.read(lambda tx: meta.get(tx, "colour")) == "moved"


async def test_a_migration_runs_once(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    await make_database(path)
    await (await Database.open(path, migrations=(*FIRST, SECOND))).close()
    copy_of(path, SECOND).unlink()
    async with await Database.open(path, migrations=(*FIRST, SECOND)) as db:
        assert await db.read(lambda tx: tx.execute("SELECT count(*) FROM schema_migrations").fetchone()[0]) == len(
            (*FIRST, SECOND)
        )
    assert not copy_of(path, SECOND).exists()


async def test_a_database_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    await make_database(path)
    await (await Database.open(path, migrations=(*FIRST, SECOND))).close()
    before = path.read_bytes()
    with pytest.raises(FailedPrecondition, match=f"schema {SECOND.number} .* start a newer version"):
        await Database.open(path)
    assert path.read_bytes() == before


async def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(FailedPrecondition, match="another program"):
        await Database.open(path)
    connection = sqlite3.connect(path)
    assert [row[0] for row in connection.execute("SELECT name FROM sqlite_schema")] == ["theirs"]
    connection.close()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    path.write_bytes(b"not a database at all\n" * 100)
    with pytest.raises(FailedPrecondition, match="damaged"):
        await Database.open(path)
    assert path.read_bytes() == b"not a database at all\n" * 100


def test_statements_are_split_where_they_end() -> None:
    sql = "-- intro; here\nCREATE TABLE a (x TEXT DEFAULT ';');\n\nCREATE TRIGGER t AFTER INSERT ON a BEGIN\n"
    sql += "DELETE FROM a;\nEND;\n"
    assert [statement.split()[1] for statement in split_statements(sql)] == ["TABLE", "TRIGGER"]
    with pytest.raises(RuntimeError):
        split_statements("CREATE TABLE a (x TEXT)")
