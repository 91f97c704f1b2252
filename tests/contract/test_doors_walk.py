"""Walks made from the catalogue and the table of routes: no tool and no path can be forgotten when one is added."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from microvm_mcp.service.catalog import TOOLS
from microvm_mcp.transport.application import ROUTES
from tests.support.door_rig import ALICE, BOB, DOORS, EXPIRED, REVOKED, DoorName, JsonDict, Rig, rig

FOREIGN_IDS = {"vm_id", "job_id"}


@pytest.fixture(params=DOORS)
async def behind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    door: DoorName = request.param
    async with rig(tmp_path, door) as made:
        yield made


@pytest.mark.parametrize("token", [None, "unknown", EXPIRED, REVOKED])
async def test_no_tool_and_no_path_answers_without_a_valid_token(tmp_path: Path, token: str | None) -> None:
    paths = [path for path in ROUTES if "{" not in path] + [f"/v1/tools/{tool.name}" for tool in TOOLS]
    async with rig(tmp_path) as behind, behind.http(token) as http:
        for path in [*paths, "/nothing", "/v1/tools/nothing"]:
            for method in ("GET", "POST"):
                response = await http.request(method, path, json={})
                if path == "/healthz":
                    assert response.status_code in {200, 405}
                else:
                    assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthenticated")
    assert behind.engine.commands == []


async def test_no_tool_reaches_another_workspaces_machine_or_job_by_any_id(behind: Rig) -> None:
    vm_id = await behind.vm(ALICE)
    started = await behind.call("vm_exec", {"vm_id": vm_id, "request_id": "r", "command": "sleep 60"}, ALICE)
    job_id = started.body["job_id"]
    own = await behind.vm(BOB)
    before = await behind.call("vm_status", {"vm_id": vm_id}, ALICE)
    for tool in TOOLS:
        properties = tool.input_schema["properties"]
        assert isinstance(properties, dict)
        if not FOREIGN_IDS & set(properties):
            continue
        misses = []
        for number, (vm, job) in enumerate(
            (
                (vm_id, job_id),
                ("vm-aaaaaaaaaaaaaaaaaaaa", "job-aaaaaaaaaaaaaaaaaaaa"),
                (own, job_id),
                (job_id, vm_id),
            )
        ):
            if vm == own and "job_id" not in properties:
                continue
            arguments: JsonDict = {**tool.example.arguments, "vm_id": vm}
            if "job_id" in properties:
                arguments["job_id"] = job
            if tool.needs_request_id:
                arguments["request_id"] = f"walk-{tool.name}-{number}"
            answer = await behind.call(tool.name, arguments, BOB)
            misses.append(answer.text)
            assert answer.error_code == "not_found", (tool.name, answer.text)
        assert len(set(misses)) <= 2, misses
        assert misses[0] == misses[1]
    assert (await behind.call("vm_status", {"vm_id": vm_id}, ALICE)).body == before.body
    assert behind.engine.commands == ["sleep 60"]


async def test_no_listing_shows_another_workspaces_machines(behind: Rig) -> None:
    vm_id = await behind.vm(ALICE)
    listed = await behind.call("vm_list", {}, BOB)
    assert vm_id not in listed.text
    assert (await behind.call("vm_list", {"cursor": vm_id}, BOB)).error_code is not None


def test_no_schema_has_a_field_for_an_owner_or_a_token() -> None:
    words = {"token", "secret", "owner", "workspace", "tenant", "user", "session"}
    for tool in TOOLS:
        properties = json.loads(json.dumps(tool.input_schema["properties"]))
        assert not words & set(properties), tool.name
