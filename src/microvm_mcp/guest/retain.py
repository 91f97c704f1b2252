"""What is kept of a job's output: head and tail of both streams in 256 KiB together; the middle is forgotten.

Each stream is sure of a 64 KiB head and a 64 KiB tail; room that one stream does not use serves the other's tail
until it is needed. Offsets count from the stream's first byte and never change; what is kept and the gap make up
what was written, always.

Once a job is over for good its kept output moves into a file beside its log, so that 260 records cost no memory.
"""

from __future__ import annotations

import contextlib
import os

from microvm_mcp.wire.messages import Page

# Not pathlib: an emulated guest would pay more for importing it than for all of this package.
# ruff: noqa: PTH108

HEAD_BYTES = 65_536
STREAM_BYTES = 131_072
"""What each stream is sure of: head and tail."""
KEPT_BYTES = 2 * STREAM_BYTES
WORTH_A_FILE = 8_192


class PastEnd(Exception):
    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


class KeptStream:
    def __init__(self) -> None:
        self.written = 0
        self.kept = 0
        self._head_bytes = 0
        self._head = bytearray()
        self._tail = bytearray()
        self._file: tuple[str, int] | None = None
        """Path, and where in it the kept bytes begin, once they are no longer here."""

    @property
    def gap_bytes(self) -> int:
        return self.written - self.kept

    def append(self, data: bytes) -> None:
        self.written += len(data)
        self.kept += len(data)
        room = HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += data[:room]
            self._head_bytes = len(self._head)
            data = data[room:]
        self._tail += data

    def forget(self, count: int) -> None:
        """The oldest bytes of the tail."""
        del self._tail[:count]
        self.kept -= count

    def page(self, offset: int, limit: int) -> Page:
        """Up to `limit` bytes from `offset`, or from the end of the gap if that lies inside it."""
        if offset > self.written:
            raise PastEnd(self.written)
        gap_from, gap = self._head_bytes, self.gap_bytes
        if gap and gap_from <= offset < gap_from + gap:
            offset = gap_from + gap
        if gap and offset < gap_from:
            data = self._read(offset, min(limit, gap_from - offset))
        else:
            data = self._read(offset - gap if offset > gap_from else offset, limit)
        return Page(offset, data, self.written, gap_from, gap)

    def contents(self) -> bytes:
        return bytes(self._head + self._tail)

    def move_to(self, path: str, start: int) -> None:
        self._file = (path, start)
        self._head, self._tail = bytearray(), bytearray()

    def _read(self, position: int, count: int) -> bytes:
        """`position` counts kept bytes: the head's, then the tail's."""
        if self._file is not None:
            path, start = self._file
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return os.pread(fd, min(count, self.kept - position), start + position)
            finally:
                os.close(fd)
        in_tail = max(0, position - self._head_bytes)
        data = bytes(self._head[position : position + count])
        return data + self._tail[in_tail : in_tail + count - len(data)]


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

    def move_to_file(self, path: str) -> None:
        """For output that grows no more. Where the disk has no room for it, it stays in memory."""
        stdout, stderr = self.stdout.contents(), self.stderr.contents()
        if len(stdout) + len(stderr) < WORTH_A_FILE:
            return
        try:
            _write_new(path, stdout + stderr)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return
        self.stdout.move_to(path, 0)
        self.stderr.move_to(path, len(stdout))


def _write_new(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
