from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from microvm_mcp.store.database import Database


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Database]:
    async with await Database.open(tmp_path / "service.db") as database:
        yield database
