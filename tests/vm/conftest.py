"""One service for the tier, with a machine of the standard image that tests share, behind each of the two doors.

Tests that hurt a machine or the service make their own: `fresh_vm`, `own_service`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from microvm_mcp.config import SLOTS
from tests.support.running import Door, DoorName, RunningService, create_vm, open_door, running, volume

_NUMBERS = itertools.count()


def image(name: str) -> Path:
    variable = {"standard": "MICROVM_TEST_IMAGE", "tiny": "MICROVM_TEST_TINY_IMAGE"}[name]
    return Path(os.environ[variable])


def _next(prefix: str) -> tuple[Path, int]:
    """A directory and a UID range that no other instance of this run has."""
    number = next(_NUMBERS)
    return volume() / f"{prefix}-{os.getpid()}-{number}", 200_000_000 + (
        os.getpid() % 1000
    ) * 1_000_000 + number * SLOTS


@pytest.fixture(scope="session")
def service() -> Iterator[RunningService]:
    base, uid_base = _next("service")
    with running(base, image("standard"), uid_base, max_vms=100) as it:
        yield it


@pytest.fixture(scope="session")
def token(service: RunningService) -> str:
    return service.issue_token("shared")


@pytest.fixture(params=["http", "mcp"])
def door_name(request: pytest.FixtureRequest) -> DoorName:
    name: DoorName = request.param
    return name


@pytest_asyncio.fixture
async def door(service: RunningService, token: str, door_name: DoorName) -> AsyncIterator[Door]:
    """Opened and closed in one task: the SDK's client insists on that, and fixtures are finished in another."""
    opened: asyncio.Future[Door] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def hold() -> None:
        async with open_door(door_name, service.url, token) as it:
            opened.set_result(it)
            await done.wait()

    holder = asyncio.create_task(hold())
    while not opened.done() and not holder.done():
        await asyncio.wait({holder}, timeout=0.01)
    if not opened.done():
        await holder
    yield opened.result()
    done.set()
    await holder


@pytest.fixture(scope="session")
def vm(service: RunningService, token: str) -> str:
    """A running machine of the standard image, shared by all tests that leave it whole."""

    async def make() -> str:
        async with open_door("http", service.url, token) as it:
            return await create_vm(it, name="shared")

    return asyncio.run(make())


@pytest.fixture
def own_service() -> Iterator[Callable[..., RunningService]]:
    """Makes instances of one's own, on the tiny image unless told otherwise; all are ended."""
    with ExitStack() as stack:

        def make(which: str = "tiny", **settings: object) -> RunningService:
            base, uid_base = _next("own")
            return stack.enter_context(running(base, image(which), uid_base, **settings))

        yield make
