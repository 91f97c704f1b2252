"""Use cases on jobs: start, look, read output, cancel. Waiting ends with the call's budget, the job goes on."""

from __future__ import annotations

import asyncio

from microvm_mcp.errors import InvalidArguments, NotFound
from microvm_mcp.model import (
    FINAL_JOB_STATES,
    Job,
    JobId,
    JobRequest,
    JobState,
    OutputPage,
    Receipt,
    ReceiptClaim,
    VmId,
)
from microvm_mcp.output import PAGE_BYTES, Encoding, RenderedStream, is_complete, render_page
from microvm_mcp.service import results
from microvm_mcp.service.call import Call
from microvm_mcp.service.ids import new_job_id
from microvm_mcp.service.receipts import key_of
from microvm_mcp.service.schemas import Cursor, VmExec, VmJobCancel, VmJobOutput, VmJobStatus

_REREAD_PAUSE_S = 0.1
"""Between two looks at a job that writes while we wait for something else: a flood costs ten reads a second."""


async def execute(call: Call, arguments: VmExec) -> results.JobStarted:
    vm_id = VmId(arguments.vm_id)
    call.engine.view(call.workspace, vm_id)  # a foreign or unknown id is refused before anything is written
    _refuse_long_timeout(call, arguments.timeout_seconds)

    async def run(receipt: ReceiptClaim) -> results.JobStarted:
        request = JobRequest(
            job_id=new_job_id(),
            request_id=key.request_id,
            command=arguments.command,
            cwd=arguments.cwd,
            shell=arguments.shell,
            env=dict(arguments.env or {}),
            timeout_seconds=arguments.timeout_seconds,
            max_seconds=call.settings.max_job_seconds,
        )
        wait_s = call.left(arguments.wait_seconds)
        job, page = await call.engine.start_job(call.workspace, vm_id, request, receipt, wait_s=wait_s)
        return _started(job, page if arguments.wait_seconds else None)

    async def replay(receipt: Receipt) -> results.JobStarted:
        if receipt.job_id is None:
            raise RuntimeError("a finished receipt of vm_exec has no job_id")
        try:
            job = await call.engine.job(call.workspace, vm_id, receipt.job_id)
        except NotFound as error:
            raise NotFound(
                "The job of this request_id has ended and its record made room for newer ones; it is not run again."
            ) from error
        if not arguments.wait_seconds:
            return _started(job, None)
        return _started(*await _wait_for_end(call, vm_id, job.job_id, call.left(arguments.wait_seconds)))

    key = key_of(call.workspace, "vm_exec", arguments.request_id, arguments)
    return await call.receipts.once(key, run=run, replay=replay, left=call.left_for_others)


async def status(call: Call, arguments: VmJobStatus) -> results.JobStatus:
    vm_id = VmId(arguments.vm_id)
    job = await call.engine.job(call.workspace, vm_id, JobId(arguments.job_id))
    return results.job_status(job, call.engine.view(call.workspace, vm_id).vm.state)


async def cancel(call: Call, arguments: VmJobCancel) -> results.JobStatus:
    vm_id = VmId(arguments.vm_id)
    job = await call.engine.cancel_job(call.workspace, vm_id, JobId(arguments.job_id))
    return results.job_status(job, call.engine.view(call.workspace, vm_id).vm.state)


async def output(call: Call, arguments: VmJobOutput) -> results.JobOutput:
    vm_id, job_id, cursor = VmId(arguments.vm_id), JobId(arguments.job_id), arguments.cursor
    until = call.clock.monotonic() + call.left(arguments.wait_seconds)
    wait_s = until - call.clock.monotonic()
    while True:
        page = await _read(call, vm_id, job_id, cursor, wait_s)
        stdout, stderr = _render(page, arguments.encoding)
        moved = stdout.next_offset != cursor.stdout or stderr.next_offset != cursor.stderr
        left = until - call.clock.monotonic()
        if moved or page.report.state in FINAL_JOB_STATES or left <= 0:
            return _output(page, stdout, stderr, arguments.encoding)
        # What there is may still become a character: wait for the byte behind it, then read again.
        await _wait_for_more(call, vm_id, job_id, page, left)
        wait_s = 0.0


async def _read(call: Call, vm_id: VmId, job_id: JobId, cursor: Cursor, wait_s: float) -> OutputPage:
    _, page = await call.engine.job_output(
        call.workspace, vm_id, job_id, stdout=cursor.stdout, stderr=cursor.stderr, limit=PAGE_BYTES, wait_s=wait_s
    )
    for name, asked, written in (
        ("stdout", cursor.stdout, page.stdout.written),
        ("stderr", cursor.stderr, page.stderr.written),
    ):
        if asked > written:
            raise InvalidArguments.field(f"cursor.{name}", f"is past the end of the stream, which is at {written}")
    return page


async def _wait_for_end(call: Call, vm_id: VmId, job_id: JobId, wait_s: float) -> tuple[Job, OutputPage]:
    """The first page, once the job has ended or the time is up."""
    until = call.clock.monotonic() + wait_s
    while True:
        job, page = await call.engine.job_output(
            call.workspace, vm_id, job_id, stdout=0, stderr=0, limit=PAGE_BYTES, wait_s=0.0
        )
        left = until - call.clock.monotonic()
        if page.report.state in FINAL_JOB_STATES or left <= 0:
            return job, page
        await _wait_for_more(call, vm_id, job_id, page, left)


async def _wait_for_more(call: Call, vm_id: VmId, job_id: JobId, page: OutputPage, left: float) -> None:
    started = call.clock.monotonic()
    await call.engine.job_output(
        call.workspace,
        vm_id,
        job_id,
        stdout=page.stdout.written,
        stderr=page.stderr.written,
        limit=PAGE_BYTES,
        wait_s=left,
    )
    spent = call.clock.monotonic() - started
    await asyncio.sleep(max(0.0, min(_REREAD_PAUSE_S, left) - spent))


def _render(page: OutputPage, encoding: Encoding) -> tuple[RenderedStream, RenderedStream]:
    final = is_complete(page.report)
    stdout = render_page(page.stdout, final=final, encoding=encoding)
    return stdout, render_page(page.stderr, final=final, encoding=encoding)


def _output(
    page: OutputPage, stdout: RenderedStream, stderr: RenderedStream, encoding: Encoding
) -> results.JobOutput:
    report = page.report
    fields: dict[str, object] = {
        "job_id": report.job_id,
        "state": report.state,
        "exit_code": report.exit_code,
        "encoding": encoding,
        "next_cursor": {"stdout": stdout.next_offset, "stderr": stderr.next_offset},
        "omitted": {
            "stdout": {"from": stdout.omitted_from, "bytes": stdout.omitted_bytes},
            "stderr": {"from": stderr.omitted_from, "bytes": stderr.omitted_bytes},
        },
        "truncated": report.truncated,
        "timed_out": report.state is JobState.TIMED_OUT,
        "log_path": report.log_path,
    }
    if encoding == "base64":
        fields |= {"stdout_base64": stdout.text, "stderr_base64": stderr.text}
    else:
        errors = {"stdout": stdout.decoding_errors, "stderr": stderr.decoding_errors}
        fields |= {"stdout": stdout.text, "stderr": stderr.text, "decoding_errors": errors}
    return results.JobOutput.model_validate(fields)


def _started(job: Job, page: OutputPage | None) -> results.JobStarted:
    if page is None:
        return results.JobStarted(job_id=job.job_id, state=job.state)
    seen = _output(page, *_render(page, "utf-8"), "utf-8")
    fields: dict[str, object] = seen.model_dump(exclude_unset=True)
    if page.report.service_time_us is not None:
        fields["service_time_us"] = page.report.service_time_us
    return results.JobStarted.model_validate(fields)


def _refuse_long_timeout(call: Call, timeout_seconds: int | None) -> None:
    longest = call.settings.max_job_seconds
    if timeout_seconds is not None and timeout_seconds > longest:
        raise InvalidArguments.field("timeout_seconds", f"must be at most {longest}, this host's limit for jobs")
