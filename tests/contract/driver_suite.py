"""What every driver promises, run against each of them: subclass `DriverSuite` and give it a `rig`.

Booting an emulated guest takes seconds, loading a saved one a moment: one boot per driver is saved (`golden`), and
the tests start from copies of it. Each works on the same spec, so each must leave nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from microvm_mcp.host import process
from microvm_mcp.vmm.driver import BootSpec, Driver, ProcessIdentity, SnapshotPaths, Vmm, VmmError
from microvm_mcp.wire.messages import Welcome
from tests.support.greet import greet

BOOT_S = 120.0
"""A loaded machine under emulation; nothing waits so long where things work."""
ANSWER_S = 30.0
SILENCE_S = 0.6
"""A stopped machine does not answer: so long we listen to the silence."""


@dataclass(frozen=True, slots=True)
class Rig:
    driver: Driver
    spec: BootSpec
    store: Path
    """Where snapshots go: on the file system of the spec's files."""
    golden: SnapshotPaths
    golden_boot_id: str
    restore_disk: Callable[[], None]
    """Puts back the disk that belongs to the golden snapshot."""
    processes: Callable[[], list[str]]
    """Whatever still runs for the spec's machine."""

    async def load_golden(self) -> Vmm:
        self.restore_disk()
        return await self.driver.load(self.spec, self.golden)

    def leftovers(self) -> list[str]:
        """What a kill has to remove: processes and all that is in the runtime directory."""
        return [*self.processes(), *(entry.name for entry in self.spec.runtime_dir.iterdir())]

    def leftovers_of_failure(self) -> list[str]:
        """What a call that failed has to remove besides: the memory that it made."""
        memory = self.spec.memory_file
        return [*self.leftovers(), *([memory.name] if memory is not None and memory.exists() else [])]

    async def greet(self, vmm: Vmm) -> Welcome:
        return await greet(vmm.channel.path, deadline_s=ANSWER_S)

    async def is_silent(self, vmm: Vmm) -> bool:
        try:
            await greet(vmm.channel.path, deadline_s=SILENCE_S)
        except (TimeoutError, ConnectionError):
            return True
        return False

    def paths(self, name: str) -> SnapshotPaths:
        return SnapshotPaths(self.store / f"{name}.memory", self.store / f"{name}.state")


async def make_golden(driver: Driver, spec: BootSpec, paths: SnapshotPaths) -> str:
    """One boot, saved; the boot id of that guest."""
    vmm = await driver.boot(spec)
    try:
        boot_id = (await greet(vmm.channel.path, deadline_s=BOOT_S)).boot_id
        await vmm.pause()
        await vmm.snapshot(paths)
    finally:
        await vmm.kill()
    return boot_id


def is_alive(identity: ProcessIdentity) -> bool:
    return process.started_ticks_of(identity.pid) == identity.started_ticks


@asynccontextmanager
async def killing(vmm: Vmm) -> AsyncIterator[Vmm]:
    """Kills the machine at the end, whatever happened."""
    try:
        yield vmm
    finally:
        await vmm.kill()


@pytest.mark.timeout(180)
class DriverSuite:
    @pytest.fixture
    def rig(self) -> Rig:
        raise NotImplementedError

    async def test_a_booted_guest_answers_and_is_dead_once_killed(self, rig: Rig) -> None:
        vmm = await rig.driver.boot(rig.spec)
        assert is_alive(vmm.identity)
        welcome = await greet(vmm.channel.path, deadline_s=BOOT_S)
        assert welcome.boot_id != rig.golden_boot_id
        await vmm.kill()
        assert not is_alive(vmm.identity)
        assert rig.leftovers() == []

    async def test_a_loaded_guest_stands_still_until_it_is_told_to_run(self, rig: Rig) -> None:
        async with killing(await rig.load_golden()) as vmm:
            assert await rig.is_silent(vmm)
            await vmm.run()
            assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id
        assert rig.leftovers() == []

    async def test_pause_and_run_can_be_repeated_and_each_time_a_new_connection_is_answered(self, rig: Rig) -> None:
        async with killing(await rig.load_golden()) as vmm:
            await vmm.run()
            for _ in range(3):
                assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id
                await vmm.pause()
                assert await rig.is_silent(vmm)
                await vmm.run()
            assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id

    async def test_pausing_twice_and_running_twice_changes_nothing(self, rig: Rig) -> None:
        async with killing(await rig.load_golden()) as vmm:
            await vmm.run()
            await vmm.run()
            assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id
            await vmm.pause()
            await vmm.pause()
            assert await rig.is_silent(vmm)

    async def test_a_machine_goes_through_saving_ending_and_loading_again_and_again(self, rig: Rig) -> None:
        paths = rig.golden
        for round_ in range(3):
            async with killing(await rig.driver.load(rig.spec, paths)) as vmm:
                await vmm.run()
                assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id
                await vmm.pause()
                paths = rig.paths(f"round-{round_}")
                await vmm.snapshot(paths)
                assert paths.memory.exists()
                assert paths.state.stat().st_size > 0
            assert rig.leftovers() == []

    async def test_a_saved_machine_stays_paused_and_can_run_on_and_be_saved_again(self, rig: Rig) -> None:
        async with killing(await rig.load_golden()) as vmm:
            await vmm.run()
            for name in ("first", "second"):
                await vmm.pause()
                await vmm.snapshot(rig.paths(name))
                assert await rig.is_silent(vmm)
                await vmm.run()
                assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id

    async def test_one_snapshot_can_be_loaded_any_number_of_times(self, rig: Rig) -> None:
        before = rig.golden.memory.stat()
        for _ in range(2):
            async with killing(await rig.load_golden()) as vmm:
                await vmm.run()
                assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id
        after = rig.golden.memory.stat()
        assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)

    async def test_a_running_machine_is_not_saved_and_goes_on(self, rig: Rig) -> None:
        async with killing(await rig.load_golden()) as vmm:
            await vmm.run()
            paths = rig.paths("refused")
            with pytest.raises(VmmError, match="paused"):
                await vmm.snapshot(paths)
            assert not paths.state.exists()
            assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id

    async def test_a_snapshot_replaces_no_file(self, rig: Rig) -> None:
        async with killing(await rig.load_golden()) as vmm:
            with pytest.raises(VmmError):
                await vmm.snapshot(SnapshotPaths(rig.paths("taken").memory, rig.golden.state))
        async with killing(await rig.load_golden()):
            pass

    async def test_kill_works_twice_and_at_once_from_every_state(self, rig: Rig) -> None:
        for running in (False, True):
            vmm = await rig.load_golden()
            if running:
                await vmm.run()
            await asyncio.gather(vmm.kill(), vmm.kill(), vmm.kill())
            assert not is_alive(vmm.identity)
            await vmm.kill()
            assert rig.leftovers() == []

    async def test_every_waiter_hears_of_the_end_and_so_does_a_late_one(self, rig: Rig) -> None:
        vmm = await rig.load_golden()
        waiters = [asyncio.create_task(vmm.wait_exit()) for _ in range(4)]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        await vmm.kill()
        infos = [*await asyncio.gather(*waiters), await vmm.wait_exit()]
        assert {info.exit_status for info in infos} == {-signal.SIGKILL}
        assert not any(info.guest_shutdown or info.guest_panicked for info in infos)

    async def test_an_end_from_outside_is_noticed_and_is_not_the_guests_doing(self, rig: Rig) -> None:
        vmm = await rig.load_golden()
        await vmm.run()
        os.kill(vmm.identity.pid, signal.SIGKILL)
        async with asyncio.timeout(ANSWER_S):
            info = await vmm.wait_exit()
        assert (info.guest_shutdown, info.guest_panicked) == (False, False)
        with pytest.raises(VmmError):
            await vmm.pause()
        await vmm.kill()
        assert rig.leftovers() == []

    async def test_a_guest_that_was_asked_to_shut_down_says_so_in_its_end(self, rig: Rig) -> None:
        async with killing(await rig.load_golden()) as vmm:
            await vmm.run()
            await rig.greet(vmm)
            await vmm.request_shutdown()
            async with asyncio.timeout(BOOT_S):
                info = await vmm.wait_exit()
            assert (info.guest_shutdown, info.guest_panicked) == (True, False)
        assert rig.leftovers() == []

    async def test_a_machine_that_was_let_go_is_found_again_and_obeys(self, rig: Rig) -> None:
        vmm = await rig.load_golden()
        try:
            for _ in range(3):
                identity = vmm.identity
                await vmm.close()
                assert is_alive(identity)
                adopted = await rig.driver.adopt(rig.spec, identity)
                assert adopted is not None
                vmm = adopted
                assert vmm.identity == identity
                await vmm.run()
                assert (await rig.greet(vmm)).boot_id == rig.golden_boot_id
                await vmm.pause()
                assert await rig.is_silent(vmm)
        finally:
            await vmm.kill()
        assert not is_alive(vmm.identity)
        assert (await vmm.wait_exit()).guest_shutdown is False
        assert rig.leftovers() == []

    async def test_the_dead_and_strangers_are_not_adopted(self, rig: Rig) -> None:
        async with killing(await rig.load_golden()) as vmm:
            identity = vmm.identity
            late = replace(identity, started_ticks=identity.started_ticks + 1)
            assert await rig.driver.adopt(rig.spec, late) is None
        assert await rig.driver.adopt(rig.spec, identity) is None
        assert await rig.driver.adopt(rig.spec, ProcessIdentity(os.getpid(), 1)) is None

    @pytest.mark.parametrize("missing", ["memory", "state"])
    async def test_loading_what_is_not_there_is_refused_and_leaves_nothing(self, rig: Rig, missing: str) -> None:
        gone = rig.store / "never-written"
        paths = replace(rig.golden, **{missing: gone})
        with pytest.raises(VmmError):
            await rig.driver.load(rig.spec, paths)
        assert rig.leftovers_of_failure() == []

    async def test_loading_a_damaged_state_is_refused_and_leaves_nothing(self, rig: Rig) -> None:
        damaged = rig.store / "damaged.state"
        damaged.write_bytes(b"\0" * 4096)
        with pytest.raises(VmmError):
            await rig.driver.load(rig.spec, replace(rig.golden, state=damaged))
        assert rig.leftovers_of_failure() == []

    async def test_loading_memory_of_another_size_is_refused(self, rig: Rig) -> None:
        with pytest.raises(VmmError):
            await rig.driver.load(replace(rig.spec, memory_mib=rig.spec.memory_mib * 2), rig.golden)
        assert rig.leftovers_of_failure() == []

    @pytest.mark.parametrize("missing", ["disk", "kernel"])
    async def test_a_boot_that_fails_says_what_was_tried_and_leaves_nothing(self, rig: Rig, missing: str) -> None:
        absent = rig.store / "absent"
        spec = replace(rig.spec, disk=absent) if missing == "disk" else replace(rig.spec, kernel=absent)
        with pytest.raises(VmmError) as caught:
            await rig.driver.boot(spec)
        assert caught.value.evidence
        assert rig.leftovers_of_failure() == []
