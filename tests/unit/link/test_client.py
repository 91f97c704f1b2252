"""The link client against guests that are silent, slow, gone, flooding or lying."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import select
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from microvm_mcp.link import client, connection
from microvm_mcp.link.client import LinkClient
from microvm_mcp.link.dial import Dial, dialer
from microvm_mcp.link.port import GuestLied, GuestRefused, LinkLost
from microvm_mcp.model import JobId, JobRequest, RequestId
from microvm_mcp.wire.frames import MAX_FRAME, Kind
from microvm_mcp.wire.messages import (
    Done,
    ErrorCode,
    FileContent,
    ForgetJob,
    Jobs,
    ListJobs,
    ReadFile,
    Refused,
    Reply,
    Request,
    SetClock,
    WriteFile,
    Written,
)
from microvm_mcp.wire.session import Asked, Greeted, GuestSession, encode_message

SOON = 20.0
Answer = Callable[["Guest", asyncio.StreamWriter, int, Request], Awaitable[None]]


class Guest:
    """A supervisor whose answers a test decides. Counts what reaches it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = GuestSession()
        self.asked: list[Request] = []
        self.connections = 0
        self.hellos = 0
        self.deaf = False
        self.boot_id = "1"
        self.answer: Answer = Guest.done
        self._writers: list[asyncio.StreamWriter] = []

    async def done(self, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        replies: dict[type[Request], Reply] = {ListJobs: Jobs(1, ()), ReadFile: FileContent(b"", 0, 0, 0o644)}
        reply = replies.get(type(request), Done())
        if isinstance(request, WriteFile):
            reply = Written(len(request.data) + (request.offset or 0), 0o644)
        writer.write(self.session.answer(number, reply))

    async def nothing(self, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        pass

    async def hang_up(self, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.session = session = GuestSession()
        self._writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                for event in session.receive(data):
                    if isinstance(event, Greeted) and not self.deaf:
                        self.hellos += 1
                        writer.write(session.welcome(supervisor="0.1.0", boot_id=self.boot_id, active_jobs=0))
                    elif isinstance(event, Asked):
                        self.asked.append(event.question)
                        await self.answer(self, writer, event.request, event.question)
                await writer.drain()
        writer.close()

    def hang_up_all(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[Guest]:
    guest = Guest(tmp_path / "control")
    server = await asyncio.start_unix_server(guest.serve, str(guest.path))
    yield guest
    guest.hang_up_all()
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0.01)


@pytest.fixture
async def link(guest: Guest) -> AsyncIterator[LinkClient]:
    link = LinkClient(dialer("unix", guest.path, 0))
    yield link
    await link.close()


async def forget(link: LinkClient, *, deadline_s: float = SOON) -> None:
    await link.forget_job(JobId("job-1"), deadline_s=deadline_s)


async def extend(link: LinkClient, *, deadline_s: float = SOON) -> None:
    await link.write_file("file", b"x", offset=3, mode=None, deadline_s=deadline_s)


async def lost(awaitable: Awaitable[object]) -> LinkLost:
    with pytest.raises(LinkLost) as caught:
        await awaitable
    return caught.value


async def test_calls_share_one_connection_and_one_hello(guest: Guest, link: LinkClient) -> None:
    await asyncio.gather(*(forget(link) for _ in range(10)))
    assert (guest.connections, guest.hellos, len(guest.asked)) == (1, 1, 10)


async def test_hello_always_attaches_anew(guest: Guest, link: LinkClient) -> None:
    await forget(link)
    await link.hello(deadline_s=SOON)
    assert (guest.connections, guest.hellos) == (2, 2)
    await forget(link)
    assert guest.connections == 2


async def test_nobody_there_until_the_deadline_is_not_sent(tmp_path: Path) -> None:
    link = LinkClient(dialer("unix", tmp_path / "none", 0))
    assert not (await lost(forget(link, deadline_s=0.1))).sent
    assert not (await lost(link.hello(deadline_s=0.1))).sent


async def test_a_guest_that_does_not_greet_is_not_sent_anything(guest: Guest, link: LinkClient) -> None:
    guest.deaf = True
    assert not (await lost(forget(link, deadline_s=0.2))).sent
    assert guest.asked == []


async def test_a_guest_that_boots_meanwhile_is_reached(tmp_path: Path) -> None:
    guest = Guest(tmp_path / "late")
    link = LinkClient(dialer("unix", guest.path, 0))
    waiting = asyncio.create_task(link.hello(deadline_s=SOON))
    await asyncio.sleep(0.1)
    async with await asyncio.start_unix_server(guest.serve, str(guest.path)):
        assert (await waiting).boot_id == "1"
        await link.close()
        guest.hang_up_all()


async def test_a_guest_that_greets_late_is_greeted_again(guest: Guest, link: LinkClient) -> None:
    guest.deaf = True
    waiting = asyncio.create_task(link.hello(deadline_s=SOON))
    await asyncio.sleep(0.1)
    guest.deaf = False
    assert (await waiting).boot_id == "1"
    assert guest.connections == 1


async def test_a_lost_answer_is_asked_for_again_where_that_does_no_harm(guest: Guest, link: LinkClient) -> None:
    guest.answer = Guest.hang_up
    waiting = asyncio.create_task(forget(link))
    while len(guest.asked) < 2:
        await asyncio.sleep(0.01)
    guest.answer = Guest.done
    await waiting
    assert set(guest.asked) == {ForgetJob("job-1")}


async def test_a_lost_start_is_not_asked_of_a_supervisor_that_was_restarted(guest: Guest, link: LinkClient) -> None:
    async def restart(guest: Guest, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        guest.boot_id = "2"
        writer.close()

    guest.answer = restart
    job = JobRequest(JobId("job-1"), RequestId("r"), "true")
    assert (await lost(link.start_job(job, wait_s=0, deadline_s=SOON))).sent
    assert len(guest.asked) == 1


async def test_a_lost_extension_is_told_as_sent_and_not_repeated(guest: Guest, link: LinkClient) -> None:
    guest.answer = Guest.hang_up
    assert (await lost(extend(link))).sent
    assert len(guest.asked) == 1
    guest.answer = Guest.done
    await extend(link)


async def test_no_answer_before_the_deadline_is_told_as_sent_and_the_next_call_attaches_anew(
    guest: Guest, link: LinkClient
) -> None:
    guest.answer = Guest.nothing
    assert (await lost(forget(link, deadline_s=0.2))).sent
    guest.answer = Guest.done
    await forget(link)
    assert guest.connections == 2


async def test_that_a_request_was_sent_once_is_not_forgotten_while_attaching_anew(
    guest: Guest, link: LinkClient
) -> None:
    async def vanish(self: Guest, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        self.deaf = True
        writer.close()

    guest.answer = vanish
    assert (await lost(forget(link, deadline_s=0.3))).sent


async def test_a_cancelled_call_leaves_the_connection_whole(guest: Guest, link: LinkClient) -> None:
    held: list[tuple[asyncio.StreamWriter, int]] = []

    async def hold(self: Guest, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        held.append((writer, number))

    guest.answer = hold
    call = asyncio.create_task(forget(link))
    while not held:
        await asyncio.sleep(0.005)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    guest.answer = Guest.done
    writer, number = held[0]
    writer.write(guest.session.answer(number, Done()))
    await forget(link)
    assert guest.connections == 1


async def test_a_cancelled_attach_leaves_no_connection_behind(guest: Guest, link: LinkClient) -> None:
    guest.deaf = True
    call = asyncio.create_task(forget(link))
    while guest.connections == 0:
        await asyncio.sleep(0.005)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    guest.deaf = False
    await forget(link)
    assert guest.connections == 2


async def test_a_refusal_has_its_code_and_words(guest: Guest, link: LinkClient) -> None:
    async def refuse(self: Guest, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        writer.write(self.session.answer(number, Refused(ErrorCode.NO_SPACE, "the guest's disk is full")))

    guest.answer = refuse
    with pytest.raises(GuestRefused, match="disk is full") as caught:
        await forget(link)
    assert caught.value.code == "no_space"


@pytest.mark.parametrize("lie", [b"garbage", bytes(MAX_FRAME), b"\xf1mV\x9e" * 100])
async def test_a_guest_that_breaks_the_protocol_fails_all_calls_at_once_and_only_its_connection(
    guest: Guest, link: LinkClient, lie: bytes
) -> None:
    async def answer(self: Guest, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        if len(self.asked) == 3:
            writer.write(lie)

    guest.answer = answer
    outcomes = await asyncio.gather(*(extend(link) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [GuestLied] * 3
    guest.answer = Guest.done
    await forget(link)


async def test_an_answer_to_another_question_is_a_lie(guest: Guest, link: LinkClient) -> None:
    async def other(self: Guest, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        writer.write(self.session.answer(number, Written(77, 0o644)))

    guest.answer = other
    with pytest.raises(GuestLied):
        await extend(link)


async def test_a_guest_that_floods_is_cut_off(guest: Guest, link: LinkClient) -> None:
    async def flood(self: Guest, writer: asyncio.StreamWriter, number: int, request: Request) -> None:
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(bytes(65_536))
                await writer.drain()

    guest.answer = flood
    with pytest.raises(GuestLied):
        await forget(link)


async def test_a_guest_that_floods_before_its_welcome_is_cut_off(tmp_path: Path) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(bytes(65_536))
                await writer.drain()
        writer.close()

    link = LinkClient(dialer("unix", tmp_path / "flood", 0))
    async with await asyncio.start_unix_server(flood, str(tmp_path / "flood")):
        with pytest.raises(GuestLied):
            await link.hello(deadline_s=SOON)
        await link.close()


async def test_calls_above_what_the_guest_may_hold_are_refused(guest: Guest, link: LinkClient) -> None:
    guest.answer = Guest.nothing
    await link.hello(deadline_s=SOON)
    calls = [asyncio.create_task(forget(link)) for _ in range(64)]
    while len(guest.asked) < 64:
        await asyncio.sleep(0.005)
    with pytest.raises(GuestRefused) as caught:
        await forget(link)
    assert caught.value.code == "busy"
    await link.close()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {LinkLost}


async def test_what_cannot_be_sent_is_refused_as_invalid_and_not_sent(guest: Guest, link: LinkClient) -> None:
    for command in ("a\0b", "\ud800", "x" * 65_537):
        job = JobRequest(JobId("job-1"), RequestId("r"), command)
        with pytest.raises(GuestRefused) as caught:
            await link.start_job(job, wait_s=0, deadline_s=SOON)
        assert caught.value.code == "invalid"
    assert guest.asked == []


async def test_the_wait_in_the_guest_ends_before_the_deadline_of_the_call(guest: Guest, link: LinkClient) -> None:
    await link.list_jobs(generation=1, wait_s=100, deadline_s=10)
    (asked,) = guest.asked
    assert isinstance(asked, ListJobs)
    assert 9 < asked.wait_s < 10


async def test_time_spent_on_attaching_is_in_the_clock(guest: Guest, link: LinkClient) -> None:
    guest.deaf = True
    call = asyncio.create_task(link.set_clock(1_000_000_000, deadline_s=SOON))
    await asyncio.sleep(0.2)
    guest.deaf = False
    await call
    (asked,) = guest.asked
    assert isinstance(asked, SetClock)
    assert asked.now_ns >= 1_200_000_000


async def test_closing_fails_what_waits_and_is_final(guest: Guest, link: LinkClient) -> None:
    guest.answer = Guest.nothing
    call = asyncio.create_task(forget(link))
    while not guest.asked:
        await asyncio.sleep(0.005)
    await link.close()
    assert (await lost(call)).sent
    assert not (await lost(forget(link))).sent
    assert repr(link) == "<LinkClient closed>"


async def test_a_guest_that_reads_nothing_loses_its_connection_at_once_with_all_that_was_written(
    tmp_path: Path,
) -> None:
    """Descriptor and buffer would be kept otherwise, and the VMM, which serves one at a time, from the next one."""
    session = GuestSession()
    hung_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session.receive(await reader.read(65_536))
        writer.write(session.welcome(supervisor="1", boot_id="1", active_jobs=0))
        sock = writer.get_extra_info("socket")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        watch = select.poll()
        watch.register(sock.fileno(), 0)
        while not watch.poll(0):
            await asyncio.sleep(0.01)
        hung_up.set()
        writer.transport.abort()

    path = tmp_path / "deaf.sock"
    async with await asyncio.start_unix_server(serve, path):
        link = LinkClient(dialer("unix", path, 0))
        writes = [link.write_file("f", bytes(131_072), offset=0, mode=None, deadline_s=0.5) for _ in range(8)]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(outcome, LinkLost) for outcome in outcomes)
        async with asyncio.timeout(2):
            await hung_up.wait()
        await link.close()


async def test_a_guest_that_hangs_up_on_every_call_is_not_attached_to_without_pause(
    guest: Guest, link: LinkClient
) -> None:
    guest.answer = Guest.hang_up
    assert (await lost(forget(link, deadline_s=1.0))).sent
    assert guest.connections < 20


async def test_a_guest_that_refuses_and_welcomes_in_one_breath_is_refused_without_noise(tmp_path: Path) -> None:
    noise: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = GuestSession()
        hello = await reader.read(65_536)
        tag = int.from_bytes(hello[9:17], "big")
        session.receive(hello)
        error = encode_message(Kind.ERROR, tag, 0, {"code": "version", "message": "no"}, b"")
        writer.write(error + session.welcome(supervisor="1", boot_id="1", active_jobs=0))
        await reader.read()
        writer.close()

    path = tmp_path / "both.sock"
    async with await asyncio.start_unix_server(serve, path):
        with pytest.raises(GuestRefused):
            await LinkClient(dialer("unix", path, 0)).hello(deadline_s=SOON)
        gc.collect()
        await asyncio.sleep(0.05)
    assert noise == []


async def test_a_link_that_is_closed_while_it_attaches_keeps_no_connection(guest: Guest, link: LinkClient) -> None:
    attach = connection.attach
    attached: list[connection.Connection] = []

    async def late(dial: Dial) -> connection.Connection:
        attached.append(await attach(dial))
        await link.close()
        return attached[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "attach", late)
        assert not (await lost(forget(link))).sent
    assert not attached[0].is_open
