"""Needs, by name: a test says what it needs of the host, a host without it skips the test with that name.

`--require NAME,…` turns the skip into a failure (CI, release).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import leaks, needs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require", default="", help="comma-separated needs whose absence is a failure, or `all`")


def pytest_report_header() -> list[str]:
    rows = [f"{name}: {'yes' if reason is None else f'no ({reason})'}" for name, reason in needs.table().items()]
    return ["host: " + " · ".join(rows)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = {name for name in str(item.config.getoption("--require")).split(",") if name}
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            reason = needs.missing(name)
            if reason is None:
                continue
            if name in required or "all" in required:
                pytest.fail(f"needs {name}: {reason}", pytrace=False)
            pytest.skip(f"needs {name}: {reason}")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up before and torn down after every other fixture of the run."""
    volume = os.environ.get("MICROVM_TEST_DIR")
    directories = [tmp_path_factory.getbasetemp(), *([Path(volume)] if volume else [])]
    before = leaks.look(directories)
    yield
    left = leaks.left_behind(before, directories)
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)
