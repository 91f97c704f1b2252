"""Starting a job: two commits and one round trip, and the truth about a start whose answer was lost.

    receipt sent, job's row (running)                 durable   the intent, with the id that the host chose
    start_job ──▶ guest ──▶ first page                          asked again by the same id if the answer is lost
    job's row as reported, receipt done               durable

A guest that refuses gets row and receipt taken back. Only what stays unanswered after it may have been sent is
unknown: then the receipt stays `sent` and the row stays, until a report of the guest or its end settles it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from microvm_mcp.engine.certain import deadline, left
from microvm_mcp.engine.guest_errors import start_refused
from microvm_mcp.engine.machine import Machine
from microvm_mcp.errors import Busy, FailedPrecondition, MicrovmError, OutcomeUnknown, Unavailable
from microvm_mcp.link.port import GuestLied, GuestRefused, Link, LinkLost
from microvm_mcp.model import (
    FINAL_JOB_STATES,
    Job,
    JobId,
    JobRequest,
    JobState,
    OutputPage,
    ReceiptClaim,
    ReceiptPhase,
    VmState,
)
from microvm_mcp.output import PAGE_BYTES
from microvm_mcp.store import jobs as job_rows
from microvm_mcp.store import receipts as receipt_rows
from microvm_mcp.store import vms as vm_rows

logger = logging.getLogger(__name__)

_AGAIN_S = 0.1
"""Before a lost start is asked for again; the link has tried to attach anew by then."""


class _Unanswered(Exception):
    def __init__(self, *, sent: bool) -> None:
        super().__init__()
        self.sent = sent


async def start_job(
    machine: Machine, request: JobRequest, receipt: ReceiptClaim, *, wait_s: float
) -> tuple[Job, OutputPage]:
    timeouts = machine.context.settings.timeouts
    until = deadline(timeouts.call_s)
    link = await machine.ready(timeouts.call_s - timeouts.answer_s)
    return await machine.own(_start(machine, link, request, receipt, min(wait_s, timeouts.call_s), until))


async def resolve_job(machine: Machine, job_id: JobId) -> Job | None:
    """The job if the guest is known to have it; None where that cannot be known (any more)."""
    timeouts = machine.context.settings.timeouts
    book = machine.book
    if book.is_starting(job_id):
        await book.wait_started(job_id, timeouts.call_s)
    if job_id in book.unconfirmed and machine.vm.state is VmState.RUNNING:
        link = await machine.ready(0)
        try:
            await machine.own(machine.poll_jobs(link, -1, 0))
        except GuestLied as error:
            machine.distrust(error)
        except (LinkLost, GuestRefused) as error:
            logger.info("a lost start stays unknown vm=%s job=%s: %s", machine.vm.vm_id, job_id, error)
    job = book.get(job_id)
    # A lost one that the guest had confirmed has a receipt that is done, and is not asked for here.
    if job is None or job.state is JobState.LOST or job_id in book.unconfirmed or book.is_starting(job_id):
        return None
    return job


async def _start(
    machine: Machine, link: Link, request: JobRequest, receipt: ReceiptClaim, wait_s: float, until: float
) -> tuple[Job, OutputPage]:
    job = Job(
        job_id=request.job_id,
        vm_id=machine.vm.vm_id,
        workspace=machine.vm.workspace,
        request_id=request.request_id,
        state=JobState.RUNNING,
        started_at=machine.context.now(),
        timeout_seconds=request.timeout_seconds,
    )
    waited_until = deadline(wait_s)
    displaced = await _reserve(machine, link, job)
    confirmed = False
    try:
        await _announce(machine, job, receipt, displaced)
        if displaced is not None:
            await _forget(machine, link, displaced, until)
        page = await _send(
            machine, link, request, min(wait_s, machine.context.settings.timeouts.first_wait_s), until
        )
        job = await _confirm(machine, job, page)
        confirmed = True
    except GuestRefused as refused:
        logger.info("start refused vm=%s job=%s code=%s: %s", job.vm_id, job.job_id, refused.code, refused)
        await _take_back(machine, job)
        raise start_refused(refused) from refused
    except GuestLied as error:
        machine.distrust(error)
        raise _unknown() from error
    except _Unanswered as error:
        if error.sent:
            raise _unknown() from error
        await _take_back(machine, job)
        raise Unavailable(
            "The guest does not answer, nothing was started; repeat the call, vm_status tells its state."
        ) from error
    finally:
        machine.book.release(job.job_id, confirmed=confirmed)
    if job.state not in FINAL_JOB_STATES and left(waited_until) > 0:
        return await _wait_for_end(machine, link, job, page, left(waited_until), until)
    return job, page


async def _reserve(machine: Machine, link: Link, job: Job) -> Job | None:
    try:
        return machine.book.reserve(job)
    except Busy:
        # One of the active jobs may have ended a moment ago: ask before refusing.
        try:
            await machine.poll_jobs(link, -1, 0)
        except GuestLied as error:
            machine.distrust(error)
        except (LinkLost, GuestRefused):
            pass
        return machine.book.reserve(job)


async def _announce(machine: Machine, job: Job, receipt: ReceiptClaim, displaced: Job | None) -> None:
    """Durable before the guest hears of it."""

    def announce(tx: sqlite3.Connection) -> None:
        vm = vm_rows.get(tx, job.vm_id)
        if vm is None or vm.state is not VmState.RUNNING:
            raise FailedPrecondition("The machine stopped running just now; vm_status says why.")
        receipt_rows.claim(
            tx,
            job.workspace,
            job.request_id,
            receipt,
            ReceiptPhase.SENT,
            now=job.started_at,
            vm_id=job.vm_id,
            job_id=job.job_id,
        )
        if displaced is not None:
            job_rows.delete(tx, displaced.job_id)
        job_rows.insert(tx, job)

    try:
        await machine.context.db.write(announce)
    except receipt_rows.ReceiptTaken as error:
        if displaced is not None:
            machine.book.put_back(displaced)
        raise Busy("Another call with this request_id is being executed; repeat the call to join it.") from error
    except MicrovmError:
        if displaced is not None:
            machine.book.put_back(displaced)
        raise
    machine.book.add(job)


async def _forget(machine: Machine, link: Link, displaced: Job, until: float) -> None:
    try:
        await link.forget_job(displaced.job_id, deadline_s=_answer_s(machine, until))
    except (LinkLost, GuestRefused) as error:
        # The next report of jobs shows it again, as one without a row, and it is forgotten then.
        logger.info("record not forgotten vm=%s job=%s: %s", machine.vm.vm_id, displaced.job_id, error)


async def _send(machine: Machine, link: Link, request: JobRequest, wait_s: float, until: float) -> OutputPage:
    timeouts = machine.context.settings.timeouts
    give_up = min(until, deadline(wait_s + 2 * timeouts.answer_s))
    sent = False
    while True:
        try:
            return await link.start_job(
                request, wait_s=wait_s, deadline_s=min(left(give_up), wait_s + timeouts.answer_s)
            )
        except LinkLost as lost:
            sent = sent or lost.sent
            if left(give_up) <= _AGAIN_S or machine.vm.state is not VmState.RUNNING:
                raise _Unanswered(sent=sent) from lost
            await asyncio.sleep(_AGAIN_S)
            if sent and not await _is_same_supervisor(machine, link, left(give_up)):
                raise _Unanswered(sent=True) from lost


async def _is_same_supervisor(machine: Machine, link: Link, within_s: float) -> bool:
    """Only the one that was asked first knows whether the command has run; another would run it again."""
    before = machine.guest
    try:
        machine.guest = await link.hello(deadline_s=within_s)
    except (LinkLost, GuestRefused):
        return False
    return before is not None and before.boot_id == machine.guest.boot_id


async def _confirm(machine: Machine, job: Job, page: OutputPage) -> Job:
    now = machine.context.now()

    def confirm(tx: sqlite3.Connection) -> list[Job]:
        rows = machine.book.record(tx, [page.report], (), now)
        machine.output.record(tx, page)
        return rows

    try:
        rows = await machine.context.db.write(confirm)
    except MicrovmError as error:
        # It runs, but that is not on record: what a crash right here would leave as well.
        raise _unknown() from error
    machine.book.show(rows)
    machine.output.remember(page)
    return machine.book.get(job.job_id) or (rows[0] if rows else job)


async def _take_back(machine: Machine, job: Job) -> None:
    """Nothing was started: the same request may be tried again."""

    def take_back(tx: sqlite3.Connection) -> None:
        job_rows.delete(tx, job.job_id)
        receipt_rows.take_back(tx, job.workspace, job.request_id, job.job_id)

    await machine.context.db.write(take_back)
    machine.book.take_back(job.job_id)


async def _wait_for_end(
    machine: Machine, link: Link, job: Job, page: OutputPage, wait_s: float, until: float
) -> tuple[Job, OutputPage]:
    """The job watcher tells of the end; then the output so far is fetched once more."""
    with machine.parked(min(wait_s, max(0.0, left(until) - machine.context.settings.timeouts.fetch_s))) as parked_s:
        await machine.book.wait_final(job.job_id, parked_s)
    job = machine.book.get(job.job_id) or job
    try:
        page = await link.job_output(
            job.job_id,
            stdout=0,
            stderr=0,
            limit=PAGE_BYTES,
            wait_s=0,
            deadline_s=_answer_s(machine, until),
        )
        await machine.output.keep(page)
    except GuestLied as error:
        machine.distrust(error)
    except (LinkLost, GuestRefused) as error:
        # The job is on record; what it wrote can be asked for again.
        logger.info("no output yet vm=%s job=%s: %s", machine.vm.vm_id, job.job_id, error)
    return job, page


def _answer_s(machine: Machine, until: float) -> float:
    return min(machine.context.settings.timeouts.answer_s, left(until))


def _unknown() -> OutcomeUnknown:
    return OutcomeUnknown(
        "The guest did not confirm the start, so that the command may have run; vm_status.jobs shows it if it did."
    )
