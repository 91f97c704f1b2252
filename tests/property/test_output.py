"""For any bytes, any page sizes and any gap: pages in a row decode to what the whole decodes to."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from microvm_mcp.model import StreamPage
from microvm_mcp.output import render_page

# Mostly text and the bytes that make decoding hard, so that sequences are cut and broken often.
FRAGMENTS = st.one_of(
    st.text(max_size=8).map(lambda text: text.encode("utf-8", "replace")),
    st.sampled_from(
        [b"\xf0\x9f\x98\x80", b"\xef\xbf\xbd", b"\xe2\x82", b"\xf0\x9f", b"\xed\xa0", b"\x80", b"\xef"]
    ),
    st.binary(max_size=6),
)
STREAMS = st.lists(FRAGMENTS, max_size=30).map(b"".join)


def read(kept: bytes, start: int, sizes: list[int], written: int, gap: tuple[int, int]) -> tuple[str, int, int]:
    """All pages of one contiguous piece that nothing will be added to; text, errors and the last cursor."""
    text, errors, cursor, turn = "", 0, start, 0
    while True:
        size = sizes[turn % len(sizes)]
        turn += 1
        data = kept[cursor - start :][:size]
        out = render_page(StreamPage(cursor, data, written, *gap), final=True, encoding="utf-8")
        text += out.text
        errors += out.decoding_errors
        if out.next_offset == cursor:
            return text, errors, cursor
        assert cursor < out.next_offset <= cursor + len(data)
        cursor = out.next_offset


def replaced(data: bytes) -> int:
    """Ill-formed maximal subparts, counted by a decoder that stops at each of them."""
    count = 0
    while data:
        try:
            data.decode("utf-8", "strict")
        except UnicodeDecodeError as error:
            count += 1
            data = data[error.end :]
        else:
            break
    return count


@given(stream=STREAMS, sizes=st.lists(st.integers(4, 40), min_size=1, max_size=8))
def test_pages_concatenate_to_the_decoding_of_the_whole(stream: bytes, sizes: list[int]) -> None:
    text, errors, cursor = read(stream, 0, sizes, len(stream), (0, 0))
    assert text == stream.decode("utf-8", "replace")
    assert errors == replaced(stream)
    assert cursor == len(stream)


@given(
    head=STREAMS,
    lost=st.integers(1, 1000),
    tail=STREAMS,
    sizes=st.lists(st.integers(4, 40), min_size=1, max_size=8),
)
def test_nothing_is_decoded_across_a_gap(head: bytes, lost: int, tail: bytes, sizes: list[int]) -> None:
    written, gap = len(head) + lost + len(tail), (len(head), lost)
    before = read(head, 0, sizes, written, gap)
    behind = read(tail, len(head) + lost, sizes, written, gap)
    assert before == (head.decode("utf-8", "replace"), replaced(head), len(head))
    assert behind == (tail.decode("utf-8", "replace"), replaced(tail), written)


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_a_live_stream_read_as_it_grows_decodes_to_the_same_text(stream: bytes, cuts: list[int]) -> None:
    text, errors, cursor = "", 0, 0
    steps = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for _, written in pairwise([0, *steps]):
        out = render_page(StreamPage(cursor, stream[cursor:written], written, 0, 0), final=False, encoding="utf-8")
        text, errors, cursor = text + out.text, errors + out.decoding_errors, out.next_offset
    last = render_page(StreamPage(cursor, stream[cursor:], len(stream), 0, 0), final=True, encoding="utf-8")
    assert text + last.text == stream.decode("utf-8", "replace")
    assert errors + last.decoding_errors == replaced(stream)
    assert last.next_offset == len(stream)
