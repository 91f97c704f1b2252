"""The frame reader on whole, torn, foreign and damaged input."""

from __future__ import annotations

import pytest

from microvm_mcp.wire.frames import (
    HEADER_BYTES,
    MAGIC,
    MAX_CHUNK,
    MAX_FRAME,
    MAX_GREETING,
    MAX_PAYLOAD,
    PADDING,
    Frame,
    FrameReader,
    Kind,
    encode_frame,
)

TAG = 0x1122334455667788


def feed(reader: FrameReader, data: bytes) -> list[Frame]:
    frames = []
    for start in range(0, len(data), MAX_CHUNK):
        reader.feed(data[start : start + MAX_CHUNK])
        while (frame := reader.next_frame()) is not None:
            frames.append(frame)
    return frames


def request(payload: bytes, tag: int = TAG) -> bytes:
    return encode_frame(Kind.REQUEST, tag, 7, payload)


@pytest.mark.parametrize("size", [0, 1, MAX_PAYLOAD])
def test_a_frame_comes_out_as_it_went_in(size: int) -> None:
    payload = b"x" * size
    assert feed(FrameReader(tag=TAG), request(payload)) == [Frame(Kind.REQUEST, TAG, 7, payload)]


def test_payloads_over_the_limit_are_not_sent() -> None:
    with pytest.raises(ValueError, match="limit"):
        request(b"x" * (MAX_PAYLOAD + 1))
    with pytest.raises(ValueError, match="limit"):
        encode_frame(Kind.HELLO, TAG, 0, b"x" * (MAX_GREETING + 1))


def test_chunks_over_the_limit_are_refused_so_that_the_buffer_stays_bounded() -> None:
    with pytest.raises(ValueError, match="chunk"):
        FrameReader().feed(bytes(MAX_CHUNK + 1))


def test_frames_of_another_session_are_skipped() -> None:
    data = request(b"theirs", tag=TAG + 1) + request(b"ours")
    assert [frame.payload for frame in feed(FrameReader(tag=TAG), data)] == [b"ours"]


def test_a_header_of_another_session_holds_up_nothing() -> None:
    forged = request(b"x" * 60_000, tag=TAG + 1)[:HEADER_BYTES]
    assert [frame.payload for frame in feed(FrameReader(tag=TAG), forged + request(b"ours"))] == [b"ours"]


def test_hellos_of_any_session_are_taken_only_where_asked_for() -> None:
    hello = encode_frame(Kind.HELLO, TAG + 1, 0, b"{}")
    assert len(feed(FrameReader(tag=TAG, hellos=True), hello)) == 1
    assert feed(FrameReader(tag=TAG), hello) == []


@pytest.mark.parametrize("position", [0, 4, 5, 9, 20, HEADER_BYTES - 1, HEADER_BYTES, -1])
def test_one_flipped_bit_anywhere_loses_that_frame_and_no_other(position: int) -> None:
    broken = bytearray(request(b"first"))
    broken[position] ^= 1
    reader = FrameReader(tag=TAG)
    assert [frame.payload for frame in feed(reader, bytes(broken) + request(b"second"))] == [b"second"]


def test_a_payload_does_not_pass_behind_another_header() -> None:
    first, second = request(b"first"), request(b"other")
    assert feed(FrameReader(tag=TAG), first[:HEADER_BYTES] + second[HEADER_BYTES:]) != []
    other = encode_frame(Kind.DATA, TAG, 7, b"first")
    assert feed(FrameReader(tag=TAG), first[:HEADER_BYTES] + other[HEADER_BYTES:]) == []


def test_a_frame_swallowed_by_a_torn_one_is_found_once_the_torn_one_is_seen_to_be_damaged() -> None:
    reader = FrameReader(tag=TAG, hellos=True)
    torn = request(b"x" * 1000)[:100]
    hello = encode_frame(Kind.HELLO, TAG + 1, 0, b"{}")
    assert feed(reader, torn + hello) == []
    assert [frame.kind for frame in feed(reader, PADDING)] == [Kind.HELLO]
    assert reader.damaged == 1


def test_a_magic_cut_by_the_chunk_edge_is_kept() -> None:
    frame = request(b"x")
    for cut in range(1, len(frame)):
        reader = FrameReader(tag=TAG)
        assert feed(reader, b"garbage" + frame[:cut]) == []
        assert len(feed(reader, frame[cut:])) == 1
        assert reader.skipped == len(b"garbage")


def test_garbage_is_not_buffered() -> None:
    reader = FrameReader(tag=TAG)
    for _ in range(10):
        feed(reader, bytes(MAX_CHUNK))
        assert reader.buffered < len(MAGIC)
    feed(reader, MAGIC * 10_000)
    assert reader.buffered < HEADER_BYTES


def test_an_unfinished_frame_is_all_that_is_buffered() -> None:
    reader = FrameReader(tag=TAG)
    feed(reader, request(bytes(MAX_PAYLOAD))[:-1])
    assert reader.buffered == MAX_FRAME - 1


def test_file_that_looks_like_frames_is_not_found_inside_a_torn_one() -> None:
    forged = encode_frame(Kind.HELLO, 99, 0, b"{}") + encode_frame(Kind.REQUEST, 99, 1, b"forged")
    carrier = encode_frame(Kind.DATA, TAG, 7, forged)
    assert forged not in carrier
    reader = FrameReader(tag=TAG, hellos=True)
    assert feed(reader, carrier[:-1] + b"?" + bytes(8)) == []
    assert reader.damaged == 1
    whole = feed(FrameReader(tag=TAG), carrier)
    assert [frame.payload for frame in whole] == [forged]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, MAX_PAYLOAD])
def test_data_of_any_size_arrives_as_it_was(size: int) -> None:
    payload = bytes(n * 7 % 256 for n in range(size))
    data = encode_frame(Kind.DATA, TAG, 7, payload)
    assert [frame.payload for frame in feed(FrameReader(tag=TAG), data[:60_000] + data[60_000:])] == [payload]
