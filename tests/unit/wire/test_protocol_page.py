"""docs/protocol.md against the code: every operation, field, kind, code and limit."""

from __future__ import annotations

import re
from pathlib import Path

from microvm_mcp.guest.cgroup import MAX_PROCESSES
from microvm_mcp.guest.jobs import MAX_ACTIVE
from microvm_mcp.guest.options import Options
from microvm_mcp.guest.retain import KEPT_BYTES
from microvm_mcp.wire import frames, messages
from microvm_mcp.wire.messages import (
    CancelJob,
    Done,
    ErrorCode,
    FileContent,
    ForgetJob,
    Freeze,
    JobOutput,
    Jobs,
    ListJobs,
    OneJob,
    Output,
    ReadFile,
    Reply,
    Request,
    SetClock,
    Shell,
    StartJob,
    Thaw,
    WriteFile,
    Written,
)
from microvm_mcp.wire.replies import _EXPECTED, encode_reply
from microvm_mcp.wire.requests import OPERATIONS, encode_request
from tests.unit.wire.test_messages import EMPTY, JOB

PAGE = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
REQUESTS: tuple[Request, ...] = (
    StartJob("j", "r", "true", ".", Shell.LOGIN, (), None, 5, 0.0),
    JobOutput("j", 0, 0, 10, 0.0),
    ListJobs(-1, 0.0),
    CancelJob("j"),
    ForgetJob("j"),
    ReadFile("a", 0, 10),
    WriteFile("a", b"x", None, None),
    SetClock(1),
    Freeze(),
    Thaw(),
)
REPLIES: dict[str, Reply] = {
    "output": Output(JOB, EMPTY, EMPTY),
    "jobs": Jobs(1, (JOB,)),
    "job": OneJob(JOB),
    "file": FileContent(b"", 0, 0, 0),
    "written": Written(0, 0),
    "done": Done(),
}


def table(head: str) -> list[list[str]]:
    lines = PAGE[PAGE.index(f"\n{head}") + 1 :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_operation_is_there_with_its_fields_and_its_reply() -> None:
    documented = {words(row[0])[0]: row for row in table("| op |")}
    assert list(documented) == list(OPERATIONS)
    for request in REQUESTS:
        control, data = encode_request(request)
        row = documented[str(control.pop("op"))]
        assert sorted(words(row[1])) == sorted(control)
        assert bool(row[2]) == bool(data)
        assert type(REPLIES[row[3]]) is _EXPECTED[type(request)]
        nullable = {field for field, value in control.items() if value is None}
        assert set(re.findall(r"`(\w+)` \(or null\)", row[1])) == nullable


def test_every_reply_is_there_with_its_fields() -> None:
    documented = {row[0]: sorted(words(row[1])) for row in table("| reply | fields")}
    assert documented == {name: sorted(encode_reply(reply)[0]) for name, reply in REPLIES.items()}
    output, _ = encode_reply(REPLIES["output"])
    for part in ("job", "stdout"):
        shape = output[part]
        assert isinstance(shape, dict)
        assert "{" + ", ".join(shape) + "}" in " ".join(PAGE.split())


def test_every_kind_and_code_is_there() -> None:
    assert {row[0]: int(row[1]) for row in table("| kind |")} == {kind.name: int(kind) for kind in frames.Kind}
    assert [words(row[0])[0] for row in table("| code |")] == [code.value for code in ErrorCode]


def test_every_limit_is_the_codes() -> None:
    numbers = {row[0]: [int(number) for number in re.findall(r"\d+", row[1])] for row in table("| what | limit |")}
    assert numbers == {
        "payload of a frame": [frames.MAX_PAYLOAD],
        "payload of a HELLO or WELCOME": [frames.MAX_GREETING],
        "data of a message": [messages.MAX_DATA],
        "waiting requests": [messages.MAX_WAITING],
        "command": [messages.MAX_COMMAND],
        "environment": [messages.MAX_ENV_ENTRIES, messages.MAX_ENV_BYTES],
        "path": [messages.MAX_PATH],
        "one stream in one page": [messages.MAX_PAGE],
        "`wait_s`": [int(messages.MAX_WAIT_S)],
        "job records": [messages.MAX_JOBS],
        "active jobs": [MAX_ACTIVE],
        "processes of a job": [MAX_PROCESSES],
        "kept output of a job": [KEPT_BYTES],
        "log file of a job": [int(Options().log_limit)],
    }


def test_magic_layout_and_version_are_the_codes() -> None:
    assert f"`{frames.MAGIC.hex(' ')}`" in PAGE
    assert f"version ({messages.WIRE_VERSION})" in PAGE
    layout = next(line.strip() for line in PAGE.splitlines() if line.startswith("    magic"))
    assert layout in (frames.__doc__ or "")
    sizes = [int(size) for size in re.findall(r"\d+", layout)]
    assert sum(sizes[:-1]) == frames.HEADER_BYTES
    assert sum(sizes) + frames.MAX_PAYLOAD == frames.MAX_FRAME
