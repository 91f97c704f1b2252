"""What is kept of a job's output: head and tail of both streams in 256 KiB together; the middle is forgotten.

Each stream is sure of a 64 KiB head and a 64 KiB tail; room that one stream does not use serves the other's tail
until it is needed. Offsets count from the stream's first byte and never change; len(head) + gap + len(tail) is what
was written, always.
"""

from __future__ import annotations

from microvm_mcp.wire.messages import Page

HEAD_BYTES = 65_536
STREAM_BYTES = 131_072
"""What each stream is sure of: head and tail."""
KEPT_BYTES = 2 * STREAM_BYTES


class PastEnd(Exception):
    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


class KeptStream:
    def __init__(self) -> None:
        self.written = 0
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def kept(self) -> int:
        return len(self._head) + len(self._tail)

    @property
    def gap_bytes(self) -> int:
        return self.written - self.kept

    def append(self, data: bytes) -> None:
        self.written += len(data)
        room = HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data

    def forget(self, count: int) -> None:
        """The oldest bytes of the tail."""
        del self._tail[:count]

    def page(self, offset: int, limit: int) -> Page:
        """Up to `limit` bytes from `offset`, or from the end of the gap if that lies inside it."""
        if offset > self.written:
            raise PastEnd(self.written)
        gap_from, gap = len(self._head), self.gap_bytes
        if gap and gap_from <= offset < gap_from + gap:
            offset = gap_from + gap
        if offset < gap_from:
            data = bytes(self._head[offset : offset + limit])
            if not gap and len(data) < limit:
                data += self._tail[: limit - len(data)]
        else:
            start = offset - gap_from - gap
            data = bytes(self._tail[start : start + limit])
        return Page(offset, data, self.written, gap_from, gap)


class Retained:
    def __init__(self) -> None:
        self.stdout = KeptStream()
        self.stderr = KeptStream()

    @property
    def truncated(self) -> bool:
        return self.stdout.gap_bytes > 0 or self.stderr.gap_bytes > 0

    def append(self, stream: KeptStream, data: bytes) -> None:
        stream.append(data)
        over = self.stdout.kept + self.stderr.kept - KEPT_BYTES
        for candidate in (self.stdout, self.stderr):
            give = min(over, candidate.kept - STREAM_BYTES)
            if give > 0:
                candidate.forget(give)
                over -= give
