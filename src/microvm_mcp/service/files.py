"""Use cases on files of a machine: a part in, a part out. Paths are judged again, for good, inside the guest."""

from __future__ import annotations

import base64

from microvm_mcp.errors import InvalidArguments
from microvm_mcp.model import VmId
from microvm_mcp.service import results
from microvm_mcp.service.call import Call
from microvm_mcp.service.schemas import VmReadFile, VmWriteFile

_ROOT = "/workspace/"


async def read(call: Call, arguments: VmReadFile) -> results.FileContent:
    page = await call.engine.read_file(
        call.workspace, VmId(arguments.vm_id), arguments.path, offset=arguments.offset, length=arguments.length
    )
    return results.file_content(page, base64.b64encode(page.data).decode("ascii"))


async def write(call: Call, arguments: VmWriteFile) -> results.FileStored:
    vm_id = VmId(arguments.vm_id)
    call.engine.view(call.workspace, vm_id)  # somebody else's id is refused as unknown, whatever the path says
    if arguments.path.startswith("/") and not arguments.path.startswith(_ROOT):
        raise InvalidArguments.field("path", "must lie under /workspace")
    written = await call.engine.write_file(
        call.workspace,
        vm_id,
        arguments.path,
        arguments.content_base64,
        offset=arguments.offset,
        mode=None if arguments.mode is None else int(arguments.mode, 8),
    )
    return results.file_stored(written)
