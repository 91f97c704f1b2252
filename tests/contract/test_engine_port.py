"""What the service builds on, held by the real engine (on the fake world) and by the fake engine alike.

Through the service, because that is how both are used; the codes are the contract, the words are each engine's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from microvm_mcp.engine.port import Engine
from microvm_mcp.errors import MicrovmError
from microvm_mcp.model import Limits, Principal, TokenId
from microvm_mcp.service.call import ServiceSettings
from microvm_mcp.service.clock import SystemClock
from microvm_mcp.service.jsonschema import JsonObject
from microvm_mcp.service.service import Service
from microvm_mcp.store.database import Database
from tests.support import engine_rig
from tests.support.fake_engine import FakeEngine

OWNER, OTHER = (
    Principal(name, TokenId("t"), allow_network=False, limits=Limits(max_vms=2))
    for name in (engine_rig.WORKSPACE, engine_rig.OTHER)
)


@dataclass
class Bench:
    service: Service

    async def call(self, tool: str, who: Principal = OWNER, **arguments: object) -> JsonObject:
        return await self.service.invoke(tool, arguments, who)

    async def code(self, tool: str, who: Principal = OWNER, **arguments: object) -> str:
        try:
            await self.call(tool, who, **arguments)
        except MicrovmError as error:
            return error.code
        return "ok"

    async def vm(self, request_id: str = "make", who: Principal = OWNER) -> str:
        return str((await self.call("vm_create", who, request_id=request_id, memory_mib=512))["vm_id"])

    async def job(self, vm_id: str, command: str, request_id: str, wait: int = 0) -> JsonObject:
        return await self.call("vm_exec", vm_id=vm_id, command=command, request_id=request_id, wait_seconds=wait)


def service_on(db: Database, engine: Engine) -> Service:
    return Service(db, engine, ServiceSettings(calls_per_second=1000, call_burst=1000), SystemClock())


@pytest.fixture(params=["engine", "fake"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with engine_rig.rig(tmp_path) as rig:
        engine: Engine = rig.fleet if request.param == "engine" else FakeEngine(rig.db)
        service = service_on(rig.db, engine)
        yield Bench(service)
        await service.close()


async def test_creation_is_done_once_per_request_id(bench: Bench) -> None:
    first = await bench.call("vm_create", request_id="r", memory_mib=512, name="n")
    assert (first["state"], first["memory_mib"], first["name"]) == ("running", 512, "n")
    assert await bench.call("vm_create", request_id="r", memory_mib=512, name="n") == first
    assert await bench.code("vm_create", request_id="r", memory_mib=1024) == "conflict"


async def test_the_same_creation_at_once_makes_one_machine(bench: Bench) -> None:
    made = await asyncio.gather(*(bench.vm() for _ in range(5)))
    assert len(set(made)) == 1
    assert len(cast("list[JsonObject]", (await bench.call("vm_list"))["vms"])) == 1


async def test_the_quota_of_machines_holds_until_one_is_destroyed(bench: Bench) -> None:
    first = await bench.vm("a")
    await bench.vm("b")
    assert await bench.code("vm_create", request_id="c") == "resource_exhausted"
    await bench.call("vm_destroy", vm_id=first)
    assert await bench.code("vm_create", request_id="c") == "ok"


async def test_a_name_is_taken_until_its_machine_is_destroyed(bench: Bench) -> None:
    vm_id = str((await bench.call("vm_create", request_id="a", name="n"))["vm_id"])
    assert await bench.code("vm_create", request_id="b", name="n") == "conflict"
    await bench.call("vm_destroy", vm_id=vm_id)
    assert await bench.code("vm_create", request_id="b", name="n") == "ok"


async def test_a_listing_is_in_order_and_goes_on_behind_a_destroyed_machine(bench: Bench) -> None:
    first, second = await bench.vm("a"), await bench.vm("b")
    page = await bench.call("vm_list", limit=1)
    assert [row["vm_id"] for row in cast("list[JsonObject]", page["vms"])] == [first]
    await bench.call("vm_destroy", vm_id=first)
    rest = await bench.call("vm_list", cursor=page["next_cursor"])
    assert [row["vm_id"] for row in cast("list[JsonObject]", rest["vms"])] == [second]
    assert rest["next_cursor"] is None
    assert await bench.code("vm_list", OTHER, cursor=page["next_cursor"]) == "invalid_arguments"


async def test_a_command_runs_once_per_request_id(bench: Bench) -> None:
    vm_id = await bench.vm()
    ran = await bench.job(vm_id, "hello", "r", wait=2)
    assert (ran["state"], ran["exit_code"], str(ran["stdout"]).strip()) == ("completed", 0, "hello")
    assert await bench.job(vm_id, "hello", "r", wait=2) == ran
    assert await bench.code("vm_exec", vm_id=vm_id, command="other", request_id="r") == "conflict"
    jobs = cast("list[JsonObject]", (await bench.call("vm_status", vm_id=vm_id))["jobs"])
    assert [row["job_id"] for row in jobs] == [ran["job_id"]]


async def test_four_jobs_run_at_once_and_a_fifth_is_busy_until_one_ends(bench: Bench) -> None:
    vm_id = await bench.vm()
    started = [(await bench.job(vm_id, "sleep", f"r{n}"))["job_id"] for n in range(4)]
    assert await bench.code("vm_exec", vm_id=vm_id, command="sleep", request_id="r4") == "busy"
    cancelled = await bench.call("vm_job_cancel", vm_id=vm_id, job_id=started[0])
    assert cancelled["state"] == "cancelled"
    assert await bench.code("vm_exec", vm_id=vm_id, command="sleep", request_id="r4") == "ok"
    status = await bench.call("vm_status", vm_id=vm_id)
    assert status["awake_because"]


async def test_cancelling_again_is_harmless(bench: Bench) -> None:
    vm_id = await bench.vm()
    job_id = (await bench.job(vm_id, "sleep", "r"))["job_id"]
    first = await bench.call("vm_job_cancel", vm_id=vm_id, job_id=job_id)
    assert await bench.call("vm_job_cancel", vm_id=vm_id, job_id=job_id) == first


async def test_output_can_be_asked_for_again(bench: Bench) -> None:
    vm_id = await bench.vm()
    job_id = (await bench.job(vm_id, "hello", "r", wait=2))["job_id"]
    page = await bench.call("vm_job_output", vm_id=vm_id, job_id=job_id)
    assert await bench.call("vm_job_output", vm_id=vm_id, job_id=job_id) == page
    end = page["next_cursor"]
    last = await bench.call("vm_job_output", vm_id=vm_id, job_id=job_id, cursor=end)
    assert (last["stdout"], last["next_cursor"]) == ("", end)


async def test_files_are_read_back(bench: Bench) -> None:
    vm_id = await bench.vm()
    assert await bench.code("vm_read_file", vm_id=vm_id, path="f") == "not_found"
    await bench.call("vm_write_file", vm_id=vm_id, path="f", content_base64="aGVsbG8K")
    page = await bench.call("vm_read_file", vm_id=vm_id, path="f")
    assert (page["content_base64"], page["size"], page["eof"]) == ("aGVsbG8K", 6, True)


async def test_a_destroyed_machine_stays_visible_and_takes_no_work(bench: Bench) -> None:
    vm_id = await bench.vm()
    job_id = (await bench.job(vm_id, "sleep", "r"))["job_id"]
    for _ in range(2):
        assert await bench.call("vm_destroy", vm_id=vm_id) == {"vm_id": vm_id, "state": "destroyed"}
    assert (await bench.call("vm_job_status", vm_id=vm_id, job_id=job_id))["state"] == "lost"
    assert await bench.code("vm_exec", vm_id=vm_id, command="x", request_id="s") == "failed_precondition"
    assert await bench.code("vm_read_file", vm_id=vm_id, path="f") == "failed_precondition"
    lost = await bench.call("vm_job_output", vm_id=vm_id, job_id=job_id)
    assert (lost["state"], lost["truncated"]) == ("lost", True)
    assert await bench.job(vm_id, "sleep", "r") == {"job_id": job_id, "state": "lost"}


async def test_output_that_was_fetched_outlives_its_machine(bench: Bench) -> None:
    vm_id = await bench.vm()
    first = await bench.job(vm_id, "hello", "r", wait=2)
    job_id = first["job_id"]
    page = await bench.call("vm_job_output", vm_id=vm_id, job_id=job_id)
    await bench.call("vm_destroy", vm_id=vm_id)
    assert await bench.call("vm_job_output", vm_id=vm_id, job_id=job_id) == page
    end = page["next_cursor"]
    last = await bench.call("vm_job_output", vm_id=vm_id, job_id=job_id, cursor=end)
    assert (last["state"], last["stdout"], last["next_cursor"]) == ("completed", "", end)
    again = await bench.job(vm_id, "hello", "r", wait=2)
    assert (again["stdout"], again["exit_code"], again["truncated"]) == (first["stdout"], 0, False)


@pytest.mark.parametrize("name", ["vm_status", "vm_destroy", "vm_exec", "vm_read_file", "vm_job_output"])
async def test_a_foreign_machine_is_as_unknown_as_none(bench: Bench, name: str) -> None:
    vm_id = await bench.vm()
    more: dict[str, dict[str, object]] = {
        "vm_exec": {"command": "x", "request_id": "r"},
        "vm_read_file": {"path": "f"},
        "vm_job_output": {"job_id": "job-x"},
    }
    errors = []
    for wrong in (vm_id, "vm-none"):
        with pytest.raises(MicrovmError) as caught:
            await bench.call(name, OTHER, vm_id=wrong, **more.get(name, {}))
        errors.append(caught.value.body())
    assert errors[0] == errors[1]
    assert errors[0]["code"] == "not_found"
    assert (await bench.call("vm_status", vm_id=vm_id))["state"] == "running"


async def test_a_caller_that_hangs_up_leaves_a_call_that_can_be_joined(bench: Bench) -> None:
    call = asyncio.create_task(bench.vm("r"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    vm_id = await bench.vm("r")
    rows = cast("list[JsonObject]", (await bench.call("vm_list"))["vms"])
    assert [row["vm_id"] for row in rows] == [vm_id]
