"""The real supervisor behind the real client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from microvm_mcp.link.client import LinkClient
from microvm_mcp.link.port import Link
from tests.contract.link_suite import LinkSuite
from tests.support.supervisor import RunningSupervisor, running_supervisor


class _Rig:
    def __init__(self, supervisor: RunningSupervisor, stack: contextlib.AsyncExitStack) -> None:
        self._supervisor, self._stack = supervisor, stack

    def link(self) -> Link:
        link: LinkClient = self._supervisor.link()
        self._stack.push_async_callback(link.close)
        return link

    def clock_settings(self) -> list[int]:
        return self._supervisor.clock_settings()


@pytest.mark.needs("root", "cgroup2")
class TestSupervisor(LinkSuite):
    @pytest.fixture
    async def rig(self) -> AsyncIterator[_Rig]:
        with running_supervisor() as supervisor:
            async with contextlib.AsyncExitStack() as stack:
                yield _Rig(supervisor, stack)
