"""Good and bad arguments of every tool: what is taken, what is refused under which code, that nothing is echoed."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

import pytest

from microvm_mcp.errors import FailedPrecondition, InvalidArguments, MicrovmError, TooLarge
from microvm_mcp.service import catalog

VM = {"vm_id": "vm-x"}
JOB = {"vm_id": "vm-x", "job_id": "job-x"}
EXEC = {"vm_id": "vm-x", "request_id": "r", "command": "true"}
WRITE = {"vm_id": "vm-x", "path": "f", "content_base64": ""}
CREATE = {"request_id": "r"}


def b64(size: int) -> str:
    return base64.b64encode(bytes(size)).decode()


GOOD: list[tuple[str, Mapping[str, object]]] = [
    ("vm_create", CREATE),
    ("vm_create", {"request_id": "A.z:_-" + "9" * 58, "memory_mib": 512, "vcpus": 1, "name": "a" * 63}),
    ("vm_create", {"request_id": "r", "memory_mib": 32768.0, "vcpus": 8.0, "disk_gib": 256, "network": "off"}),
    ("vm_list", {}),
    ("vm_list", {"limit": 1}),
    ("vm_list", {"limit": 100.0}),
    ("vm_status", VM),
    ("vm_status", {"vm_id": "not even like an id"}),
    ("vm_exec", EXEC),
    ("vm_exec", {**EXEC, "command": "x" * 65536, "wait_seconds": 45, "timeout_seconds": 1, "shell": "plain"}),
    ("vm_exec", {**EXEC, "command": "echo 'é\n\t' \U0001f600 \ufffd", "cwd": "a/b", "env": {}}),
    ("vm_exec", {**EXEC, "env": {f"V{index}": "x" for index in range(64)}}),
    ("vm_exec", {**EXEC, "env": {"_a9": "x" * (32 * 1024 - 4)}}),
    ("vm_exec", {**EXEC, "cwd": "é" * 2048}),
    ("vm_job_status", JOB),
    ("vm_job_cancel", JOB),
    ("vm_job_output", JOB),
    ("vm_job_output", {**JOB, "cursor": {}}),
    ("vm_job_output", {**JOB, "cursor": {"stdout": 3.0}, "encoding": "base64", "wait_seconds": 45}),
    ("vm_job_output", {**JOB, "cursor": {"stdout": 2**53 - 1, "stderr": 0}}),
    ("vm_read_file", {**VM, "path": "a/..b/c", "offset": 0, "length": 131072}),
    ("vm_read_file", {**VM, "path": "/var/lib/microvm/jobs/job-x/output.log"}),
    ("vm_write_file", WRITE),
    ("vm_write_file", {**WRITE, "content_base64": b64(128 * 1024), "offset": 0, "mode": "755"}),
    ("vm_write_file", {**WRITE, "mode": "0600"}),
    ("vm_suspend", VM),
    ("vm_resume", VM),
    ("vm_destroy", VM),
]

SECRET = "hunter2-do-not-echo"

BAD: list[tuple[str, object, str, str]] = [
    # tool, arguments, code, field that is named
    ("vm_create", None, "invalid_arguments", ""),
    ("vm_create", [], "invalid_arguments", ""),
    ("vm_create", SECRET, "invalid_arguments", ""),
    ("vm_create", {}, "invalid_arguments", "request_id"),
    ("vm_create", {"request_id": None}, "invalid_arguments", "request_id"),
    ("vm_create", {"request_id": ""}, "invalid_arguments", "request_id"),
    ("vm_create", {"request_id": "r" * 65}, "invalid_arguments", "request_id"),
    ("vm_create", {"request_id": "r\n"}, "invalid_arguments", "request_id"),
    ("vm_create", {"request_id": "r\0"}, "invalid_arguments", "request_id"),
    ("vm_create", {"request_id": "é"}, "invalid_arguments", "request_id"),
    ("vm_create", {"request_id": 7}, "invalid_arguments", "request_id"),
    ("vm_create", {**CREATE, "memory_mib": 511}, "invalid_arguments", "memory_mib"),
    ("vm_create", {**CREATE, "memory_mib": 32769}, "invalid_arguments", "memory_mib"),
    ("vm_create", {**CREATE, "memory_mib": "1024"}, "invalid_arguments", "memory_mib"),
    ("vm_create", {**CREATE, "memory_mib": 1024.5}, "invalid_arguments", "memory_mib"),
    ("vm_create", {**CREATE, "memory_mib": 1e300}, "invalid_arguments", "memory_mib"),
    ("vm_create", {**CREATE, "memory_mib": float("nan")}, "invalid_arguments", "memory_mib"),
    ("vm_create", {**CREATE, "memory_mib": float("inf")}, "invalid_arguments", "memory_mib"),
    ("vm_create", {**CREATE, "memory_mib": None}, "invalid_arguments", "memory_mib"),
    ("vm_create", {**CREATE, "vcpus": True}, "invalid_arguments", "vcpus"),
    ("vm_create", {**CREATE, "vcpus": 0}, "invalid_arguments", "vcpus"),
    ("vm_create", {**CREATE, "vcpus": 9}, "invalid_arguments", "vcpus"),
    ("vm_create", {**CREATE, "disk_gib": None}, "invalid_arguments", "disk_gib"),
    ("vm_create", {**CREATE, "disk_gib": 0}, "invalid_arguments", "disk_gib"),
    ("vm_create", {**CREATE, "name": ""}, "invalid_arguments", "name"),
    ("vm_create", {**CREATE, "name": None}, "invalid_arguments", "name"),
    ("vm_create", {**CREATE, "name": "Big"}, "invalid_arguments", "name"),
    ("vm_create", {**CREATE, "name": "a" * 64}, "invalid_arguments", "name"),
    ("vm_create", {**CREATE, "network": SECRET}, "invalid_arguments", "network"),
    ("vm_create", {**CREATE, "network": None}, "invalid_arguments", "network"),
    ("vm_create", {**CREATE, "workspace": "bob"}, "invalid_arguments", "workspace"),
    ("vm_create", {**CREATE, "token": SECRET}, "invalid_arguments", "token"),
    ("vm_create", {**CREATE, f"{SECRET} x": 1}, "invalid_arguments", "(unknown)"),
    ("vm_create", {**CREATE, "x" * 65: 1}, "invalid_arguments", "(unknown)"),
    ("vm_create", {**CREATE, "\ud800": 1}, "invalid_arguments", "(arguments)"),
    ("vm_create", {**CREATE, "idle_seconds": 300}, "failed_precondition", ""),
    ("vm_create", {**CREATE, "idle_mode": "pause"}, "failed_precondition", ""),
    ("vm_create", {**CREATE, "template": SECRET}, "failed_precondition", ""),
    ("vm_create", {"idle_seconds": 300}, "invalid_arguments", "request_id"),
    ("vm_list", {"limit": 0}, "invalid_arguments", "limit"),
    ("vm_list", {"limit": 101}, "invalid_arguments", "limit"),
    ("vm_list", {"cursor": None}, "invalid_arguments", "cursor"),
    ("vm_list", {"idle_seconds": 3}, "invalid_arguments", "idle_seconds"),
    ("vm_status", {}, "invalid_arguments", "vm_id"),
    ("vm_status", {"vm_id": 1}, "invalid_arguments", "vm_id"),
    ("vm_status", {"vm_id": None}, "invalid_arguments", "vm_id"),
    ("vm_status", {"vm_id": "vm-\0"}, "invalid_arguments", "vm_id"),
    ("vm_status", {"vm_id": "vm-\ud800"}, "invalid_arguments", "vm_id"),
    ("vm_status", {"vm_id": ["vm-x"]}, "invalid_arguments", "vm_id"),
    ("vm_exec", {**EXEC, "command": ""}, "invalid_arguments", "command"),
    ("vm_exec", {**EXEC, "command": "a\0b"}, "invalid_arguments", "command"),
    ("vm_exec", {**EXEC, "command": "a\udfffb"}, "invalid_arguments", "command"),
    ("vm_exec", {**EXEC, "command": ["true"]}, "invalid_arguments", "command"),
    ("vm_exec", {**EXEC, "command": "x" * 65537}, "too_large", "command"),
    ("vm_exec", {**EXEC, "command": "é" * 32769}, "too_large", "command"),
    ("vm_exec", {**EXEC, "command": "x" * 65537, "cwd": ""}, "invalid_arguments", "command"),
    ("vm_exec", {**EXEC, "cwd": ""}, "invalid_arguments", "cwd"),
    ("vm_exec", {**EXEC, "cwd": "x" * 4097}, "invalid_arguments", "cwd"),
    ("vm_exec", {**EXEC, "cwd": "é" * 2049}, "invalid_arguments", "cwd"),
    ("vm_exec", {**EXEC, "cwd": "a/../.."}, "invalid_arguments", "cwd"),
    ("vm_exec", {**EXEC, "env": []}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": None}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"A": 1}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {SECRET: None}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"9A": "x"}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"": "x"}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"A=B": "x"}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"É": "x"}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"A\ud800": "x"}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"A": "x\0"}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"A": "\ud800"}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {f"V{index}": "" for index in range(65)}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "env": {"A": "x" * (32 * 1024 - 1)}}, "invalid_arguments", "env"),
    ("vm_exec", {**EXEC, "shell": "zsh"}, "invalid_arguments", "shell"),
    ("vm_exec", {**EXEC, "wait_seconds": 46}, "invalid_arguments", "wait_seconds"),
    ("vm_exec", {**EXEC, "wait_seconds": -1}, "invalid_arguments", "wait_seconds"),
    ("vm_exec", {**EXEC, "wait_seconds": False}, "invalid_arguments", "wait_seconds"),
    ("vm_exec", {**EXEC, "timeout_seconds": 0}, "invalid_arguments", "timeout_seconds"),
    ("vm_exec", {**EXEC, "timeout_seconds": None}, "invalid_arguments", "timeout_seconds"),
    ("vm_exec", {**EXEC, "stdin": "x"}, "invalid_arguments", "stdin"),
    ("vm_job_status", VM, "invalid_arguments", "job_id"),
    ("vm_job_cancel", {**JOB, "signal": 15}, "invalid_arguments", "signal"),
    ("vm_job_output", {**JOB, "cursor": 5}, "invalid_arguments", "cursor"),
    ("vm_job_output", {**JOB, "cursor": None}, "invalid_arguments", "cursor"),
    ("vm_job_output", {**JOB, "cursor": {"stdout": -1}}, "invalid_arguments", "cursor.stdout"),
    ("vm_job_output", {**JOB, "cursor": {"stdout": None}}, "invalid_arguments", "cursor.stdout"),
    ("vm_job_output", {**JOB, "cursor": {"stdout": 2**53}}, "invalid_arguments", "cursor.stdout"),
    ("vm_job_output", {**JOB, "cursor": {"stdin": 1}}, "invalid_arguments", "cursor.stdin"),
    ("vm_job_output", {**JOB, "cursor": {f"{SECRET}!": 1}}, "invalid_arguments", "cursor.(unknown)"),
    ("vm_job_output", {**JOB, "encoding": "latin-1"}, "invalid_arguments", "encoding"),
    ("vm_read_file", {**VM, "path": ""}, "invalid_arguments", "path"),
    ("vm_read_file", {**VM, "path": "a/../../etc/passwd"}, "invalid_arguments", "path"),
    ("vm_read_file", {**VM, "path": "a\0"}, "invalid_arguments", "path"),
    ("vm_read_file", {**VM, "path": "x" * 4097}, "invalid_arguments", "path"),
    ("vm_read_file", {**VM, "path": "f", "length": 0}, "invalid_arguments", "length"),
    ("vm_read_file", {**VM, "path": "f", "length": 131073}, "invalid_arguments", "length"),
    ("vm_read_file", {**VM, "path": "f", "offset": -1}, "invalid_arguments", "offset"),
    ("vm_write_file", {**VM, "path": "f"}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": b64(128 * 1024 + 1)}, "too_large", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": b64(128 * 1024 + 99)}, "too_large", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": "YQ"}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": "YQ==="}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": "YQ==\n"}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": "Y Q=="}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": "YR=="}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": "-_-_"}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": "YQ==YQ=="}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": "é"}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": 5}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "content_base64": None}, "invalid_arguments", "content_base64"),
    ("vm_write_file", {**WRITE, "mode": "0o755"}, "invalid_arguments", "mode"),
    ("vm_write_file", {**WRITE, "mode": "4755"}, "invalid_arguments", "mode"),
    ("vm_write_file", {**WRITE, "mode": "888"}, "invalid_arguments", "mode"),
    ("vm_write_file", {**WRITE, "mode": 755}, "invalid_arguments", "mode"),
    ("vm_write_file", {**WRITE, "mode": None}, "invalid_arguments", "mode"),
    ("vm_write_file", {**WRITE, "offset": None}, "invalid_arguments", "offset"),
    ("vm_suspend", {**VM, "force": True}, "failed_precondition", ""),
    ("vm_suspend", {**VM, "mode": "hibernate"}, "failed_precondition", ""),
    ("vm_resume", {**VM, "cold": True}, "failed_precondition", ""),
    ("vm_resume", {**VM, "warm": True}, "invalid_arguments", "warm"),
    ("vm_destroy", {**VM, "force": True}, "invalid_arguments", "force"),
]


@pytest.mark.parametrize(("name", "arguments"), GOOD)
def test_good_arguments_are_taken(name: str, arguments: Mapping[str, object]) -> None:
    catalog.BY_NAME[name].prepare(dict(arguments))


@pytest.mark.parametrize(("name", "arguments", "code", "field"), BAD)
def test_bad_arguments_are_refused_by_field_and_never_echoed(
    name: str, arguments: object, code: str, field: str
) -> None:
    with pytest.raises(MicrovmError) as caught:
        catalog.BY_NAME[name].prepare(arguments)
    error = caught.value
    assert error.code == code
    assert isinstance(error, InvalidArguments | TooLarge | FailedPrecondition)
    fields = error.details.get("fields", [])
    assert isinstance(fields, list)
    assert not field or field in [row["field"] for row in fields if isinstance(row, dict)]
    shown = json.dumps(error.body(), ensure_ascii=False)
    shown.encode()
    assert SECRET not in shown
    assert len(shown) < 2000


def test_every_tool_has_good_and_bad_examples() -> None:
    assert {name for name, _ in GOOD} == set(catalog.BY_NAME)
    assert {name for name, *_ in BAD} == set(catalog.BY_NAME)


def test_an_error_of_many_fields_stays_short() -> None:
    with pytest.raises(InvalidArguments) as caught:
        catalog.BY_NAME["vm_list"].prepare({f"unknown_{index}": index for index in range(500)})
    fields = caught.value.details["fields"]
    assert isinstance(fields, list)
    assert len(fields) == 20


def test_unknown_arguments_are_told_the_known_ones() -> None:
    with pytest.raises(InvalidArguments, match="vm_id, request_id, command, cwd"):
        catalog.BY_NAME["vm_exec"].prepare({**EXEC, "cmd": "true"})


def test_an_integral_float_becomes_an_integer() -> None:
    from microvm_mcp.service.schemas import VmCreate
    from microvm_mcp.service.validation import parse

    memory = parse(VmCreate, {"request_id": "r", "memory_mib": 2048.0}, {}).memory_mib
    assert memory == 2048
    assert type(memory) is int
