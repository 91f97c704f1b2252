"""The jobs of one machine in memory: what views show, how many may run, and what a guest's report changes.

Rows here follow the store: a change is durable first. `merge` alone decides what a report may change; the guest is
hostile, so that reports never invent jobs, never rename them, never set times outside the job's life as the host
knows it, and never take back a final state.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import replace

from microvm_mcp.errors import Busy, ResourceExhausted
from microvm_mcp.model import FINAL_JOB_STATES, Job, JobId, JobReport, JobState, Vm
from microvm_mcp.store import jobs as job_rows
from microvm_mcp.store import receipts as receipt_rows

MAX_DETACHED = 100_000
"""More processes than any guest can have."""


def merge(job: Job, report: JobReport, now: float) -> Job:
    """The row after a report. A lost job that the guest still knows was not lost after all."""
    told = replace(job, detached=min(report.detached, MAX_DETACHED), truncated=job.truncated or report.truncated)
    told = replace(told, log_path=job.log_path or report.log_path)
    if job.state in FINAL_JOB_STATES and job.state is not JobState.LOST:
        return told
    told = replace(told, state=report.state)
    if report.state not in FINAL_JOB_STATES:
        return replace(told, finished_at=None)
    finished_at = now if report.finished_at is None else min(max(report.finished_at, job.started_at), now)
    return replace(told, finished_at=finished_at, exit_code=report.exit_code, signal=report.signal)


class JobBook:
    def __init__(self, vm: Vm, rows: Iterable[Job], *, max_active: int, max_records: int) -> None:
        self._vm = vm
        self._max_active = max_active
        self._max_records = max_records
        self._rows: dict[JobId, Job] = {job.job_id: job for job in rows}
        self._starting: dict[JobId, Job] = {}
        """Between the reservation of a place and the guest's answer."""
        self.unconfirmed: set[JobId] = {job.job_id for job in self.active()}
        """Running as far as the rows say; whether the guest ever got them is not known (receipt `sent`)."""
        self._changed = asyncio.Event()
        self.watched = asyncio.Event()
        self._refresh_watch()

    def rows(self) -> tuple[Job, ...]:
        return tuple(self._rows.values())

    def get(self, job_id: JobId) -> Job | None:
        return self._rows.get(job_id)

    def active(self) -> list[Job]:
        return [job for job in self._rows.values() if job.state is JobState.RUNNING]

    def awake_because(self) -> tuple[str, ...]:
        reasons = []
        for job in self._rows.values():
            if job.state is JobState.RUNNING:
                reasons.append(f"job {job.job_id}")
            elif job.detached:
                reasons.append(f"{job.detached} processes left running by job {job.job_id}")
        return tuple(reasons)

    # Places.

    def reserve(self, job: Job) -> Job | None:
        """Take a place for a job that is about to start; the record that it displaces, taken out of the book.

        No await between the check and the reservation: two callers cannot share the last place.
        """
        active = {one.job_id for one in self.active()} | self._starting.keys()
        if len(active) >= self._max_active:
            named = sorted(active)
            raise Busy(
                f"{len(active)} jobs are active, the most that one machine runs: {', '.join(named)}; wait for one "
                "or cancel it.",
                details={"active_jobs": list(named)},
            )
        new = [one for one in self._starting if one not in self._rows]
        displaced: Job | None = None
        if len(self._rows) + len(new) >= self._max_records:
            displaced = self._oldest_finished()
            del self._rows[displaced.job_id]
        self._starting[job.job_id] = job
        return displaced

    def _oldest_finished(self) -> Job:
        over = [job for job in self._rows.values() if job.state in FINAL_JOB_STATES and not job.detached]
        if not over:
            raise ResourceExhausted(
                f"All {self._max_records} job records are of jobs that run or left processes running; cancel some.",
                details={"limit": "job_records", "allowed": self._max_records},
            )
        return min(over, key=lambda job: (job.finished_at or job.started_at, job.started_at))

    def put_back(self, displaced: Job) -> None:
        """Its removal did not become durable."""
        self._rows = {displaced.job_id: displaced, **self._rows}

    def add(self, job: Job) -> None:
        """Durable now."""
        self._rows[job.job_id] = job

    def release(self, job_id: JobId, *, confirmed: bool) -> None:
        """The start is over. Not confirmed: the row stays, its fate is open."""
        self._starting.pop(job_id, None)
        if not confirmed and job_id in self._rows:
            self.unconfirmed.add(job_id)
        self._notify()

    def take_back(self, job_id: JobId) -> None:
        """The guest refused it, and the row is gone."""
        self._rows.pop(job_id, None)

    def is_starting(self, job_id: JobId) -> bool:
        return job_id in self._starting

    def settled_active(self) -> frozenset[JobId]:
        """Those whose absence from a report that is asked for from now on means that they are lost."""
        return frozenset(job.job_id for job in self.active() if job.job_id not in self._starting)

    # Reports.

    def would_change(self, report: JobReport, now: float) -> bool:
        job = self._rows.get(report.job_id)
        if job is None:
            return False
        return report.job_id in self.unconfirmed or merge(job, report, now) != job

    def is_stray(self, report: JobReport) -> bool:
        """A finished job of which nothing is on record any more."""
        known = report.job_id in self._rows or report.job_id in self._starting
        return not known and report.state in FINAL_JOB_STATES and report.detached == 0

    def record(
        self, tx: sqlite3.Connection, reports: Iterable[JobReport], missing: Iterable[JobId], now: float
    ) -> list[Job]:
        """In a transaction: rows as they are after these reports, receipts of confirmed jobs done."""
        changed = []
        for report in reports:
            job = job_rows.get_owned(tx, self._vm.workspace, self._vm.vm_id, report.job_id)
            if job is None:
                continue
            told = merge(job, report, now)
            job_rows.update(tx, told)
            receipt_rows.finish(tx, told.workspace, told.request_id, told.job_id, now=now)
            changed.append(told)
        for job_id in missing:
            job = job_rows.get_owned(tx, self._vm.workspace, self._vm.vm_id, job_id)
            if job is not None and job.state is JobState.RUNNING:
                lost = replace(job, state=JobState.LOST, finished_at=now, detached=0)
                job_rows.update(tx, lost)
                changed.append(lost)
        return changed

    def show(self, rows: Iterable[Job]) -> None:
        """Rows that are durable now, in the order of their transactions."""
        for job in rows:
            if job.job_id in self._rows:
                self._rows[job.job_id] = job
            if job.state is not JobState.LOST:
                self.unconfirmed.discard(job.job_id)
        self._notify()

    def reload(self, rows: Iterable[Job]) -> None:
        """All rows anew, after the machine's memory was lost."""
        self._rows = {job.job_id: job for job in rows}
        self._notify()

    async def wait_final(self, job_id: JobId, wait_s: float) -> None:
        """Until the job is in a final state or gone, at most `wait_s`."""

        def is_over() -> bool:
            job = self._rows.get(job_id)
            return job is None or job.state in FINAL_JOB_STATES

        await self._wait_for(is_over, wait_s)

    async def wait_started(self, job_id: JobId, wait_s: float) -> None:
        """Until the start of the job is over, one way or the other, at most `wait_s`."""
        await self._wait_for(lambda: job_id not in self._starting, wait_s)

    async def _wait_for(self, holds: Callable[[], bool], wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._refresh_watch()

    def _refresh_watch(self) -> None:
        # A job that is starting has a request of its own in the guest; watching it as well would only slow it down.
        if any(
            job.detached or (job.state is JobState.RUNNING and job.job_id not in self._starting)
            for job in self._rows.values()
        ):
            self.watched.set()
        else:
            self.watched.clear()
