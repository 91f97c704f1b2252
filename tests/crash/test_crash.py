"""The service may end anywhere: before and after every call it makes, recovery finds a certain state and no leak.

A scenario is run once to learn how many port calls it makes; then once per call and side with a crash there. Each
crash is followed by a new service on the same store and host, which recovers, and by one more cycle: the client
repeats its request, works, and destroys everything. The same enumeration runs with a cancelled client and with a
service that is told to stop in the place of the crash. Each life has an event loop of its own, as a process would.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from microvm_mcp.errors import FailedPrecondition, MicrovmError, OutcomeUnknown
from microvm_mcp.lifecycle import STABLE
from microvm_mcp.model import JobState, MachineView, ReceiptPhase, VmId, VmState
from tests.support.engine_rig import WORKSPACE, Rig, rig
from tests.support.world import Life, World

VM = VmId("vm-1")

Scenario = Callable[[Rig], Awaitable[None]]


async def create(r: Rig) -> None:
    await r.create()


async def create_and_exec(r: Rig) -> None:
    vm_id = (await r.create()).vm.vm_id
    await r.exec(vm_id, "a", "true")
    await r.exec(vm_id, "b", "sleep", wait_s=0)


async def create_exec_and_destroy(r: Rig) -> None:
    vm_id = (await r.create()).vm.vm_id
    await r.exec(vm_id, "b", "sleep", wait_s=0)
    await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)


async def create_and_stop(r: Rig) -> None:
    vm_id = (await r.create()).vm.vm_id
    await r.exec(vm_id, "b", "sleep", wait_s=0)
    await r.fleet.stop_workspace(WORKSPACE, wait_s=2)
    await r.fleet.destroy(WORKSPACE, vm_id, wait_s=2)


async def guest_ends(r: Rig) -> None:
    vm_id = (await r.create()).vm.vm_id
    await r.exec(vm_id, "b", "sleep", wait_s=0)
    for process in r.world.alive():
        process.end()
    await asyncio.sleep(0.02)
    await r.fleet.settle(WORKSPACE, vm_id, wait_s=2)


SCENARIOS: tuple[Scenario, ...] = (create_and_exec, create_exec_and_destroy, create_and_stop, guest_ends)


@dataclass
class Case:
    directory: Path
    world: World

    def live(self, life: Life, body: Scenario) -> None:
        """One process of the service, from its start to its end."""

        async def main() -> None:
            async with rig(self.directory, self.world, life=life) as r:
                await body(r)

        async def until_death() -> None:
            task = asyncio.create_task(main())
            life.on_death = task.cancel
            await asyncio.wait({task})
            if not life.dead:
                task.result()

        asyncio.run(until_death())


def steps_of(scenario: Scenario, directory: Path) -> list[str]:
    life = Life(World())
    Case(directory, life.world).live(life, scenario)
    return life.trace


def check_after_recovery(r: Rig, views: list[MachineView]) -> None:
    """What must hold whenever a service has recovered, whatever ended the one before."""
    world = r.world
    held = {view.vm.slot for view in views if view.vm.slot is not None}
    running = {view.vm.vmm_pid for view in views if view.vm.state is VmState.RUNNING}
    with_disk = {
        view.vm.vm_id for view in views if view.vm.slot is not None and view.vm.state is not VmState.DESTROYED
    }
    assert {view.vm.state for view in views} <= STABLE
    assert {process.pid for process in world.alive()} == running
    assert set(world.disks) == with_disk
    live_slots = {view.vm.slot for view in views if view.vm.state is VmState.RUNNING}
    assert world.networks == world.cgroups.keys() == world.runtime_dirs == live_slots <= held
    for view in views:
        if view.vm.state is not VmState.RUNNING:
            assert all(job.state is not JobState.RUNNING for job in view.jobs)
        if view.vm.state is VmState.FAILED:
            assert view.vm.failure is not None


async def check_receipts(r: Rig) -> None:
    """No receipt is lost: each phase says what is true."""
    made = await r.receipt("create-1")
    if made is None:
        assert known(r) == []
    else:
        assert made.phase is ReceiptPhase.DONE
        assert r.fleet.view(WORKSPACE, VM).vm.vm_id == made.vm_id
    for name in "ab":
        receipt = await r.receipt(f"exec-{name}")
        started = r.world.ran.count(f"exec-{name}")
        if receipt is None:
            assert started == 0
        else:
            assert receipt.job_id is not None
            job = await r.fleet.job(WORKSPACE, VM, receipt.job_id)
            assert started <= 1
            if receipt.phase is ReceiptPhase.DONE:
                assert started == 1
            if started == 0:
                assert job.state is JobState.LOST


async def recover_and_cycle(r: Rig) -> None:
    views = known(r)
    check_after_recovery(r, views)
    await check_receipts(r)
    # The client repeats what it asked for.
    view = await r.create()
    assert view.vm.state in {VmState.RUNNING, VmState.FAILED, VmState.STOPPED, VmState.DESTROYED}
    for name, command in (("a", "true"), ("b", "sleep")):
        with suppress(OutcomeUnknown, FailedPrecondition):
            await r.exec(VM, name, command, wait_s=0)
        assert r.world.ran.count(f"exec-{name}") <= 1
    # And the service still serves.
    fresh = await r.create("fresh")
    assert fresh.vm.state is VmState.RUNNING
    job, page = await r.exec(fresh.vm.vm_id, "fresh")
    assert (job.state, page is not None) == (JobState.COMPLETED, True)
    for one in known(r):
        await r.fleet.destroy(WORKSPACE, one.vm.vm_id, wait_s=2)
    world = r.world
    assert (world.alive(), world.disks, world.networks, world.cgroups, world.runtime_dirs) == (
        [],
        {},
        set(),
        {},
        set(),
    )


def known(r: Rig) -> list[MachineView]:
    found = []
    for name in ("1", "fresh"):
        with suppress(MicrovmError):
            found.append(r.view(name))
    return found


def enumerate_strikes(scenario: Scenario, directory: Path, strike: Callable[[Life], None] | None = None) -> int:
    # All scenarios begin with a creation; one of them is struck in it.
    first = (
        0 if scenario.__name__ == create_and_exec.__name__ else len(steps_of(create, subdirectory(directory))) - 1
    )
    steps = steps_of(scenario, subdirectory(directory))
    for at, name in enumerate(steps[first:], first):
        for side in (0, 1):
            case = Case(subdirectory(directory), World())
            life = Life(case.world, at=at, side=side, strike=strike)
            try:
                case.live(life, scenario)
                case.live(Life(case.world), recover_and_cycle)
            except BaseException as error:
                error.add_note(f"{'after' if side else 'before'} step {at} ({name}) of {life.trace}")
                raise
    return len(steps) - first


def subdirectory(directory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=directory))


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory where there is room: a crash of the service loses nothing that the kernel has."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_crash_at_any_step_leaves_a_certain_state_and_no_leak(scenario: Scenario, directory: Path) -> None:
    assert enumerate_strikes(scenario, directory) >= 6


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_host_that_goes_down_at_any_step_leaves_only_disks_and_truth(scenario: Scenario, directory: Path) -> None:
    def power_off(life: Life) -> None:
        life.world.reboot()
        life.crash()

    assert enumerate_strikes(scenario, directory, power_off) >= 6


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_client_that_goes_away_at_any_step_half_does_nothing(scenario: Scenario, directory: Path) -> None:
    clients: list[asyncio.Task[None]] = []

    async def with_client(r: Rig) -> None:
        client = asyncio.create_task(as_coroutine(scenario, r))
        clients.append(client)
        await asyncio.wait({client}, timeout=5)
        assert client.done()
        # What the machine owns goes on by itself.
        with suppress(MicrovmError):
            await r.fleet.settle(WORKSPACE, VM, wait_s=2)
        async with asyncio.timeout(2):
            while ReceiptPhase.SENT in [await phase(r, request_id) for request_id in ("exec-a", "exec-b")]:
                await asyncio.sleep(0.005)
        made = await r.receipt("create-1")
        if made is not None and made.phase is ReceiptPhase.DONE:
            failure = r.view().vm.failure
            assert failure is None or scenario not in (create_and_exec, create_exec_and_destroy)

    def hang_up(life: Life) -> None:
        if clients:
            clients[-1].cancel()

    with_client.__name__ = scenario.__name__
    assert enumerate_strikes(with_client, directory, hang_up) >= 6


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_service_told_to_stop_at_any_step_leaves_a_certain_state(scenario: Scenario, directory: Path) -> None:
    stops: list[asyncio.Event] = []

    async def until_told(r: Rig) -> None:
        stop = asyncio.Event()
        stops.append(stop)
        client = asyncio.create_task(as_coroutine(scenario, r))
        told = asyncio.create_task(stop.wait())
        await asyncio.wait({client, told}, return_when=asyncio.FIRST_COMPLETED)
        closing = asyncio.create_task(r.fleet.close())
        with suppress(MicrovmError):
            await client
        await closing
        told.cancel()

    until_told.__name__ = scenario.__name__

    def tell(life: Life) -> None:
        if stops:
            stops[-1].set()

    assert enumerate_strikes(until_told, directory, tell) >= 6


async def phase(r: Rig, request_id: str) -> ReceiptPhase | None:
    receipt = await r.receipt(request_id)
    return None if receipt is None else receipt.phase


async def as_coroutine(scenario: Scenario, r: Rig) -> None:
    await scenario(r)
