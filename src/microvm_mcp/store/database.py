"""One SQLite file: who may write when, and what is durable.

One writer thread with one connection; each function given to `write` runs inside BEGIN IMMEDIATE ... COMMIT and is
on disk (WAL, synchronous=FULL) when `write` returns, or has left no trace when it raises. Functions given to `read`
run in a small pool, each on one consistent snapshot. Other processes may use the same file at the same time.

A caller that is cancelled tears nothing: a transaction that has begun ends by itself, one that still waits in the
queue never begins. Query functions must not begin, commit or roll back.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from microvm_mcp.errors import FailedPrecondition, ResourceExhausted, Unavailable
from microvm_mcp.store.migrate import Migration, migrate, shipped_migrations

T = TypeVar("T")


class Database:
    def __init__(self, path: Path, *, readers: int, busy_timeout_s: float) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="store-read")
        self._reader_of_thread = threading.local()
        self._reader_connections: list[sqlite3.Connection] = []
        self._write_connection: sqlite3.Connection | None = None
        self._revision_connection: sqlite3.Connection | None = None
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        readers: int = 2,
        busy_timeout_s: float = 10.0,
        migrations: Sequence[Migration] | None = None,
    ) -> Database:
        """Open or make the file, bring it to the present schema. The directory must exist."""
        database = cls(path, readers=readers, busy_timeout_s=busy_timeout_s)
        try:
            await asyncio.get_running_loop().run_in_executor(
                database._writer, database._start, shipped_migrations() if migrations is None else migrations
            )
        except BaseException:
            await database.close()
            raise
        return database

    @property
    def path(self) -> Path:
        return self._path

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` in a transaction of its own. Unavailable if another process holds the file too long."""
        self._refuse_if_closed()
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._transaction, fn)

    async def write_lazily(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """As `write`, but on disk only with a later one: survives the process, not a loss of power."""
        self._refuse_if_closed()
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._lazy_transaction, fn)

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` on a snapshot that holds all writes which returned before; it cannot write."""
        self._refuse_if_closed()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._snapshot, fn)

    def revision(self) -> int:
        """Differs from the last answer if anybody, in this process or another, committed since. Microseconds.

        To be called from the thread of the event loop only.
        """
        self._refuse_if_closed()
        assert self._revision_connection is not None
        return int(self._revision_connection.execute("PRAGMA data_version").fetchone()[0])

    async def close(self) -> None:
        """Finish what was asked before, then let go of the file. Any number of times."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(asyncio.to_thread(self._stop))
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Database:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _refuse_if_closed(self) -> None:
        if self._closing is not None:
            raise Unavailable("The service is stopping; ask again when it runs.")

    def _start(self, migrations: Sequence[Migration]) -> None:
        _ensure_private_file(self._path)
        try:
            connection = self._write_connection = self._connect()
            self._switch_to_wal(connection)
            migrate(connection, self._path, migrations)
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise
            raise FailedPrecondition(
                "The database in the state directory is damaged; put back a copy of it from before."
            ) from error
        revision = self._revision_connection = self._connect()
        revision.execute("PRAGMA query_only = ON")

    def _stop(self) -> None:
        self._readers.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        for connection in (*self._reader_connections, self._revision_connection, self._write_connection):
            if connection is not None:
                connection.close()

    def _connect(self) -> sqlite3.Connection:
        # Each connection is used by one thread at a time; only closing happens elsewhere, after the threads ended.
        # Never made here: a file that vanished must not come back empty.
        connection = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode=rw",
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _switch_to_wal(self, connection: sqlite3.Connection) -> None:
        # Two processes that make the file at once: SQLite answers BUSY here without waiting.
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                mode = str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                if not _is(error, sqlite3.SQLITE_BUSY) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
                continue
            if mode != "wal":
                raise FailedPrecondition(
                    "The file system of the state directory cannot hold the database; use a local file system."
                )
            return

    def _transaction(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._write_connection
        assert connection is not None
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if _is(error, sqlite3.SQLITE_BUSY):
                raise Unavailable("Another program holds the database; try again in a moment.") from error
            raise
        try:
            result = fn(connection)
            if not connection.in_transaction:
                raise RuntimeError("a query function ended the transaction that it was called in")
            connection.execute("COMMIT")
        except BaseException as error:
            # A full disk makes SQLite roll back by itself.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError) and _is(error, sqlite3.SQLITE_FULL):
                raise ResourceExhausted(
                    "The host's file system is full, nothing was recorded; free space in the state directory."
                ) from error
            raise
        return result

    def _lazy_transaction(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._write_connection
        assert connection is not None
        # In WAL mode this leaves out the sync of a commit; the order of commits, and so consistency, stays.
        connection.execute("PRAGMA synchronous = NORMAL")
        try:
            return self._transaction(fn)
        finally:
            connection.execute("PRAGMA synchronous = FULL")

    def _snapshot(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        connection: sqlite3.Connection | None = getattr(self._reader_of_thread, "connection", None)
        if connection is None:
            connection = self._reader_of_thread.connection = self._connect()
            self._reader_connections.append(connection)
            connection.execute("PRAGMA query_only = ON")
        connection.execute("BEGIN")
        try:
            return fn(connection)
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


def _is(error: sqlite3.OperationalError, code: int) -> bool:
    # Extended codes carry the primary one in their low byte.
    return (error.sqlite_errorcode & 0xFF) == code


def _ensure_private_file(path: Path) -> None:
    """SQLite gives its side files the mode of the database, so that one is made 0600 first."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            # Another process was faster. The file is not opened here: closing a descriptor of it would drop the
            # locks that other connections of this process hold.
            found = path.lstat()
        else:
            os.fchmod(descriptor, 0o600)
            os.close(descriptor)
            return
    if not stat.S_ISREG(found.st_mode):
        raise FailedPrecondition("The database in the state directory is not a regular file; remove what is there.")
    if stat.S_IMODE(found.st_mode) != 0o600:
        path.chmod(0o600)
