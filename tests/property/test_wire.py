"""Whatever the chunks, the garbage and the tears: the same frames, a hello that gets through, bounded buffers."""

from __future__ import annotations

import contextlib
import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from microvm_mcp.wire.fields import WireError
from microvm_mcp.wire.frames import (
    HEADER_BYTES,
    MAGIC,
    MAX_CHUNK,
    MAX_FRAME,
    Frame,
    FrameReader,
    Kind,
    encode_frame,
)
from microvm_mcp.wire.messages import (
    CancelJob,
    Freeze,
    JobOutput,
    ListJobs,
    ReadFile,
    Request,
    Shell,
    StartJob,
    WriteFile,
)
from microvm_mcp.wire.replies import parse_job, parse_refusal, parse_reply
from microvm_mcp.wire.requests import OPERATIONS, encode_request, parse_request
from microvm_mcp.wire.session import Greeted, GuestSession, HostSession

TAG = 0x0123456789ABCDEF
REQUESTS: tuple[Request, ...] = (
    StartJob("j", "r", "true", ".", Shell.LOGIN, (), None, 5, 0.0),
    JobOutput("j", 0, 0, 10, 0.0),
    ListJobs(-1, 0.0),
    CancelJob("j"),
    ReadFile("a", 0, 10),
    WriteFile("a", b"x", None, None),
    Freeze(),
)

frames = st.builds(
    encode_frame,
    st.sampled_from([Kind.REQUEST, Kind.REPLY, Kind.DATA, Kind.ERROR]),
    st.sampled_from([TAG, TAG, TAG + 1]),
    st.integers(0, 2**32 - 1),
    st.one_of(st.binary(max_size=200), st.integers(0, 65_536).map(bytes)),
)
noise = st.one_of(
    st.binary(max_size=300),
    st.just(MAGIC),
    frames.map(lambda frame: frame[: HEADER_BYTES + 3]),
    frames.map(lambda frame: frame[len(frame) // 2 :]),
    frames.map(lambda frame: frame[:-1]),
    st.just(encode_frame(Kind.HELLO, 5, 0, b"{}")[:-3]),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts), *range(0, len(data), MAX_CHUNK)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def read_all(reader: FrameReader, chunks: list[bytes]) -> list[Frame]:
    out = []
    for chunk in chunks:
        reader.feed(chunk)
        while (frame := reader.next_frame()) is not None:
            out.append(frame)
        assert reader.buffered < MAX_FRAME
    return out


@given(st.lists(st.one_of(frames, noise), max_size=8), st.lists(st.integers(0, 10**6), max_size=20))
@settings(max_examples=150, deadline=None)
def test_the_same_frames_come_out_of_any_chunking(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    whole, cut = FrameReader(tag=TAG), FrameReader(tag=TAG)
    assert read_all(whole, pieces(data, [])) == read_all(cut, pieces(data, cuts))
    assert whole.skipped == cut.skipped


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 10**6), max_size=20))
@settings(max_examples=100, deadline=None)
def test_an_undisturbed_stream_loses_no_frame_of_its_session(parts: list[bytes], cuts: list[int]) -> None:
    out = read_all(FrameReader(tag=TAG), pieces(b"".join(parts), cuts))
    again = [encode_frame(frame.kind, frame.tag, frame.request, frame.payload) for frame in out]
    assert again == [part for part in parts if part[9:17] == TAG.to_bytes(8, "big")]


@given(st.lists(st.one_of(frames, noise), max_size=8), st.booleans(), st.lists(st.integers(0, 10**6), max_size=10))
@settings(max_examples=150, deadline=None)
def test_whatever_was_on_the_stream_a_repeated_hello_is_heard(
    parts: list[bytes], in_session: bool, cuts: list[int]
) -> None:
    guest = GuestSession()
    if in_session:
        guest.receive(HostSession(TAG.to_bytes(8, "big") + bytes(8)).hello())
    host = HostSession(b"new session" + bytes(5))
    data = b"".join(parts) + host.hello() + host.hello()
    events = [event for piece in pieces(data, cuts) for event in guest.receive(piece)]
    assert Greeted(fresh=True) in events


@given(st.lists(st.one_of(frames, noise), max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_host_raises_only_its_own_error_on_any_bytes(parts: list[bytes]) -> None:
    host = HostSession(TAG.to_bytes(8, "big") + bytes(8))
    host.hello()
    try:
        for piece in pieces(b"".join(parts), []):
            host.receive(piece)
    except WireError:
        pass


@given(json_values, st.binary(max_size=50), st.sampled_from(REQUESTS))
@settings(max_examples=200, deadline=None)
def test_parsers_raise_only_their_own_error(document: object, data: bytes, request: Request) -> None:
    for parse in (
        lambda: parse_request(document, data),
        lambda: parse_reply(request, document, data),
        lambda: parse_refusal(document, data),
        lambda: parse_job(document),
    ):
        with contextlib.suppress(WireError):
            parse()


@given(st.sampled_from(REQUESTS), st.data())
@settings(max_examples=200, deadline=None)
def test_a_request_with_one_field_replaced_is_refused_or_understood(request: Request, data: st.DataObject) -> None:
    control, payload = encode_request(request)
    field = data.draw(st.sampled_from(sorted(control)))
    control[field] = data.draw(st.one_of(json_values, st.sampled_from(OPERATIONS)))
    try:
        parsed = parse_request(control, payload)
    except WireError:
        return
    again, _ = encode_request(parsed)
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(control))
