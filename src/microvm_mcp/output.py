"""Job output as a caller sees it: pages of a byte stream as text or base64, with a cursor that never slips.

A page's text is what Python's incremental UTF-8 decoder with `errors="replace"` makes of it: one U+FFFD per maximal
subpart of an ill-formed sequence, as the Unicode standard recommends (3.9, "U+FFFD substitution of maximal
subparts"). Whether bytes are ill-formed depends on nothing after the byte that breaks them, so pages can be decoded
one by one and their concatenation is the decoding of the whole. That takes pages of at least 4 bytes: the longest
sequence that may have to wait has 3.

Bytes that may still become a character stay behind the cursor and come with the next page. They no longer can at
the start of a gap and at the end of a stream to which nothing will be added. Nothing here does I/O.
"""

from __future__ import annotations

import base64
import codecs
from dataclasses import dataclass
from typing import Literal

from microvm_mcp.model import FINAL_JOB_STATES, JobReport, StreamPage

Encoding = Literal["utf-8", "base64"]

PAGE_BYTES = 16 * 1024
"""Per stream and call."""

_REPLACEMENT = "\ufffd"
_REPLACEMENT_UTF8 = _REPLACEMENT.encode()


@dataclass(frozen=True, slots=True)
class RenderedStream:
    """One stream of one page. Everything before `next_offset` has been delivered or is in the gap."""

    text: str
    """Decoded text, or base64 of the raw bytes."""
    next_offset: int
    decoding_errors: int
    """U+FFFD in `text` that stand for undecodable bytes; 0 for base64."""
    omitted_from: int
    omitted_bytes: int
    """The forgotten middle of the whole stream, wherever this page lies."""


def is_complete(report: JobReport) -> bool:
    """Whether nothing will be added to the job's streams: it is over, and so is whatever it left running."""
    return report.state in FINAL_JOB_STATES and report.detached == 0


def render_page(page: StreamPage, *, final: bool, encoding: Encoding) -> RenderedStream:
    """`final`: nothing will be added to this stream any more (`is_complete`)."""
    if encoding == "base64":
        text, consumed, errors = base64.b64encode(page.data).decode("ascii"), len(page.data), 0
    else:
        text, consumed, errors = _decode(page.data, nothing_follows=_ends(page, final))
    return RenderedStream(
        text=text,
        next_offset=page.offset + consumed,
        decoding_errors=errors,
        omitted_from=page.gap_from,
        omitted_bytes=page.gap_bytes,
    )


def _ends(page: StreamPage, final: bool) -> bool:
    """Whether the byte after this page's last one is in the gap, or will never be written."""
    end = page.offset + len(page.data)
    return (page.gap_bytes > 0 and end == page.gap_from) or (final and end >= page.written)


def _decode(data: bytes, *, nothing_follows: bool) -> tuple[str, int, int]:
    """Text, bytes consumed, and how many U+FFFD the decoder put in.

    The program's own U+FFFD are counted by their bytes: EF only ever leads a sequence, so wherever EF BF BD stands
    in the input the decoder starts anew at it and makes exactly one U+FFFD of it.
    """
    text, consumed = codecs.utf_8_decode(data, "replace", nothing_follows)
    return text, consumed, text.count(_REPLACEMENT) - data[:consumed].count(_REPLACEMENT_UTF8)
