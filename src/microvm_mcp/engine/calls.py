"""Calls to a running guest other than starting a job: its jobs' output and end, and its files.

Each waits for a machine that is still being created, is bounded by the call's deadline, and turns what the guest
says or leaves unsaid into public errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from microvm_mcp.engine.certain import deadline, left
from microvm_mcp.engine.guest_errors import file_refused, guest_untrusted, no_answer
from microvm_mcp.engine.machine import Machine
from microvm_mcp.errors import FailedPrecondition, InvalidArguments, MicrovmError, NotFound, Unavailable
from microvm_mcp.link.port import GuestLied, GuestRefused, Link, LinkLost
from microvm_mcp.model import FINAL_JOB_STATES, FilePage, FileWritten, Job, JobId, JobReport, OutputPage, VmState

MEMORY_GONE = frozenset({VmState.STOPPING, VmState.STOPPED, VmState.FAILED, VmState.DESTROYING, VmState.DESTROYED})
"""Or going: nobody is asked any more."""


class _Forgotten(Exception):
    """The supervisor has no record of the job: it was restarted, and its memory is lost."""


def job_of(machine: Machine, job_id: JobId) -> Job:
    job = machine.book.get(job_id)
    if job is None:
        raise NotFound("Unknown job; vm_status lists the jobs of the machine.")
    return job


async def job_output(
    machine: Machine, job_id: JobId, *, stdout: int, stderr: int, limit: int, wait_s: float
) -> tuple[Job, OutputPage]:
    """From the guest; once its memory is gone, from what was fetched before."""
    job = job_of(machine, job_id)
    timeouts = machine.context.settings.timeouts
    if machine.vm.state in MEMORY_GONE:
        return job, await machine.output.read(job, stdout=stdout, stderr=stderr, limit=limit)
    link = await machine.ready(0)
    with machine.parked(min(wait_s, timeouts.call_s - timeouts.fetch_s)) as parked_s:
        try:
            async with _translated(machine, refused=lambda error: _no_output(machine, job_id, error), changes=""):
                page = await link.job_output(
                    job_id,
                    stdout=stdout,
                    stderr=stderr,
                    limit=limit,
                    wait_s=parked_s,
                    deadline_s=min(timeouts.call_s, parked_s + timeouts.answer_s),
                )
        except _Forgotten:
            job = job_of(machine, job_id)
            return job, await machine.output.read(job, stdout=stdout, stderr=stderr, limit=limit)
    await _record(machine, page.report)
    await machine.output.keep(page)
    return job_of(machine, job_id), page


async def cancel_job(machine: Machine, job_id: JobId) -> Job:
    job = job_of(machine, job_id)
    if machine.vm.state is not VmState.RUNNING and job.state in FINAL_JOB_STATES:
        return job
    link = await machine.ready(machine.context.settings.timeouts.answer_s)
    await machine.own(_cancel(machine, link, job_id))
    return job_of(machine, job_id)


async def _cancel(machine: Machine, link: Link, job_id: JobId) -> None:
    async with _translated(machine, refused=lambda _: _unknown_to_guest(machine, job_id), changes="ended the job"):
        report = await link.cancel_job(job_id, deadline_s=machine.context.settings.timeouts.cancel_s)
    await _record(machine, report)


async def read_file(machine: Machine, path: str, *, offset: int, length: int) -> FilePage:
    timeouts = machine.context.settings.timeouts
    until = deadline(timeouts.call_s)
    link = await machine.ready(timeouts.call_s - timeouts.file_s)
    async with _translated(machine, refused=lambda error: file_refused(error, writing=False), changes=""):
        return await link.read_file(
            path, offset=offset, length=length, deadline_s=min(left(until), timeouts.file_s)
        )


async def write_file(
    machine: Machine, path: str, data: bytes, *, offset: int | None, mode: int | None
) -> FileWritten:
    timeouts = machine.context.settings.timeouts
    until = deadline(timeouts.call_s)
    link = await machine.ready(timeouts.call_s - timeouts.file_s)

    async def write() -> FileWritten:
        async with _translated(
            machine, refused=lambda error: file_refused(error, writing=True), changes="written the file"
        ):
            return await link.write_file(
                path, data, offset=offset, mode=mode, deadline_s=min(left(until), timeouts.file_s)
            )

    return await machine.own(write())


@asynccontextmanager
async def _translated(
    machine: Machine, *, refused: Callable[[GuestRefused], Exception], changes: str
) -> AsyncIterator[None]:
    try:
        yield
    except GuestRefused as error:
        raise refused(error) from error
    except LinkLost as error:
        raise no_answer(error, changes=changes) from error
    except GuestLied as error:
        machine.distrust(error)
        raise guest_untrusted() from error


async def _record(machine: Machine, report: JobReport) -> None:
    now = machine.context.now()
    if machine.book.would_change(report, now):
        rows = await machine.context.db.write(lambda tx: machine.book.record(tx, [report], (), now))
        machine.book.show(rows)


def _no_output(machine: Machine, job_id: JobId, refused: GuestRefused) -> Exception:
    if refused.code == "invalid":
        return InvalidArguments.field("cursor", "is past the end of a stream; go on from a next_cursor")
    if refused.code == "not_found" and not machine.book.is_starting(job_id):
        return _Forgotten()
    return _unknown_to_guest(machine, job_id)


def _unknown_to_guest(machine: Machine, job_id: JobId) -> MicrovmError:
    if machine.book.is_starting(job_id):
        return Unavailable("The job is being started; repeat the call.")
    return FailedPrecondition(
        "The machine's supervisor was restarted and no longer has that job; its log file may still be there."
    )
