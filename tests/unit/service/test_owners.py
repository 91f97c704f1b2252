"""A walk made from the catalogue: no id of another workspace opens anything, or looks different from unknown."""

from __future__ import annotations

from typing import cast

import pytest

from microvm_mcp.errors import FailedPrecondition, NotFound
from microvm_mcp.service import catalog
from microvm_mcp.service.jsonschema import JsonObject
from tests.unit.service.conftest import ALICE, BOB, Rig

ID_ARGUMENTS = ("vm_id", "job_id")
MALFORMED = ["", "x", "vm-", "job-", "VM-" + "A" * 20, "vm-" + "a" * 500, "../etc", "' OR 1=1 --", "é", "%00"]
UNKNOWN = {"vm_id": "vm-" + "a" * 20, "job_id": "job-" + "a" * 20}


def id_arguments(tool: catalog.Tool) -> list[str]:
    return [name for name in ID_ARGUMENTS if name in cast("JsonObject", tool.input_schema["properties"])]


WALK = [(tool, name) for tool in catalog.TOOLS for name in id_arguments(tool)]


def test_every_argument_that_ends_in_id_is_walked() -> None:
    for tool in catalog.TOOLS:
        named = {name for name in tool.arguments.model_fields if name.endswith("_id")} - {"request_id"}
        assert named == set(id_arguments(tool))
    assert len(WALK) >= 13


@pytest.fixture
async def owned(rig: Rig) -> dict[str, dict[str, str]]:
    """A machine and a job of each workspace."""
    out = {}
    for who in (ALICE, BOB):
        vm_id = await rig.vm(who)
        started = await rig.call("vm_exec", {"vm_id": vm_id, "request_id": "job", "command": "echo mine"}, who)
        out[who.workspace] = {"vm_id": vm_id, "job_id": str(started["job_id"])}
        file = {"vm_id": vm_id, "path": "hello.txt", "content_base64": "aGVsbG8K"}
        await rig.call("vm_write_file", file, who)
    return {str(name): ids for name, ids in out.items()}


@pytest.mark.parametrize(("tool", "name"), WALK, ids=[f"{tool.name}-{name}" for tool, name in WALK])
async def test_foreign_unknown_and_malformed_ids_are_one_and_the_same_miss(
    rig: Rig, owned: dict[str, dict[str, str]], tool: catalog.Tool, name: str
) -> None:
    before = await rig.call("vm_status", {"vm_id": owned["alice"]["vm_id"]})
    bodies = set()
    for number, wrong in enumerate([owned["alice"][name], UNKNOWN[name], *MALFORMED]):
        arguments = {
            **tool.example.arguments,
            **{arg: owned["bob"][arg] for arg in id_arguments(tool)},
            name: wrong,
        }
        if tool.needs_request_id:
            arguments["request_id"] = f"walk-{number}"
        with pytest.raises(NotFound) as caught:
            await rig.call(tool.name, arguments, BOB)
        bodies.add(str(caught.value.body()))
    assert len(bodies) == 1
    after = await rig.call("vm_status", {"vm_id": owned["alice"]["vm_id"]})
    assert after == before


@pytest.mark.parametrize("tool", [tool for tool in catalog.TOOLS if id_arguments(tool)], ids=lambda tool: tool.name)
async def test_ones_own_ids_are_not_missed(rig: Rig, owned: dict[str, dict[str, str]], tool: catalog.Tool) -> None:
    """So that the walk above cannot pass because everything is not found."""
    arguments = {**tool.example.arguments, **{arg: owned["bob"][arg] for arg in id_arguments(tool)}}
    if tool.name in {"vm_suspend", "vm_resume"}:
        with pytest.raises(FailedPrecondition):
            await rig.call(tool.name, arguments, BOB)
    else:
        await rig.call(tool.name, arguments, BOB)


async def test_somebody_elses_machines_are_not_listed(rig: Rig, owned: dict[str, dict[str, str]]) -> None:
    rows = cast("list[JsonObject]", (await rig.call("vm_list", {}, BOB))["vms"])
    assert [row["vm_id"] for row in rows] == [owned["bob"]["vm_id"]]


async def test_request_ids_of_two_workspaces_do_not_meet(rig: Rig) -> None:
    mine = await rig.call("vm_create", {"request_id": "same"}, ALICE)
    theirs = await rig.call("vm_create", {"request_id": "same", "memory_mib": 512}, BOB)
    assert mine["vm_id"] != theirs["vm_id"]
