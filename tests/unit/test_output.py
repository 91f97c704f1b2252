"""Pages of job output: the contract's rules of `vm_job_output` one by one."""

from __future__ import annotations

import base64
import dataclasses

import pytest

from microvm_mcp.model import JobId, JobReport, JobState, RequestId, StreamPage
from microvm_mcp.output import is_complete, render_page

REPORT = JobReport(
    job_id=JobId("job-1"),
    request_id=RequestId("r"),
    state=JobState.COMPLETED,
    started_at=1.0,
    finished_at=2.0,
    exit_code=0,
    signal=None,
    truncated=False,
    detached=0,
    log_path="/x",
)


def page(data: bytes, *, offset: int = 0, written: int | None = None, gap: tuple[int, int] = (0, 0)) -> StreamPage:
    written = offset + len(data) if written is None else written
    return StreamPage(offset=offset, data=data, written=written, gap_from=gap[0], gap_bytes=gap[1])


def test_blanks_and_line_ends_are_untouched() -> None:
    raw = " \t\r\n\n a \r\x00\x1b[0m \n"
    assert render_page(page(raw.encode()), final=True, encoding="utf-8").text == raw


def test_bytes_that_may_become_a_character_wait_at_a_page_edge() -> None:
    whole = "aé€😀".encode()
    for cut in range(1, len(whole)):
        out = render_page(page(whole[:cut], written=len(whole)), final=True, encoding="utf-8")
        assert out.decoding_errors == 0
        assert whole[: out.next_offset].decode() == out.text


def test_bytes_that_may_become_a_character_wait_at_the_head_of_a_live_stream() -> None:
    out = render_page(page(b"ok\xf0\x9f\x98"), final=False, encoding="utf-8")
    assert (out.text, out.next_offset, out.decoding_errors) == ("ok", 2, 0)


def test_incomplete_bytes_at_the_end_of_a_final_job_are_errors() -> None:
    out = render_page(page(b"ok\xf0\x9f\x98"), final=True, encoding="utf-8")
    assert (out.text, out.next_offset, out.decoding_errors) == ("ok\ufffd", 5, 1)


def test_incomplete_bytes_before_a_gap_are_errors_though_the_stream_is_live() -> None:
    out = render_page(page(b"ok\xe2\x82", written=900, gap=(4, 100)), final=False, encoding="utf-8")
    assert (out.text, out.next_offset, out.decoding_errors) == ("ok\ufffd", 4, 1)
    assert (out.omitted_from, out.omitted_bytes) == (4, 100)


def test_continuation_bytes_behind_a_gap_are_errors_each() -> None:
    out = render_page(page(b"\x82\xacok", offset=104, written=900, gap=(4, 100)), final=False, encoding="utf-8")
    assert (out.text, out.next_offset, out.decoding_errors) == ("\ufffd\ufffdok", 108, 2)


def test_replacement_characters_of_the_program_raise_no_error() -> None:
    out = render_page(page("a\ufffdb\ufffd".encode() + b"\xff"), final=True, encoding="utf-8")
    assert (out.text, out.decoding_errors) == ("a\ufffdb\ufffd\ufffd", 1)


@pytest.mark.parametrize(
    ("raw", "text", "errors"),
    [
        (b"\xed\xa0\x80", "\ufffd" * 3, 3),  # a surrogate: ED only takes 80..9F
        (b"\xc0\xaf", "\ufffd" * 2, 2),  # overlong
        (b"\xf4\x90\x80\x80", "\ufffd" * 4, 4),  # past U+10FFFF
        (b"\xf0\x9f\xef\xbf\xbd", "\ufffd\ufffd", 1),  # a maximal subpart, then the program's own U+FFFD
        (b"\xe2\x28\xa1", "\ufffd(\ufffd", 2),
    ],
)
def test_each_maximal_subpart_becomes_one_replacement(raw: bytes, text: str, errors: int) -> None:
    out = render_page(page(raw), final=True, encoding="utf-8")
    assert (out.text, out.decoding_errors) == (text, errors)


def test_base64_delivers_every_byte_and_counts_no_errors() -> None:
    raw = bytes(range(256))
    out = render_page(page(raw, offset=7), final=False, encoding="base64")
    assert base64.b64decode(out.text) == raw
    assert (out.next_offset, out.decoding_errors) == (7 + 256, 0)


def test_an_empty_page_moves_nothing() -> None:
    for final in (True, False):
        out = render_page(page(b"", offset=9, written=9), final=final, encoding="utf-8")
        assert (out.text, out.next_offset, out.decoding_errors) == ("", 9, 0)


def test_a_job_is_complete_only_when_nothing_of_it_runs_any_more() -> None:
    assert is_complete(REPORT)
    assert not is_complete(dataclasses.replace(REPORT, detached=1))
    assert not is_complete(dataclasses.replace(REPORT, state=JobState.RUNNING))
