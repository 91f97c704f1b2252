"""Brings a database to the present schema, or refuses it.

Migrations are numbered SQL files beside this module, append-only. Each runs in one transaction together with its
record; before the first of them touches an existing database, a copy is kept beside it. A second process that
opens the same file meanwhile waits and then finds nothing left to do. A database that newer code wrote, or that
is somebody else's, is never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from microvm_mcp.errors import FailedPrecondition

APPLICATION_ID = 0x6D766D31
"""`mvm1` in the SQLite header: tells our file from any other."""

_FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_RECORDS = """CREATE TABLE schema_migrations (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at REAL NOT NULL
) STRICT"""


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    sql: str


def shipped_migrations() -> tuple[Migration, ...]:
    """The files of the package, in order, without gaps."""
    found: list[Migration] = []
    for entry in resources.files("microvm_mcp.store").joinpath("migrations").iterdir():
        match = _FILE_NAME.fullmatch(entry.name)
        if match:
            found.append(Migration(int(match[1]), entry.name, entry.read_text(encoding="utf-8")))
    found.sort(key=lambda migration: migration.number)
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise RuntimeError("the migrations of this installation are incomplete")
    return tuple(found)


def migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    """Apply what is missing. Raises FailedPrecondition for a database that is newer or not ours."""
    worth_keeping: bool | None = None
    for migration in migrations:
        connection.execute("BEGIN IMMEDIATE")
        try:
            present = _present_version(connection, known=len(migrations))
            if worth_keeping is None:
                worth_keeping = present > 0
            if migration.number > present:
                if worth_keeping:
                    _keep_copy(path, path.with_name(f"{path.name}.before-{migration.number:04d}"))
                    worth_keeping = False
                _apply(connection, migration, first=present == 0)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _present_version(connection: sqlite3.Connection, *, known: int) -> int:
    """0 for an empty file."""
    application_id = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
    if application_id != APPLICATION_ID:
        if application_id == 0 and tables == 0:
            return 0
        raise FailedPrecondition(
            "The database in the state directory belongs to another program; name another state directory."
        )
    version = int(connection.execute("SELECT max(number) FROM schema_migrations").fetchone()[0])
    if version > known:
        raise FailedPrecondition(
            f"The database has schema {version} and this microvm-mcp knows {known}; start a newer version "
            "or put back the copy that was kept beside the database before the update."
        )
    return version


def _apply(connection: sqlite3.Connection, migration: Migration, *, first: bool) -> None:
    if first:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(_RECORDS)
    for statement in split_statements(migration.sql):
        connection.execute(statement)
    connection.execute(
        "INSERT INTO schema_migrations (number, name, applied_at) VALUES (?, ?, ?)",
        (migration.number, migration.name, time.time()),
    )


def split_statements(sql: str) -> list[str]:
    """`executescript` would commit the transaction that it is called in, so statements go one by one."""
    statements: list[str] = []
    pending = ""
    for line in sql.splitlines(keepends=True):
        if not pending and (not line.strip() or line.lstrip().startswith("--")):
            continue
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending.strip())
            pending = ""
    if pending.strip():
        raise RuntimeError("a migration ends in the middle of a statement")
    return statements


def _keep_copy(path: Path, kept: Path) -> None:
    """A consistent copy, WAL included, published by rename. The caller's open write transaction is not in it."""
    partial = kept.with_name(f"{kept.name}.partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as source,
        contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as target,
    ):
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")
    _fsync(partial)
    partial.replace(kept)
    _fsync(kept.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
