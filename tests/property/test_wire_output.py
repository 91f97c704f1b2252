"""Kept output against a plain model: bytes at their offsets, kept + omitted = written, bounded, memory or file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microvm_mcp.guest.retain import HEAD_BYTES, KEPT_BYTES, STREAM_BYTES, PastEnd, Retained

PATTERN = bytes(range(251)) * 300


def content(stream: str, offset: int, length: int) -> bytes:
    """Byte n of a stream, for every n: 251 is prime to every size in the code."""
    shift = (offset + (100 if stream == "stderr" else 0)) % 251
    return PATTERN[shift : shift + length]


writes = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.one_of(st.integers(1, 300), st.integers(1, 65_536))),
    max_size=30,
)


@given(writes, st.lists(st.tuples(st.integers(0, 2**21), st.integers(0, 65_536)), max_size=8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_byte_that_is_given_out_is_at_its_offset(
    steps: list[tuple[str, int]], asked: list[tuple[int, int]], in_file: bool
) -> None:
    kept = Retained()
    written = {"stdout": 0, "stderr": 0}
    for name, length in steps:
        kept.append(getattr(kept, name), content(name, written[name], length))
        written[name] += length
    with tempfile.TemporaryDirectory() as directory:
        if in_file:
            kept.move_to_file(str(Path(directory) / "kept"))
        assert kept.stdout.kept + kept.stderr.kept <= KEPT_BYTES
        assert kept.truncated == any(getattr(kept, name).gap_bytes for name in written)
        for name, total in written.items():
            stream = getattr(kept, name)
            assert stream.kept >= min(total, STREAM_BYTES)
            for offset, limit in [(0, 65_536), (total, 1), (HEAD_BYTES, 10), *asked]:
                if offset > total:
                    with pytest.raises(PastEnd):
                        stream.page(offset, limit)
                    continue
                page = stream.page(offset, limit)
                gap_end = page.gap_from + page.gap_bytes
                assert page.written == total
                assert page.offset == (gap_end if page.gap_from <= offset < gap_end else offset)
                assert page.data == content(name, page.offset, len(page.data))
                edge = page.gap_from if page.gap_bytes and page.offset < page.gap_from else total
                assert len(page.data) == min(limit, edge - page.offset)
            cursor, seen = 0, 0
            while (page := stream.page(cursor, 65_536)).data:
                seen += len(page.data)
                cursor = page.offset + len(page.data)
            assert (cursor, seen + page.gap_bytes) == (total, total)
            assert seen == stream.kept


def test_room_that_one_stream_does_not_need_serves_the_tail_of_the_other() -> None:
    kept = Retained()
    for _ in range(20):
        kept.append(kept.stdout, bytes(65_536))
    kept.append(kept.stderr, bytes(1000))
    assert (kept.stdout.kept, kept.stderr.kept) == (KEPT_BYTES - 1000, 1000)
    for _ in range(20):
        kept.append(kept.stderr, bytes(65_536))
    assert (kept.stdout.kept, kept.stderr.kept) == (STREAM_BYTES, STREAM_BYTES)


def test_output_that_finds_no_room_on_the_disk_stays_in_memory(tmp_path: Path) -> None:
    kept = Retained()
    kept.append(kept.stdout, content("stdout", 0, 60_000))
    kept.move_to_file(str(tmp_path / "missing" / "kept"))
    assert kept.stdout.page(100, 50).data == content("stdout", 100, 50)
