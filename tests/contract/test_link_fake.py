"""The fake that tests above the link use does what the real supervisor does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from microvm_mcp.link.port import GuestLied, GuestRefused, Link, LinkLost
from tests.contract.link_suite import SOON, LinkSuite, report_of, request, run
from tests.support.fake_link import FakeGuest, FakeLink


class _Rig:
    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self.guest = FakeGuest()
        self._stack = stack

    def link(self) -> Link:
        link: Link = FakeLink(self.guest)
        self._stack.push_async_callback(link.close)
        return link

    def clock_settings(self) -> list[int]:
        return self.guest.clock_settings


@pytest.fixture
async def rig() -> AsyncIterator[_Rig]:
    async with contextlib.AsyncExitStack() as stack:
        rig = _Rig(stack)
        stack.push_async_callback(rig.guest.stop)
        yield rig


class TestFake(LinkSuite):
    pass


async def test_a_lost_answer_is_told_as_sent_and_the_job_runs(rig: _Rig) -> None:
    rig.guest.lost_answers = 1
    link = rig.link()
    with pytest.raises(LinkLost) as caught:
        await run(link, request(1, "exit 0"))
    assert caught.value.sent
    assert (await report_of(link, request(1, "").job_id)).request_id == "request-1"


async def test_the_knobs_raise_what_the_port_names(rig: _Rig) -> None:
    link = rig.link()
    rig.guest.unsent = 1
    with pytest.raises(LinkLost) as caught:
        await run(link, request(1, "exit 0"))
    assert not caught.value.sent
    rig.guest.silent = True
    with pytest.raises(LinkLost):
        await link.hello(deadline_s=0.01)
    rig.guest.silent, rig.guest.refuses = False, ("no_space", "full")
    with pytest.raises(GuestRefused, match="full"):
        await run(link, request(1, "exit 0"))
    rig.guest.lies = True
    with pytest.raises(GuestLied):
        await link.hello(deadline_s=SOON)
