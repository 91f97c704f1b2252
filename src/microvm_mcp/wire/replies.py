"""Replies to and from the control object and data of a message, and whether a reply fits its request.

The guest is hostile: `parse_reply` checks types and ranges, `check_reply` that the answer is one to that very
question. Both raise only WireError; `encode_reply` raises LocalError.
"""

from __future__ import annotations

from microvm_mcp.wire.fields import Fields, LocalError, WireError, decode_json, encode_json
from microvm_mcp.wire.messages import (
    JOB_ID,
    LOG_PATH,
    MAX_DATA,
    MAX_JOBS,
    MAX_LOG_PATH,
    MAX_MESSAGE,
    MAX_PAGE,
    REQUEST_ID,
    CancelJob,
    Done,
    ErrorCode,
    FileContent,
    ForgetJob,
    Freeze,
    JobOutput,
    Jobs,
    JobState,
    JobStatus,
    ListJobs,
    OneJob,
    Output,
    Page,
    ReadFile,
    Refused,
    Reply,
    Request,
    SetClock,
    StartJob,
    Thaw,
    WriteFile,
    Written,
)

MAX_PROCESSES = 4_194_304
"""The kernel's own limit of pids."""
_MAX_TIME = 1e11
_STATES = {state.value: state for state in JobState}
_CODES = {code.value: code for code in ErrorCode}
_EXPECTED: dict[type[Request], type[Reply]] = {
    StartJob: Output,
    JobOutput: Output,
    ListJobs: Jobs,
    CancelJob: OneJob,
    ForgetJob: Done,
    ReadFile: FileContent,
    WriteFile: Written,
    SetClock: Done,
    Freeze: Done,
    Thaw: Done,
}


def encode_reply(reply: Reply) -> tuple[dict[str, object], bytes]:
    if isinstance(reply, Output):
        control = {
            "job": _job_document(reply.job),
            "stdout": _page_document(reply.stdout),
            "stderr": _page_document(reply.stderr),
        }
        return _bounded(control, reply.stdout.data + reply.stderr.data)
    if isinstance(reply, Jobs):
        return _bounded({"generation": reply.generation}, encode_json([_job_document(job) for job in reply.jobs]))
    if isinstance(reply, OneJob):
        return _bounded({"job": _job_document(reply.job)}, b"")
    if isinstance(reply, FileContent):
        return _bounded({"offset": reply.offset, "size": reply.size, "mode": reply.mode}, reply.data)
    if isinstance(reply, Written):
        return _bounded({"size": reply.size, "mode": reply.mode}, b"")
    return {}, b""


def parse_reply(request: Request, control: object, data: bytes) -> Reply:
    """The reply that `request` must have, already checked against it."""
    fields = Fields(control)
    expected = _EXPECTED[type(request)]
    reply: Reply
    if expected is Output:
        reply = _parse_output(fields, data)
    elif expected is Jobs:
        reply = Jobs(fields.integer("generation"), _parse_jobs(data))
    elif expected is FileContent:
        reply = FileContent(data, fields.integer("offset"), fields.integer("size"), _mode(fields))
    elif data:
        raise WireError("data behind a reply that has none")
    elif expected is OneJob:
        reply = OneJob(parse_job(fields.take("job")))
    elif expected is Written:
        reply = Written(fields.integer("size"), _mode(fields))
    else:
        reply = Done()
    fields.end()
    check_reply(request, reply)
    return reply


def check_reply(request: Request, reply: Reply) -> None:
    if isinstance(request, StartJob) and isinstance(reply, Output):
        if reply.job.request_id != request.request_id:
            raise WireError("answer for another request id")
        _check_output(reply, request.job_id, 0, 0, request.limit)
    elif isinstance(request, JobOutput) and isinstance(reply, Output):
        _check_output(reply, request.job_id, request.stdout, request.stderr, request.limit)
    elif isinstance(request, CancelJob) and isinstance(reply, OneJob):
        if reply.job.job_id != request.job_id:
            raise WireError("answer for another job")
    elif isinstance(request, ReadFile) and isinstance(reply, FileContent):
        left = max(0, reply.size - request.offset)
        if reply.offset != request.offset or len(reply.data) != min(request.length, left):
            raise WireError("file content of another place or length")
    elif isinstance(request, WriteFile) and isinstance(reply, Written):
        if reply.size != (request.offset or 0) + len(request.data):
            raise WireError("file written with another size")
    elif type(reply) is not _EXPECTED[type(request)]:
        raise WireError("answer to another question")


def refusal_document(refused: Refused) -> dict[str, object]:
    message = refused.message.encode(errors="replace")[:MAX_MESSAGE].decode(errors="ignore")
    return {"code": refused.code.value, "message": message}


def parse_refusal(control: object, data: bytes) -> Refused:
    fields = Fields(control)
    refused = Refused(fields.choice("code", _CODES), fields.text("message", max_bytes=MAX_MESSAGE))
    fields.end()
    if data or not refused.message.isprintable():
        raise WireError("error with data, or with an unprintable message")
    return refused


def parse_job(document: object) -> JobStatus:
    fields = Fields(document)
    job = JobStatus(
        job_id=fields.text("job_id", max_bytes=64, pattern=JOB_ID),
        request_id=fields.text("request_id", max_bytes=64, pattern=REQUEST_ID),
        state=fields.choice("state", _STATES),
        started_at=fields.number("started_at", 0, _MAX_TIME),
        finished_at=fields.optional_number("finished_at", 0, _MAX_TIME),
        exit_code=fields.optional_integer("exit_code", 0, 255),
        signal=fields.optional_integer("signal", 1, 64),
        truncated=fields.boolean("truncated"),
        detached=fields.integer("detached", 0, MAX_PROCESSES),
        log_path=fields.text("log_path", max_bytes=MAX_LOG_PATH, pattern=LOG_PATH),
        service_time_us=fields.optional_integer("service_time_us"),
    )
    fields.end()
    running = job.state is JobState.RUNNING
    if running != (job.finished_at is None) or (running and (job.exit_code, job.signal) != (None, None)):
        raise WireError("job: state and end do not agree")
    if not running and (job.exit_code is None) == (job.signal is None):
        raise WireError("job: over, but not by exactly one of exit code and signal")
    if not job.log_path.endswith(f"/{job.job_id}/output.log"):
        raise WireError("log_path: of another job")
    return job


def _job_document(job: JobStatus) -> dict[str, object]:
    return {**job._asdict(), "state": job.state.value}


def _page_document(page: Page) -> dict[str, int]:
    return {
        "offset": page.offset,
        "length": len(page.data),
        "written": page.written,
        "gap_from": page.gap_from,
        "gap_bytes": page.gap_bytes,
    }


def _parse_output(fields: Fields, data: bytes) -> Output:
    job = parse_job(fields.take("job"))
    stdout, rest = _parse_page(fields.take("stdout"), data)
    stderr, rest = _parse_page(fields.take("stderr"), rest)
    if rest:
        raise WireError("more data than the pages have")
    return Output(job, stdout, stderr)


def _parse_page(document: object, data: bytes) -> tuple[Page, bytes]:
    fields = Fields(document)
    length = fields.integer("length", 0, MAX_PAGE)
    page = Page(
        offset=fields.integer("offset"),
        data=data[:length],
        written=fields.integer("written"),
        gap_from=fields.integer("gap_from"),
        gap_bytes=fields.integer("gap_bytes"),
    )
    fields.end()
    if len(page.data) != length:
        raise WireError("less data than the pages have")
    return page, data[length:]


def _parse_jobs(data: bytes) -> tuple[JobStatus, ...]:
    documents = decode_json(data)
    if not isinstance(documents, list) or len(documents) > MAX_JOBS:
        raise WireError("jobs: not a list of bounded length")
    jobs = tuple(parse_job(document) for document in documents)
    if len({job.job_id for job in jobs}) != len(jobs):
        raise WireError("jobs: one of them twice")
    return jobs


def _check_output(output: Output, job_id: str, stdout: int, stderr: int, limit: int) -> None:
    if output.job.job_id != job_id:
        raise WireError("answer for another job")
    for page, asked in ((output.stdout, stdout), (output.stderr, stderr)):
        gap_end = page.gap_from + page.gap_bytes
        in_gap = page.gap_from <= asked < gap_end
        if page.offset != (gap_end if in_gap else asked):
            raise WireError("page of another offset")
        end = page.offset + len(page.data)
        if len(page.data) > limit or end > page.written or gap_end > page.written:
            raise WireError("page over its limit, or behind the end")
        if page.gap_bytes and page.offset < page.gap_from < end:
            raise WireError("page across the gap")
        if (
            limit
            and not page.data
            and page.offset < page.written
            and not (page.gap_bytes and page.offset == page.gap_from)
        ):
            raise WireError("empty page before the end")
    if output.job.truncated != bool(output.stdout.gap_bytes or output.stderr.gap_bytes):
        raise WireError("truncated without a gap, or the reverse")


def _mode(fields: Fields) -> int:
    return fields.integer("mode", 0, 0o7777)


def _bounded(control: dict[str, object], data: bytes) -> tuple[dict[str, object], bytes]:
    if len(data) > MAX_DATA:
        raise LocalError("reply over the limit of a message")
    return control, data
