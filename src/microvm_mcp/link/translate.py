"""Between the wire's messages and the model that the engine knows. Everything has been checked by then."""

from __future__ import annotations

from microvm_mcp.model import GuestInfo, JobId, JobReport, JobRequest, JobState, OutputPage, RequestId, StreamPage
from microvm_mcp.wire import messages


def start_job(job: JobRequest, wait_s: float) -> messages.StartJob:
    return messages.StartJob(
        job_id=job.job_id,
        request_id=job.request_id,
        command=job.command,
        cwd=job.cwd,
        shell=messages.Shell(job.shell),
        env=tuple(job.env.items()),
        timeout_s=job.timeout_seconds,
        max_s=job.max_seconds,
        wait_s=wait_s,
    )


def guest_info(welcome: messages.Welcome) -> GuestInfo:
    return GuestInfo(welcome.version, welcome.supervisor, welcome.boot_id, welcome.active_jobs)


def job_report(job: messages.JobStatus) -> JobReport:
    return JobReport(
        job_id=JobId(job.job_id),
        request_id=RequestId(job.request_id),
        state=JobState(job.state.value),
        started_at=job.started_at,
        finished_at=job.finished_at,
        exit_code=job.exit_code,
        signal=job.signal,
        truncated=job.truncated,
        detached=job.detached,
        log_path=job.log_path,
        service_time_us=job.service_time_us,
    )


def output_page(output: messages.Output) -> OutputPage:
    return OutputPage(job_report(output.job), _stream_page(output.stdout), _stream_page(output.stderr))


def _stream_page(page: messages.Page) -> StreamPage:
    return StreamPage(page.offset, page.data, page.written, page.gap_from, page.gap_bytes)
