from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import xfs


@pytest.fixture(scope="session")
def reflink_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with xfs.mounted(tmp_path_factory.mktemp("xfs")) as mount_point:
        yield mount_point
