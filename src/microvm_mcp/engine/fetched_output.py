"""Output of one machine's jobs as far as it was fetched: kept while the guest lives, read when its memory is gone.

Keeping costs no durable commit and no call fails because of it: the pages outlive the service, but a host that
loses power may lose the newest.
"""

from __future__ import annotations

import logging
import sqlite3

from microvm_mcp.engine.context import Store
from microvm_mcp.errors import MicrovmError
from microvm_mcp.model import Job, JobId, JobReport, OutputPage, StreamPage, WorkspaceName
from microvm_mcp.output import is_complete
from microvm_mcp.store import fetched

logger = logging.getLogger(__name__)

_REMEMBERED = 256
_NOTHING = StreamPage(0, b"", 0, 0, 0)

_Told = tuple[int, int, bool]
_Spans = tuple[int, int, int, int]


class FetchedOutput:
    def __init__(self, db: Store, workspace: WorkspaceName) -> None:
        self._db = db
        self._workspace = workspace
        self._last: dict[JobId, tuple[_Told, _Spans]] = {}
        """The page of each job that was kept last, without its bytes: looking again and again writes nothing."""

    async def keep(self, page: OutputPage) -> None:
        job_id, (told, spans) = page.report.job_id, _what_it_tells(page)
        last = self._last.get(job_id)
        empty = not (page.stdout.data or page.stderr.data)
        if last is not None and last[0] == told and (empty or last[1] == spans):
            return
        try:
            await self._db.write_lazily(lambda tx: self.record(tx, page))
        except MicrovmError as error:
            logger.warning("fetched output not kept job=%s: %s", job_id, error)
            return
        self.remember(page)

    def record(self, tx: sqlite3.Connection, page: OutputPage) -> None:
        """In a transaction that is made anyway; `remember` once it is over."""
        fetched.keep(tx, self._workspace, page)

    def remember(self, page: OutputPage) -> None:
        self._last.pop(page.report.job_id, None)
        self._last[page.report.job_id] = _what_it_tells(page)
        if len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]

    async def read(self, job: Job, *, stdout: int, stderr: int, limit: int) -> OutputPage:
        """What is left of a job whose guest is gone; `truncated` unless it is known to be all."""
        found = await self._db.read(
            lambda tx: fetched.read(tx, job.job_id, stdout=stdout, stderr=stderr, limit=limit)
        )
        pages = (_NOTHING, _NOTHING) if found is None else (found.stdout, found.stderr)
        whole = found is not None and found.complete and not any(page.gap_bytes for page in pages)
        report = JobReport(
            job_id=job.job_id,
            request_id=job.request_id,
            state=job.state,
            started_at=job.started_at,
            finished_at=job.finished_at,
            exit_code=job.exit_code,
            signal=job.signal,
            truncated=job.truncated or not whole,
            detached=job.detached,
            log_path=job.log_path,
        )
        return OutputPage(report, *pages)


def _what_it_tells(page: OutputPage) -> tuple[_Told, _Spans]:
    stdout, stderr = page.stdout, page.stderr
    told = (stdout.written, stderr.written, is_complete(page.report))
    return told, (stdout.offset, len(stdout.data), stderr.offset, len(stderr.data))
