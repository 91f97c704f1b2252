"""Every tool once through, over the fake engine: what comes back has the promised shape and content."""

from __future__ import annotations

from tests.unit.service.conftest import Rig


async def test_a_command_goes_from_create_to_output(rig: Rig) -> None:
    vm_id = await rig.vm()
    ran = await rig.call(
        "vm_exec", {"vm_id": vm_id, "request_id": "r1", "command": "echo hello", "wait_seconds": 5}
    )
    assert (ran["stdout"], ran["stderr"], ran["exit_code"], ran["state"]) == ("hello\n", "", 0, "completed")
