"""The two ends of a conversation against each other, and the host's end against a supervisor that lies."""

from __future__ import annotations

import pytest

from microvm_mcp.wire import session
from microvm_mcp.wire.fields import LocalError, WireError
from microvm_mcp.wire.frames import Kind, encode_frame
from microvm_mcp.wire.messages import (
    MAX_WAITING,
    CancelJob,
    Done,
    ErrorCode,
    FileContent,
    ForgetJob,
    Freeze,
    ReadFile,
    Refused,
    WriteFile,
    Written,
)
from microvm_mcp.wire.session import (
    Answered,
    Asked,
    Greeted,
    GuestSession,
    HostSession,
    Send,
    Welcomed,
    encode_message,
)

NONCE = bytes(range(16))
TAG = int.from_bytes(NONCE[:8], "big")


def chunks(data: bytes) -> list[bytes]:
    return [data[start : start + 65_536] for start in range(0, len(data), 65_536)]


def to_guest(guest: GuestSession, data: bytes) -> list[Greeted | Asked | Send]:
    return [event for chunk in chunks(data) for event in guest.receive(chunk)]


def to_host(host: HostSession, data: bytes) -> list[Welcomed | Answered]:
    return [event for chunk in chunks(data) for event in host.receive(chunk)]


def welcome(guest: GuestSession) -> bytes:
    return guest.welcome(supervisor="0.1.0", boot_id="ab-1.2", active_jobs=2)


def attached(nonce: bytes = NONCE, guest: GuestSession | None = None) -> tuple[HostSession, GuestSession]:
    host, guest = HostSession(nonce), guest or GuestSession()
    assert to_guest(guest, host.hello()) == [Greeted(fresh=True)]
    (event,) = to_host(host, welcome(guest))
    assert isinstance(event, Welcomed)
    return host, guest


def test_a_hello_is_welcomed_with_the_common_version() -> None:
    host, guest = HostSession(NONCE), GuestSession()
    to_guest(guest, host.hello())
    (event,) = to_host(host, welcome(guest))
    assert isinstance(event, Welcomed)
    assert (event.welcome.version, event.welcome.boot_id, event.welcome.active_jobs) == (1, "ab-1.2", 2)


def test_requests_and_answers_with_data_cross_in_any_order() -> None:
    host, guest = attached()
    data = bytes(range(256)) * 512
    first, sent_first = host.ask(WriteFile("a", data, None, None))
    second, sent_second = host.ask(ReadFile("b", 0, 131_072))
    assert to_guest(guest, sent_first + sent_second) == [
        Asked(first, WriteFile("a", data, None, None)),
        Asked(second, ReadFile("b", 0, 131_072)),
    ]
    content = FileContent(data, 0, len(data), 0o644)
    answers = guest.answer(second, content) + guest.answer(first, Written(len(data), 0o644))
    assert to_host(host, answers) == [Answered(second, content), Answered(first, Written(len(data), 0o644))]
    assert host.waiting == 0


def test_a_refusal_reaches_the_caller() -> None:
    host, guest = attached()
    number, sent = host.ask(CancelJob("job-1"))
    to_guest(guest, sent)
    refused = Refused(ErrorCode.NOT_FOUND, "no record")
    assert to_host(host, guest.answer(number, refused)) == [Answered(number, refused)]


def test_the_same_hello_again_changes_nothing() -> None:
    host, guest = attached()
    number, sent = host.ask(Freeze())
    to_guest(guest, sent)
    assert to_guest(guest, host.hello()) == [Greeted(fresh=False)]
    assert to_host(host, welcome(guest) + guest.answer(number, Done())) == [Answered(number, Done())]


def test_a_new_hello_replaces_the_session_and_its_requests() -> None:
    old_host, guest = attached()
    number, sent = old_host.ask(Freeze())
    to_guest(guest, sent)
    host, guest = attached(bytes(16), guest)
    assert guest.answer(number, Done()) == b""
    _, stale = old_host.ask(Freeze())
    again, fresh = host.ask(ForgetJob("job-1"))
    assert to_guest(guest, stale + fresh) == [Asked(again, ForgetJob("job-1"))]


def test_a_new_hello_in_the_middle_of_a_message_is_heard() -> None:
    old_host, guest = attached()
    _, sent = old_host.ask(WriteFile("a", bytes(100_000), None, None))
    to_guest(guest, sent[:40_000])
    host = HostSession(bytes(16))
    assert to_guest(guest, host.hello()) == []
    assert to_guest(guest, host.hello()) in ([Greeted(fresh=True)], [Greeted(fresh=True), Greeted(fresh=False)])


def test_a_hello_without_a_common_version_is_refused_and_the_session_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    old_host, guest = attached()
    host = HostSession(bytes(16))
    with monkeypatch.context() as future:
        future.setattr(session, "SUPPORTED_VERSIONS", (9, 8))
        hello = host.hello()
    (event,) = to_guest(guest, hello)
    assert isinstance(event, Send)
    (answer,) = to_host(host, event.data)
    assert isinstance(answer, Answered)
    assert isinstance(answer.answer, Refused)
    assert answer.answer.code is ErrorCode.VERSION
    number, sent = old_host.ask(Freeze())
    assert to_guest(guest, sent) == [Asked(number, Freeze())]


def test_the_highest_common_version_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.negotiate((3, 1)) == 1
    monkeypatch.setattr(session, "SUPPORTED_VERSIONS", (3, 2))
    assert session.negotiate((1, 2, 3)) == 3
    assert session.negotiate((1, 2)) == 2
    assert session.negotiate((4,)) is None


def test_nothing_can_be_asked_before_the_welcome() -> None:
    with pytest.raises(LocalError):
        HostSession(NONCE).ask(Freeze())


def test_at_most_64_requests_wait() -> None:
    host, guest = attached()
    for _ in range(MAX_WAITING):
        to_guest(guest, host.ask(Freeze())[1])
    with pytest.raises(LocalError):
        host.ask(Freeze())
    more = encode_message(Kind.REQUEST, TAG, 999, {"op": "freeze"}, b"")
    (event,) = to_guest(guest, more)
    assert isinstance(event, Send)


def test_a_malformed_request_is_answered_and_costs_only_itself() -> None:
    host, guest = attached()
    (event,) = to_guest(guest, encode_message(Kind.REQUEST, TAG, 5, {"op": "nonsense"}, b""))
    assert isinstance(event, Send)
    number, sent = host.ask(Freeze())
    assert to_guest(guest, sent) == [Asked(number, Freeze())]


@pytest.mark.parametrize(
    "lie",
    [
        b"garbage",
        encode_message(Kind.REPLY, TAG, 77, {}, b""),
        encode_message(Kind.REPLY, TAG, 1, {"job": 1}, b""),
        encode_message(Kind.REPLY, TAG, 1, {}, b"data"),
        encode_message(Kind.REQUEST, TAG, 1, {}, b""),
        encode_message(Kind.ERROR, TAG, 1, {"code": "busy"}, b""),
        encode_message(Kind.ERROR, TAG, 0, {"code": "busy", "message": ""}, b""),
        encode_message(Kind.REPLY, TAG + 1, 1, {}, b""),
        encode_frame(Kind.DATA, TAG, 1, b"data"),
        encode_frame(Kind.REPLY, TAG, 1, b""),
        encode_frame(Kind.REPLY, TAG, 1, b"\xff\xff\xff\xff{}"),
        encode_frame(Kind.REPLY, TAG, 1, b"\0\0\0\x05{}") + encode_frame(Kind.DATA, TAG, 2, b"12345"),
        encode_frame(Kind.REPLY, TAG, 1, b"\0\0\0\x05{}") + encode_frame(Kind.DATA, TAG, 1, b"123456"),
        encode_frame(Kind.REPLY, TAG, 1, b"\0\0\0\x05{}") + encode_frame(Kind.DATA, TAG, 1, b""),
        encode_frame(Kind.REPLY, TAG, 1, b"\0\0\0\0{"),
        encode_frame(Kind.WELCOME, TAG, 0, b"{}"),
        encode_frame(Kind.HELLO, TAG, 0, b"{}"),
    ],
)
def test_whatever_no_honest_supervisor_sends_ends_the_session(lie: bytes) -> None:
    host, _ = attached()
    host.ask(Freeze())
    with pytest.raises(WireError):
        to_host(host, lie)


def test_an_answer_is_taken_once() -> None:
    host, guest = attached()
    number, sent = host.ask(Freeze())
    to_guest(guest, sent)
    answer = guest.answer(number, Done())
    to_host(host, answer)
    with pytest.raises(WireError):
        to_host(host, answer)


def test_an_unasked_welcome_is_a_lie() -> None:
    host, guest = attached()
    with pytest.raises(WireError):
        to_host(host, welcome(guest))


def test_noise_of_an_earlier_session_is_skipped_before_the_welcome_and_bounded() -> None:
    host, guest = HostSession(NONCE), GuestSession()
    to_guest(guest, host.hello())
    noise = encode_message(Kind.REPLY, TAG + 1, 1, {}, bytes(100_000))[500:]
    (event,) = to_host(host, noise + welcome(guest))
    assert isinstance(event, Welcomed)
    with pytest.raises(WireError):
        to_host(HostSession(NONCE), bytes(5_000_000))


def test_damaged_frames_cost_a_bounded_number_of_checksums() -> None:
    host = HostSession(NONCE)
    broken = bytearray(encode_frame(Kind.REPLY, TAG, 1, bytes(10)))
    broken[-1] ^= 1
    with pytest.raises(WireError):
        to_host(host, bytes(broken) * 20)
