"""The one entry point: unknown tools, rates, the cap on time, and what leaves when something breaks inside."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from microvm_mcp.errors import Busy, FailedPrecondition, Internal, NotFound, RateLimited
from microvm_mcp.model import MachineView
from microvm_mcp.service.call import ServiceSettings
from microvm_mcp.service.clock import SystemClock
from microvm_mcp.service.service import Service, UnknownTool
from tests.unit.service.conftest import ALICE, BOB, Rig


@pytest.mark.parametrize("name", ["", "vm_nothing", "VM_LIST", "vm_list ", "__class__", "\ud800"])
async def test_an_unknown_tool_is_told_apart_and_told_the_known_ones(rig: Rig, name: str) -> None:
    with pytest.raises(UnknownTool, match="vm_create") as caught:
        await rig.call(name, {})
    assert isinstance(caught.value, NotFound)
    assert caught.value.code == "not_found"


async def test_calls_are_limited_per_workspace_before_anything_else(rig: Rig) -> None:
    service = Service(rig.db, rig.engine, ServiceSettings(calls_per_second=0.001, call_burst=2), SystemClock())
    await service.invoke("vm_list", {}, ALICE)
    with pytest.raises(UnknownTool):
        await service.invoke("nothing", {}, ALICE)
    with pytest.raises(RateLimited):
        await service.invoke("vm_list", {"bad": 1}, ALICE)
    await service.invoke("vm_list", {}, BOB)


async def test_a_bug_leaves_as_internal_and_is_logged_with_its_traceback(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> MachineView:
        raise KeyError("/var/lib/secret")

    monkeypatch.setattr(rig.engine, "view", broken)
    with pytest.raises(Internal) as caught:
        await rig.call("vm_status", {"vm_id": "vm-x"})
    assert "secret" not in json.dumps(caught.value.body())
    assert "/var/lib/secret" in caplog.text
    assert "tool=vm_status" in caplog.text


async def test_a_timeout_of_the_engines_own_is_no_excuse(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> MachineView:
        raise TimeoutError

    monkeypatch.setattr(rig.engine, "view", broken)
    with pytest.raises(Internal):
        await rig.call("vm_status", {"vm_id": "vm-x"})


async def test_no_call_outlasts_the_cap(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(*_: object, **__: object) -> MachineView:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(rig.engine, "destroy", stuck)
    monkeypatch.setattr("microvm_mcp.service.service.HARD_CAP_S", 0.05)
    with pytest.raises(Busy, match="repeat it unchanged"):
        await rig.call("vm_destroy", {"vm_id": await rig.vm()})


async def test_half_characters_from_inside_do_not_leave(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def odd(*_: object, **__: object) -> MachineView:
        raise FailedPrecondition("name \udcff here", details={"name\udcff": ["x\ud800", 1, None]})

    monkeypatch.setattr(rig.engine, "destroy", odd)
    with pytest.raises(FailedPrecondition) as caught:
        await rig.call("vm_destroy", {"vm_id": "vm-x"})
    assert caught.value.message == "name ? here"
    json.dumps(caught.value.body(), ensure_ascii=False).encode()


async def test_what_callers_say_and_get_is_not_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    vm_id = await rig.vm()
    arguments = {"vm_id": vm_id, "request_id": "r", "command": "echo swordfish", "env": {"PASS": "tr0ub4dor"}}
    await rig.call("vm_exec", {**arguments, "wait_seconds": 1})
    with pytest.raises(Internal):
        await rig.call("vm_exec", {**arguments, "request_id": "s", "command": "crash swordfish"})
    assert "swordfish" not in caplog.text
    assert "tr0ub4dor" not in caplog.text
