"""Facts about this service as a whole, by key: the instance id, the host boot at the last start."""

from __future__ import annotations

import sqlite3


def get(tx: sqlite3.Connection, key: str) -> str | None:
    row = tx.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row["value"])


def put(tx: sqlite3.Connection, key: str, value: str) -> None:
    tx.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (key, value)
    )


def delete(tx: sqlite3.Connection, key: str) -> None:
    tx.execute("DELETE FROM meta WHERE key = ?", (key,))
