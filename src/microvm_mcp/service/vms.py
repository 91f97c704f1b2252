"""Use cases on machines: create, list, look, destroy. Sleeping and waking are named here and arrive later."""

from __future__ import annotations

import base64
import binascii

from microvm_mcp.errors import FailedPrecondition, InvalidArguments, NotFound, PermissionDenied
from microvm_mcp.model import CreateRequest, IdleMode, Receipt, ReceiptClaim, VmId
from microvm_mcp.service import results
from microvm_mcp.service.call import Call
from microvm_mcp.service.ids import is_vm_id, new_vm_id
from microvm_mcp.service.receipts import key_of
from microvm_mcp.service.schemas import VmCreate, VmDestroy, VmList, VmResume, VmStatus, VmSuspend

_GIB = 1024**3

IDLE_SECONDS = 300
IDLE_MODE: IdleMode = "hibernate"
"""Recorded with each machine, without effect until idle machines are put to sleep."""

WHY_COLD = "this version boots every machine from the image"
NETWORK_LATER = "network=on arrives with a later version; leave network out."
SUSPEND_LATER = "vm_suspend arrives with a later version; the machine goes on running until vm_destroy."
RESUME_LATER = "vm_resume arrives with a later version; this machine is not asleep, use it as it is."


async def create(call: Call, arguments: VmCreate) -> results.VmCreated:
    if arguments.network == "on":
        if not call.principal.allow_network:
            raise PermissionDenied("This workspace may not use the network; leave network out.")
        raise FailedPrecondition(NETWORK_LATER, details={"argument": "network"})

    async def run(receipt: ReceiptClaim) -> results.VmCreated:
        request = CreateRequest(
            vm_id=new_vm_id(),
            workspace=call.workspace,
            request_id=key.request_id,
            limits=call.principal.limits,
            memory_mib=arguments.memory_mib,
            vcpus=arguments.vcpus,
            disk_bytes=None if arguments.disk_gib is None else arguments.disk_gib * _GIB,
            network=arguments.network,
            idle_seconds=IDLE_SECONDS,
            idle_mode=IDLE_MODE,
            name=arguments.name,
        )
        view = await call.engine.create(request, receipt, wait_s=call.left())
        return results.vm_created(view, reason=WHY_COLD)

    async def replay(receipt: Receipt) -> results.VmCreated:
        if receipt.vm_id is None:
            raise RuntimeError("a finished receipt of vm_create has no vm_id")
        view = await call.engine.settle(call.workspace, receipt.vm_id, wait_s=call.left())
        return results.vm_created(view, reason=WHY_COLD)

    key = key_of(call.workspace, "vm_create", arguments.request_id, arguments)
    return await call.receipts.once(key, run=run, replay=replay, left=call.left_for_others)


async def page(call: Call, arguments: VmList) -> results.VmPage:
    after = None if arguments.cursor is None else _decode_cursor(arguments.cursor)
    try:
        views, more = call.engine.views(call.workspace, limit=arguments.limit, after=after)
    except NotFound:
        raise _stale_cursor() from None
    return results.VmPage(
        vms=[results.vm_summary(view) for view in views],
        next_cursor=_encode_cursor(views[-1].vm.vm_id) if more and views else None,
    )


async def status(call: Call, arguments: VmStatus) -> results.VmDetails:
    return results.vm_details(call.engine.view(call.workspace, VmId(arguments.vm_id)))


async def destroy(call: Call, arguments: VmDestroy) -> results.VmGone:
    view = await call.engine.destroy(call.workspace, VmId(arguments.vm_id), wait_s=call.left())
    return results.VmGone(vm_id=view.vm.vm_id, state=view.vm.state)


async def suspend(call: Call, arguments: VmSuspend) -> results.VmGone:
    call.engine.view(call.workspace, VmId(arguments.vm_id))
    raise FailedPrecondition(SUSPEND_LATER)


async def resume(call: Call, arguments: VmResume) -> results.VmGone:
    call.engine.view(call.workspace, VmId(arguments.vm_id))
    raise FailedPrecondition(RESUME_LATER)


def _encode_cursor(vm_id: VmId) -> str:
    return base64.urlsafe_b64encode(vm_id.encode()).decode().rstrip("=")


def _decode_cursor(cursor: str) -> VmId:
    """The id that a page ended with. A forged one opens nothing: the engine looks it up in the workspace."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        raise _stale_cursor() from None
    if not is_vm_id(text):
        raise _stale_cursor()
    return VmId(text)


def _stale_cursor() -> InvalidArguments:
    return InvalidArguments.field("cursor", "is no next_cursor of vm_list; leave it out to start anew")
