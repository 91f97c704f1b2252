"""Requests to and from the control object and data of a message. Both directions check every bound.

`encode_request` raises LocalError, `parse_request` WireError, nothing else.
"""

from __future__ import annotations

from microvm_mcp.wire.fields import MAX_INTEGER, Fields, LocalError, WireError
from microvm_mcp.wire.messages import (
    JOB_ID,
    MAX_COMMAND,
    MAX_DATA,
    MAX_ENV_BYTES,
    MAX_ENV_ENTRIES,
    MAX_PAGE,
    MAX_PATH,
    MAX_SECONDS,
    MAX_WAIT_S,
    REQUEST_ID,
    CancelJob,
    ForgetJob,
    Freeze,
    JobOutput,
    ListJobs,
    ReadFile,
    Request,
    SetClock,
    Shell,
    StartJob,
    Thaw,
    WriteFile,
)

_SHELLS = {shell.value: shell for shell in Shell}
_OPS: dict[type[Request], str] = {
    StartJob: "start_job",
    JobOutput: "job_output",
    ListJobs: "list_jobs",
    CancelJob: "cancel_job",
    ForgetJob: "forget_job",
    ReadFile: "read_file",
    WriteFile: "write_file",
    SetClock: "set_clock",
    Freeze: "freeze",
    Thaw: "thaw",
}
OPERATIONS: tuple[str, ...] = tuple(_OPS.values())


def encode_request(request: Request) -> tuple[dict[str, object], bytes]:
    """Parses its own result, so that what we refuse to receive we cannot send either."""
    try:
        control, data = _write(request)
        if parse_request(control, data) != request:
            raise LocalError("a request does not survive its own encoding")
    except (WireError, UnicodeEncodeError) as error:
        raise LocalError(f"request cannot be sent: {error}") from error
    return control, data


def _write(request: Request) -> tuple[dict[str, object], bytes]:
    control: dict[str, object] = {"op": _OPS[type(request)]}
    control.update(request._asdict())
    data = b""
    if isinstance(request, StartJob):
        entries = [f"{name}={value}" for name, value in request.env]
        data = b"\0".join(text.encode() for text in (request.command, *entries))
        control["shell"] = request.shell.value
        del control["command"], control["env"]
    elif isinstance(request, WriteFile):
        data = request.data
        del control["data"]
    return control, data


def parse_request(control: object, data: bytes) -> Request:
    fields = Fields(control)
    op = fields.take("op")
    request: Request
    if op == "start_job":
        request = _parse_start(fields, data)
    elif op == "write_file":
        request = WriteFile(
            path=_path(fields, "path"),
            data=data,
            offset=fields.optional_integer("offset"),
            mode=fields.optional_integer("mode", 0, 0o777),
        )
    elif data:
        raise WireError("data behind a request that has none")
    elif op == "job_output":
        request = JobOutput(
            job_id=_job_id(fields),
            stdout=fields.integer("stdout"),
            stderr=fields.integer("stderr"),
            limit=fields.integer("limit", 0, MAX_PAGE),
            wait_s=fields.number("wait_s", 0, MAX_WAIT_S),
        )
    elif op == "list_jobs":
        generation = fields.integer("generation", -1, MAX_INTEGER)
        request = ListJobs(generation, fields.number("wait_s", 0, MAX_WAIT_S))
    elif op == "cancel_job":
        request = CancelJob(_job_id(fields))
    elif op == "forget_job":
        request = ForgetJob(_job_id(fields))
    elif op == "read_file":
        request = ReadFile(_path(fields, "path"), fields.integer("offset"), fields.integer("length", 0, MAX_DATA))
    elif op == "set_clock":
        request = SetClock(fields.integer("now_ns", 1))
    elif op == "freeze":
        request = Freeze()
    elif op == "thaw":
        request = Thaw()
    else:
        raise WireError("op: unknown")
    fields.end()
    return request


def _parse_start(fields: Fields, data: bytes) -> StartJob:
    command, env = _parse_command(data)
    return StartJob(
        job_id=_job_id(fields),
        request_id=fields.text("request_id", max_bytes=64, pattern=REQUEST_ID),
        command=command,
        cwd=_path(fields, "cwd"),
        shell=fields.choice("shell", _SHELLS),
        env=env,
        timeout_s=fields.optional_integer("timeout_s", 1, MAX_SECONDS),
        max_s=fields.integer("max_s", 1, MAX_SECONDS),
        wait_s=fields.number("wait_s", 0, MAX_WAIT_S),
        limit=fields.integer("limit", 0, MAX_PAGE),
    )


def _parse_command(data: bytes) -> tuple[str, tuple[tuple[str, str], ...]]:
    command, *entries = data.split(b"\0")
    if len(command) > MAX_COMMAND:
        raise WireError(f"command: over {MAX_COMMAND} bytes")
    if len(entries) > MAX_ENV_ENTRIES or sum(map(len, entries)) > MAX_ENV_BYTES:
        raise WireError(f"env: over {MAX_ENV_ENTRIES} entries or {MAX_ENV_BYTES} bytes")
    env = []
    try:
        text = command.decode()
        for entry in entries:
            name, equals, value = entry.decode().partition("=")
            if not name or not equals:
                raise WireError("env: an entry without a name")
            env.append((name, value))
    except UnicodeDecodeError as error:
        raise WireError("command or env: not UTF-8") from error
    return text, tuple(env)


def _job_id(fields: Fields) -> str:
    return fields.text("job_id", max_bytes=64, pattern=JOB_ID)


def _path(fields: Fields, name: str) -> str:
    path = fields.text(name, max_bytes=MAX_PATH)
    if not path or "\0" in path:
        raise WireError(f"{name}: empty, or with a NUL byte")
    return path
