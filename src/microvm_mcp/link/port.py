"""The link port: typed calls to the supervisor of one machine, as the engine sees them.

The guest is hostile: whatever comes back has been checked for type, range and id, and everything has a deadline.
Connections are disposable, jobs are durable: an implementation reconnects by itself within the deadline of the
call, with a new hello, and tells the two ways of failing apart.
"""

from __future__ import annotations

from typing import Protocol

from microvm_mcp.model import FilePage, FileWritten, GuestInfo, JobId, JobReport, JobRequest, JobsReport, OutputPage


class LinkLost(Exception):
    """No answer. `sent`: the request may have reached the supervisor (its outcome is unknown)."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class GuestRefused(Exception):
    """The supervisor answered with an error. `code` is one of `wire.messages.ErrorCode`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class GuestLied(Exception):
    """The guest's frames or answers break the protocol; the machine cannot be trusted to be ours to talk to."""


class Link(Protocol):
    """All calls raise LinkLost, GuestRefused or GuestLied. `deadline_s` is seconds from now."""

    async def hello(self, *, deadline_s: float) -> GuestInfo:
        """Attach, or attach anew; keeps trying until the deadline (a booting guest is silent at first)."""

    async def start_job(self, job: JobRequest, *, wait_s: float, deadline_s: float) -> OutputPage:
        """Idempotent by job id: the same id again returns the job that runs. Waits up to `wait_s` for its end."""

    async def job_output(
        self, job_id: JobId, *, stdout: int, stderr: int, limit: int, wait_s: float, deadline_s: float
    ) -> OutputPage:
        """A page of each stream, at most `limit` bytes; waits up to `wait_s` for something new to read."""

    async def list_jobs(self, *, generation: int, wait_s: float, deadline_s: float) -> JobsReport:
        """All jobs. With `generation` the one last seen, waits up to `wait_s` for a change; -1 answers at once."""

    async def cancel_job(self, job_id: JobId, *, deadline_s: float) -> JobReport:
        """Returns when nothing of the job's cgroup is left. Repeating is harmless."""

    async def forget_job(self, job_id: JobId, *, deadline_s: float) -> None:
        """Drop the record and the log file of a finished job. Unknown ids are no error."""

    async def read_file(self, path: str, *, offset: int, length: int, deadline_s: float) -> FilePage: ...

    async def write_file(
        self, path: str, data: bytes, *, offset: int | None, mode: int | None, deadline_s: float
    ) -> FileWritten: ...

    async def set_clock(self, now_ns: int, *, deadline_s: float) -> None:
        """Step the guest's wall clock to `now_ns` (nanoseconds since the epoch) plus the time on the way."""

    async def freeze(self, *, deadline_s: float) -> None:
        """Freeze the user subtree and stop the timeout clocks."""

    async def thaw(self, *, deadline_s: float) -> None:
        """Give each timeout what it had left, then thaw, then check timeouts again."""

    async def close(self) -> None: ...
