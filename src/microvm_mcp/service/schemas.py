"""What callers may say: one strict model per tool, from which the advertised JSON schemas are made.

Unknown arguments are refused, absent is never null, every parameter is described with its unit. The schemas that go
out are plain (no $ref, no unions), because common bridges to models reject or strip anything else. Ids are any
text: a malformed id is as unknown as somebody else's. No model has a field for an owner or a token.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from microvm_mcp.model import Network, Shell
from microvm_mcp.output import Encoding
from microvm_mcp.service.fields import (
    MAX_FILE_BYTES,
    MAX_TIMEOUT_S,
    MAX_WAIT_S,
    Base64,
    Command,
    Env,
    FilePath,
    Offset,
    Omittable,
    Text,
)


class Arguments(BaseModel):
    """Base of all argument models. Not part of what runs: `request_id` and waiting, see `receipts`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _integral_floats_are_integers(cls, raw: object) -> object:
        """1024.0 and 1e3 are integers to JSON Schema, and some clients send them. No field of ours is a float."""
        if not isinstance(raw, dict):
            return raw
        return {name: int(v) if type(v) is float and v.is_integer() else v for name, v in raw.items()}


VmIdField = Annotated[Text, Field(description="VM id from vm_create or vm_list")]
JobIdField = Annotated[Text, Field(description="Job id from vm_exec")]
RequestIdField = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9._:-]{1,64}$",
        description="Key you choose, unique per action; repeat it with the same arguments to retry safely",
    ),
]


class VmCreate(Arguments):
    request_id: RequestIdField
    memory_mib: Annotated[int, Field(ge=512, le=32768, description="RAM in MiB")] = 1024
    vcpus: Annotated[int, Field(ge=1, le=8, description="Virtual CPUs")] = 2
    disk_gib: Annotated[
        Omittable[Annotated[int, Field(ge=1, le=256)]], Field(description="Disk in GiB; default: size of the image")
    ] = None
    name: Annotated[
        Omittable[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")]],
        Field(description="Label, unique in the workspace; default none"),
    ] = None
    network: Annotated[Network, Field(description="Outbound IPv4 access")] = "off"


class VmList(Arguments):
    limit: Annotated[int, Field(ge=1, le=100, description="VMs per page")] = 100
    cursor: Annotated[Omittable[Text], Field(description="next_cursor of the page before; default: first page")] = (
        None
    )


class VmStatus(Arguments):
    vm_id: VmIdField


class VmExec(Arguments):
    vm_id: VmIdField
    request_id: RequestIdField
    command: Annotated[Command, Field(description="Bash script, at most 64 KiB; its stdin is empty")]
    cwd: Annotated[FilePath, Field(description="Working directory, relative to /workspace")] = "."
    timeout_seconds: Annotated[
        Omittable[Annotated[int, Field(ge=1, le=MAX_TIMEOUT_S)]],
        Field(description="Kill job and descendants after this many s; default: the host's job limit"),
    ] = None
    env: Annotated[
        Omittable[Env], Field(description="Environment variables; at most 64 and 32 KiB; default none")
    ] = None
    shell: Annotated[Shell, Field(description="plain: no profile files, for when a profile is broken")] = "login"
    wait_seconds: Annotated[
        int,
        Field(ge=0, le=MAX_WAIT_S, description="Wait up to this many s for the end; above 0 returns output"),
    ] = 0


class VmJobStatus(Arguments):
    vm_id: VmIdField
    job_id: JobIdField


class Cursor(Arguments):
    stdout: Annotated[Offset, Field(description="Byte offset")] = 0
    stderr: Annotated[Offset, Field(description="Byte offset")] = 0


class VmJobOutput(Arguments):
    vm_id: VmIdField
    job_id: JobIdField
    cursor: Annotated[Cursor, Field(description="next_cursor of the page before; default: the start")] = Cursor()
    encoding: Annotated[Encoding, Field(description="base64: exact bytes, for binary output")] = "utf-8"
    wait_seconds: Annotated[
        int, Field(ge=0, le=MAX_WAIT_S, description="Wait up to this many s for new output or the end")
    ] = 0


class VmJobCancel(Arguments):
    vm_id: VmIdField
    job_id: JobIdField


class VmReadFile(Arguments):
    vm_id: VmIdField
    path: Annotated[FilePath, Field(description="Relative to /workspace, or a job's log_path")]
    offset: Annotated[Offset, Field(description="First byte to read")] = 0
    length: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES, description="Bytes to read at most")] = MAX_FILE_BYTES


class VmWriteFile(Arguments):
    vm_id: VmIdField
    path: Annotated[FilePath, Field(description="Relative to /workspace; missing directories are made")]
    content_base64: Annotated[Base64, Field(description="Content in base64, at most 128 KiB decoded")]
    offset: Annotated[
        Omittable[Offset],
        Field(description="Append to a file of exactly this size in bytes; default: replace the file"),
    ] = None
    mode: Annotated[
        Omittable[Annotated[str, Field(pattern=r"^0?[0-7]{3}$")]],
        Field(description="Octal permissions; default: as before, 0644 for a new file"),
    ] = None


class VmSuspend(Arguments):
    vm_id: VmIdField


class VmResume(Arguments):
    vm_id: VmIdField


class VmDestroy(Arguments):
    vm_id: VmIdField
