"""Requests and replies: what passes, what is refused, and that a reply must fit its question."""

from __future__ import annotations

import pytest

from microvm_mcp.wire.fields import Fields, LocalError, WireError, decode_json
from microvm_mcp.wire.messages import (
    MAX_COMMAND,
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
    Shell,
    StartJob,
    Thaw,
    WriteFile,
    Written,
)
from microvm_mcp.wire.replies import encode_reply, parse_job, parse_refusal, parse_reply, refusal_document
from microvm_mcp.wire.requests import encode_request, parse_request

START = StartJob("job-1", "r.1", "echo ü; true\n", ".", Shell.LOGIN, (("A", "b=c"), ("E", "")), 5, 60, 1.5)
JOB = JobStatus(
    job_id="job-1",
    request_id="r.1",
    state=JobState.COMPLETED,
    started_at=1.0,
    finished_at=2.0,
    exit_code=0,
    signal=None,
    truncated=False,
    detached=0,
    log_path="/var/lib/microvm/jobs/job-1/output.log",
    service_time_us=10,
)
EMPTY = Page(0, b"", 0, 0, 0)
READ = ReadFile("a", 2, 4)
WRITE = WriteFile("a", b"abc", None, None)
OUTPUT = JobOutput("job-1", 0, 0, 100, 0.0)


@pytest.mark.parametrize(
    "request_",
    [
        START,
        START._replace(env=(), timeout_s=None, shell=Shell.PLAIN, command=""),
        JobOutput("job-1", 0, 5, 100, 0.5),
        ListJobs(-1, 60.0),
        CancelJob("job-1"),
        ForgetJob("job-1"),
        READ,
        WriteFile("ä/b", bytes(131_072), 5, 0o755),
        WRITE,
        SetClock(1),
        Freeze(),
        Thaw(),
    ],
)
def test_requests_come_out_as_they_went_in(request_: Request) -> None:
    parsed = parse_request(*encode_request(request_))
    assert parsed == request_
    assert type(parsed) is type(request_)


@pytest.mark.parametrize(
    "request_",
    [
        START._replace(command="a\0b"),
        START._replace(command="a\0B=c", env=()),
        START._replace(command="\ud800"),
        START._replace(command="x" * (MAX_COMMAND + 1)),
        START._replace(env=(("A=B", "c"),)),
        START._replace(env=(("", "c"),)),
        START._replace(env=(("A", "b\0c"),)),
        START._replace(env=tuple((f"N{n}", "") for n in range(65))),
        START._replace(env=(("A", "x" * 32_768),)),
        START._replace(job_id="../x"),
        START._replace(job_id="a.b"),
        START._replace(job_id=""),
        START._replace(request_id="with space"),
        START._replace(timeout_s=0),
        START._replace(max_s=0),
        START._replace(wait_s=61.0),
        START._replace(wait_s=float("nan")),
        START._replace(cwd=""),
        START._replace(cwd="a\0b"),
        ReadFile("x" * 4097, 0, 1),
        ReadFile("a", -1, 1),
        ReadFile("a", 0, 131_073),
        ReadFile("\udcff", 0, 1),
        WriteFile("a", b"", -1, None),
        WriteFile("a", b"", None, 0o1000),
        ListJobs(-2, 0.0),
        SetClock(0),
        SetClock(2**63),
    ],
)
def test_what_the_other_side_would_refuse_is_not_sent(request_: Request) -> None:
    with pytest.raises(LocalError):
        encode_request(request_)


@pytest.mark.parametrize(
    ("control", "data"),
    [
        ([], b""),
        ({}, b""),
        ({"op": "reboot"}, b""),
        ({"op": ["freeze"]}, b""),
        ({"op": "freeze", "more": 1}, b""),
        ({"op": "freeze"}, b"data"),
        ({"op": "cancel_job"}, b""),
        ({"op": "cancel_job", "job_id": 5}, b""),
        ({"op": "set_clock", "now_ns": True}, b""),
        ({"op": "set_clock", "now_ns": 1.0}, b""),
        ({"op": "set_clock", "now_ns": None}, b""),
        ({"op": "list_jobs", "generation": 0, "wait_s": "1"}, b""),
        ({"op": "list_jobs", "generation": 0, "wait_s": True}, b""),
        ({**encode_request(START)[0], "shell": "fish"}, b""),
        (encode_request(START)[0], b"\xff"),
        (encode_request(START)[0], b"true\0NOEQUALS"),
    ],
)
def test_malformed_requests_are_refused(control: object, data: bytes) -> None:
    with pytest.raises(WireError):
        parse_request(control, data)


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (START, Output(JOB, EMPTY, EMPTY)),
        (OUTPUT, Output(JOB._replace(truncated=True), Page(0, b"abc", 300, 3, 200), Page(0, b"x", 1, 1, 0))),
        (OUTPUT._replace(stdout=50), Output(JOB._replace(truncated=True), Page(203, b"a", 300, 3, 200), EMPTY)),
        (ListJobs(-1, 0.0), Jobs(3, (JOB,))),
        (CancelJob("job-1"), OneJob(JOB._replace(state=JobState.CANCELLED, exit_code=None, signal=9))),
        (ForgetJob("job-1"), Done()),
        (READ, FileContent(b"cd", 2, 4, 0o4755)),
        (READ, FileContent(b"", 2, 1, 0o644)),
        (WRITE, Written(3, 0o644)),
        (WRITE._replace(offset=7), Written(10, 0o644)),
        (SetClock(1), Done()),
    ],
)
def test_replies_come_out_as_they_went_in(request_: Request, reply: Reply) -> None:
    parsed = parse_reply(request_, *encode_reply(reply))
    assert parsed == reply
    assert type(parsed) is type(reply)


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (START, Output(JOB._replace(request_id="other"), EMPTY, EMPTY)),
        (OUTPUT, Output(JOB._replace(job_id="job-2", log_path="/jobs/job-2/output.log"), EMPTY, EMPTY)),
        (OUTPUT, Output(JOB, Page(1, b"b", 2, 2, 0), EMPTY)),
        (OUTPUT, Output(JOB, Page(0, b"ab", 1, 1, 0), EMPTY)),
        (OUTPUT, Output(JOB, Page(0, b"", 1, 1, 0), EMPTY)),
        (OUTPUT, Output(JOB, Page(0, b"x" * 101, 101, 101, 0), EMPTY)),
        (OUTPUT, Output(JOB, Page(0, b"abc", 300, 3, 200), EMPTY)),
        (OUTPUT, Output(JOB._replace(truncated=True), EMPTY, EMPTY)),
        (OUTPUT, Output(JOB._replace(truncated=True), Page(0, b"abcd", 300, 3, 200), EMPTY)),
        (OUTPUT, Output(JOB._replace(truncated=True), Page(0, b"abc", 100, 3, 200), EMPTY)),
        (OUTPUT._replace(stdout=50), Output(JOB._replace(truncated=True), Page(50, b"a", 300, 3, 200), EMPTY)),
        (CancelJob("job-2"), OneJob(JOB)),
        (READ, FileContent(b"abcde", 2, 100, 0o644)),
        (READ, FileContent(b"abc", 2, 100, 0o644)),
        (READ, FileContent(b"abcd", 3, 100, 0o644)),
        (WRITE, Written(4, 0o644)),
        (ListJobs(-1, 0.0), Jobs(1, (JOB, JOB))),
        (Freeze(), OneJob(JOB)),
        (CancelJob("job-1"), Done()),
    ],
)
def test_a_reply_that_does_not_fit_its_question_is_a_lie(request_: Request, reply: Reply) -> None:
    with pytest.raises(WireError):
        parse_reply(request_, *encode_reply(reply))


@pytest.mark.parametrize(
    "change",
    [
        {"state": "lost"},
        {"state": "running"},
        {"finished_at": None},
        {"exit_code": None},
        {"signal": 9},
        {"exit_code": 256},
        {"exit_code": True},
        {"started_at": float("inf")},
        {"started_at": "1"},
        {"detached": -1},
        {"truncated": 1},
        {"log_path": "/etc/passwd"},
        {"log_path": "/var/lib/../job-1/output.log"},
        {"log_path": "/var/lib/microvm/jobs/job-2/output.log"},
        {"more": 1},
    ],
)
def test_job_reports_that_cannot_be_true_are_refused(change: dict[str, object]) -> None:
    document = {**JOB._asdict(), "state": "completed"}
    assert parse_job(dict(document)) == JOB
    with pytest.raises(WireError):
        parse_job({**document, **change})


def test_a_refusal_is_cut_to_its_limit_and_stays_text() -> None:
    document = refusal_document(Refused(ErrorCode.FAILED, "ü" * 600 + "\ud800"))
    assert parse_refusal(document, b"") == Refused(ErrorCode.FAILED, "ü" * 256)


@pytest.mark.parametrize(
    "document",
    [
        {"code": "nope", "message": ""},
        {"code": "busy", "message": "\x1b[2J"},
        {"code": "busy", "message": "x" * 513},
    ],
)
def test_unfit_refusals_are_refused(document: dict[str, object]) -> None:
    with pytest.raises(WireError):
        parse_refusal(document, b"")


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff", b'{"a":1,"a":2}', b'{"a":NaN}', b"[" * 50_000, b'{"a":' + b"9" * 5000 + b"}"],
)
def test_json_that_readers_disagree_on_is_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode_json(raw)


def test_surrogates_that_json_smuggles_in_are_refused() -> None:
    with pytest.raises(WireError):
        Fields(decode_json(b'{"a":"\\ud800"}')).text("a", max_bytes=10)
