"""A host in memory: disks, namespaces, cgroups, VMM processes and guests, for tests of the engine without a VM.

The world outlives the service: a `Life` is one process of the service, with the ports it talks through. Every call
of a port is one numbered step, and a test may have the life end before or after any of them. The world raises
`Forbidden` where the engine does what must never happen: two VMMs on one disk, a VMM without its place on the host,
a command that runs twice.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from microvm_mcp.engine.context import Context, EngineSettings, Timeouts
from microvm_mcp.engine.host_port import HostFailure, Place
from microvm_mcp.link.port import GuestLied, GuestRefused, LinkLost
from microvm_mcp.model import (
    FINAL_JOB_STATES,
    FilePage,
    FileWritten,
    GuestInfo,
    JobId,
    JobReport,
    JobRequest,
    JobsReport,
    JobState,
    OutputPage,
    Slot,
    StreamPage,
    VmId,
)
from microvm_mcp.policy import GIB, HostLimits
from microvm_mcp.store.database import Database
from microvm_mcp.vmm.driver import (
    BootSpec,
    Capabilities,
    Channel,
    ExitInfo,
    ProcessIdentity,
    SnapshotPaths,
    Vmm,
    VmmError,
)

T = TypeVar("T")

IMAGE_BYTES = 3 * GIB

FAST = Timeouts(
    call_s=2.0,
    boot_hello_s=0.5,
    adopt_hello_s=0.3,
    recovery_s=5.0,
    answer_s=0.3,
    cancel_s=0.3,
    file_s=0.3,
    first_wait_s=0.2,
    fetch_s=0.2,
    poll_s=0.5,
    poll_pause_s=0.001,
    retry_s=0.02,
    stop_grace_s=0.2,
    close_s=1.0,
)

SETTINGS = EngineSettings(
    limits=HostLimits(max_vms=100, max_memory_mib=100 * 1024, max_storage_gib=10_000),
    slots=64,
    kernel=Path("/k"),
    initramfs=Path("/i"),
    kernel_arguments="quiet",
    image_digest="digest",
    image_bytes=IMAGE_BYTES,
    timeouts=FAST,
)


class Crash(BaseException):
    """The service's process is gone; nothing of it has an effect any more."""


class Forbidden(AssertionError):
    """The engine did what must never happen."""


@dataclass
class GuestJob:
    report: JobReport
    stdout: bytes = b""


@dataclass
class Guest:
    """What runs in a VMM process. The knobs make it silent, refusing, lying, or lose answers."""

    jobs: dict[JobId, GuestJob] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    generation: int = 0
    clock_ns: int = 0
    silent: bool = False
    lies: bool = False
    refuses: str | None = None
    losses: int = 0
    """So many answers to start_job are lost after the command has started."""
    unsent: int = 0
    """So many start_job requests never leave the host."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def end_job(self, job_id: JobId, *, exit_code: int = 0, state: JobState = JobState.COMPLETED) -> None:
        job = self.jobs[job_id]
        job.report = replace(job.report, state=state, exit_code=exit_code, finished_at=job.report.started_at + 1)
        self.change()

    def change(self) -> None:
        self.generation += 1
        wake(self.waiters)


@dataclass
class Process:
    pid: int
    spec: BootSpec
    guest: Guest = field(default_factory=Guest)
    ended: ExitInfo | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    heeds_shutdown: bool = True
    ends_when_adopted: ExitInfo | None = None
    """It had ended inside and waits for somebody to tell."""

    def end(self, info: ExitInfo | None = None) -> None:
        if self.ended is None:
            self.ended = info or ExitInfo(None, "", guest_shutdown=False, guest_panicked=False)
            wake(self.waiters)
            self.guest.change()


def wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        # Those of an earlier life wait in a loop that is closed.
        if not waiter.get_loop().is_closed() and not waiter.done():
            waiter.set_result(None)
    waiters.clear()


@dataclass
class World:
    boot: str = "boot-1"
    free: int = 1000 * GIB
    disks: dict[VmId, int] = field(default_factory=dict)
    networks: set[Slot] = field(default_factory=set)
    cgroups: dict[Slot, set[int]] = field(default_factory=dict)
    runtime_dirs: set[Slot] = field(default_factory=set)
    processes: dict[int, Process] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    """Request ids of commands that started, once per start."""
    fails: dict[str, Exception] = field(default_factory=dict)
    """Step name -> what that step raises instead of having its effect."""
    new_guest: Callable[[], Guest] = Guest
    _next_pid: int = 100

    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if process.ended is None]

    def start(self, spec: BootSpec) -> Process:
        slot, vm_id = Slot(int(spec.unit.rsplit("-", 1)[1])), VmId(spec.disk.parent.name)
        missing = [
            name
            for name, there in (
                ("disk", vm_id in self.disks),
                ("network", slot in self.networks),
                ("cgroup", slot in self.cgroups),
                ("runtime directory", slot in self.runtime_dirs),
            )
            if not there
        ]
        if missing:
            raise Forbidden(f"a VMM without its {', '.join(missing)}")
        if any(process.spec.disk == spec.disk or process.spec.uid == spec.uid for process in self.alive()):
            raise Forbidden("two VMMs on one disk or with one user")
        self._next_pid += 1
        process = Process(self._next_pid, spec, self.new_guest())
        self.processes[process.pid] = process
        self.cgroups[slot].add(process.pid)
        return process

    def reboot(self) -> None:
        """The host goes down and comes up again: only disks are left."""
        self.boot += "+"
        for process in self.processes.values():
            process.end()
        self.networks.clear()
        self.cgroups.clear()
        self.runtime_dirs.clear()

    def only_guest(self) -> Guest:
        (process,) = self.alive()
        return process.guest


class Life:
    """One process of the service. `strike` is run before (`side` 0) or after (1) the step of number `at`."""

    def __init__(
        self, world: World, *, at: int = -1, side: int = 0, strike: Callable[[Life], None] | None = None
    ) -> None:
        self.world = world
        self.trace: list[str] = []
        self.dead = False
        self.on_death: Callable[[], object] = lambda: None
        self._at, self._side, self._strike = at, side, strike or Life.crash

    def crash(self) -> None:
        self.dead = True
        self.on_death()
        raise Crash

    async def step(self, name: str, effect: Callable[[], T]) -> T:
        number = self.begin(name)
        await asyncio.sleep(0)
        if self.dead:
            raise Crash
        result = effect()
        await self.finish(number)
        return result

    def begin(self, name: str) -> int:
        if self.dead:
            raise Crash
        number = len(self.trace)
        self.trace.append(name)
        if number == self._at and self._side == 0:
            self._strike(self)
        if name in self.world.fails:
            raise self.world.fails[name]
        return number

    async def finish(self, number: int) -> None:
        if number == self._at and self._side == 1:
            self._strike(self)
        # A caller that is cancelled now does not get the result, though the effect is there.
        await asyncio.sleep(0)

    def context(self, db: Database, settings: EngineSettings = SETTINGS) -> Context:
        ticks = iter(range(1_000, 10_000_000))
        return Context(
            db=CountedStore(self, db),
            driver=WorldDriver(self),
            host=WorldHost(self),
            dial=lambda channel: WorldLink(self, int(channel.path.name)),
            now=lambda: float(next(ticks)),
            settings=settings,
        )


class CountedStore:
    def __init__(self, life: Life, db: Database) -> None:
        self._life, self._db = life, db

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        number = self._life.begin("store.write")
        result = await self._db.write(fn)
        await self._life.finish(number)
        return result

    async def write_lazily(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        number = self._life.begin("store.write_lazily")
        result = await self._db.write_lazily(fn)
        await self._life.finish(number)
        return result

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        number = self._life.begin("store.read")
        result = await self._db.read(fn)
        await self._life.finish(number)
        return result


class WorldHost:
    def __init__(self, life: Life) -> None:
        self._life, self._world = life, life.world

    def place(self, slot: Slot, vm_id: VmId) -> Place:
        return Place(
            unit=f"mvm-test-{slot}",
            uid=5000 + slot,
            gid=5000 + slot,
            netns=f"mvm-test-{slot}",
            tap="tap0",
            mac="02:00:00:00:00:02",
            cgroup=Path(f"/cgroup/{slot}"),
            runtime_dir=Path(f"/jail/{slot}"),
            disk=Path(f"/machines/{vm_id}/disk.raw"),
        )

    def boot_id(self) -> str:
        return self._world.boot

    async def free_bytes(self) -> int:
        return await self._life.step("host.free_bytes", lambda: self._world.free)

    async def create_disk(self, vm_id: VmId, size_bytes: int) -> None:
        await self._life.step("host.create_disk", lambda: self._world.disks.__setitem__(vm_id, size_bytes))

    async def remove_disk(self, vm_id: VmId) -> None:
        def remove() -> None:
            if any(process.spec.disk.parent.name == vm_id for process in self._world.alive()):
                raise Forbidden("a disk removed under a VMM")
            self._world.disks.pop(vm_id, None)

        await self._life.step("host.remove_disk", remove)

    async def ensure_cgroup(self, slot: Slot, *, memory_mib: int, vcpus: int) -> None:
        await self._life.step("host.ensure_cgroup", lambda: self._world.cgroups.setdefault(slot, set()))

    async def end_cgroup(self, slot: Slot) -> None:
        def end() -> None:
            for pid in self._world.cgroups.pop(slot, set()):
                self._world.processes[pid].end()

        await self._life.step("host.end_cgroup", end)

    async def ensure_network(self, slot: Slot) -> None:
        await self._life.step("host.ensure_network", lambda: self._world.networks.add(slot))

    async def remove_network(self, slot: Slot) -> None:
        await self._life.step("host.remove_network", lambda: self._world.networks.discard(slot))

    async def ensure_runtime_dir(self, slot: Slot) -> None:
        await self._life.step("host.ensure_runtime_dir", lambda: self._world.runtime_dirs.add(slot))

    async def remove_runtime_dir(self, slot: Slot) -> None:
        await self._life.step("host.remove_runtime_dir", lambda: self._world.runtime_dirs.discard(slot))

    async def leftovers(self) -> frozenset[Slot]:
        world = self._world
        return await self._life.step(
            "host.leftovers", lambda: frozenset(world.networks | world.cgroups.keys() | world.runtime_dirs)
        )


class WorldVmm:
    def __init__(self, life: Life, process: Process) -> None:
        self._life, self._process = life, process

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self._process.pid, self._process.pid * 7)

    @property
    def channel(self) -> Channel:
        return Channel("unix", Path(f"/jail/{self._process.pid}"))

    async def run(self) -> None:
        raise NotImplementedError

    async def pause(self) -> None:
        raise NotImplementedError

    async def snapshot(self, paths: SnapshotPaths) -> None:
        raise NotImplementedError

    async def request_shutdown(self) -> None:
        def ask() -> None:
            if self._process.heeds_shutdown:
                self._process.end(ExitInfo(0, "", guest_shutdown=True, guest_panicked=False))

        await self._life.step("vmm.request_shutdown", ask)

    async def kill(self) -> None:
        await self._life.step("vmm.kill", self._process.end)

    async def wait_exit(self) -> ExitInfo:
        while self._process.ended is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._process.waiters.append(waiter)
            await waiter
        return self._process.ended

    async def close(self) -> None:
        await self._life.step("vmm.close", lambda: None)


class WorldDriver:
    def __init__(self, life: Life) -> None:
        self._life = life

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="world",
            hardware_virtualisation=False,
            snapshot=False,
            jail=False,
            machine_type="none",
            vmm_version="0",
            vmm_digest="",
        )

    async def boot(self, spec: BootSpec) -> Vmm:
        process = await self._life.step("driver.boot", lambda: self._life.world.start(spec))
        return WorldVmm(self._life, process)

    async def load(self, spec: BootSpec, paths: SnapshotPaths) -> Vmm:
        raise VmmError("no snapshots here")

    async def adopt(self, spec: BootSpec, identity: ProcessIdentity) -> Vmm | None:
        def find() -> Process | None:
            process = self._life.world.processes.get(identity.pid)
            if process is None or process.ended is not None or identity.started_ticks != process.pid * 7:
                return None
            return process

        process = await self._life.step("driver.adopt", find)
        if process is not None and process.ends_when_adopted is not None:
            asyncio.get_running_loop().call_soon(process.end, process.ends_when_adopted)
        return None if process is None else WorldVmm(self._life, process)


class WorldLink:
    def __init__(self, life: Life, pid: int) -> None:
        self._life, self._process = life, life.world.processes[pid]
        self._closed = False

    @property
    def _guest(self) -> Guest:
        return self._process.guest

    async def _ask(self, name: str, deadline_s: float, answer: Callable[[], T]) -> T:
        """Silence until the deadline, a lie, a refusal, or the answer."""
        if self._closed or self._process.ended is not None:
            raise LinkLost("the other end is gone", sent=False)
        if self._guest.silent:
            await asyncio.sleep(deadline_s)
            raise LinkLost("no answer", sent=True)
        if self._guest.lies:
            raise GuestLied("that is no frame")
        if self._guest.refuses is not None and name != "hello":
            raise GuestRefused(self._guest.refuses, "<script>words of a guest</script>")
        return await self._life.step(f"link.{name}", answer)

    async def hello(self, *, deadline_s: float) -> GuestInfo:
        active = sum(job.report.state is JobState.RUNNING for job in self._guest.jobs.values())
        return await self._ask("hello", deadline_s, lambda: GuestInfo(1, "1", "guest-boot", active))

    async def start_job(self, job: JobRequest, *, wait_s: float, deadline_s: float) -> OutputPage:
        if self._guest.unsent:
            self._guest.unsent -= 1
            raise LinkLost("not attached", sent=False)
        await self._ask("start_job", deadline_s, lambda: self._run(job))
        if self._guest.losses:
            self._guest.losses -= 1
            raise LinkLost("the answer is lost", sent=True)
        ends = asyncio.get_running_loop().time() + wait_s
        while self._guest.jobs[job.job_id].report.state is JobState.RUNNING and await self._changed(ends):
            self._refuse_if_gone()
        return self._page(job.job_id, 0)

    def _run(self, job: JobRequest) -> OutputPage:
        if job.job_id not in self._guest.jobs:
            if job.request_id in self._life.world.ran:
                raise Forbidden("a command ran twice for one request id")
            self._life.world.ran.append(job.request_id)
            report = JobReport(
                job_id=job.job_id,
                request_id=job.request_id,
                state=JobState.RUNNING,
                started_at=5.0,
                finished_at=None,
                exit_code=None,
                signal=None,
                truncated=False,
                detached=0,
                log_path="/var/lib/jobs/x/output.log",
            )
            self._guest.jobs[job.job_id] = GuestJob(report, job.command.encode())
            self._guest.change()
            if job.command != "sleep":
                self._guest.end_job(job.job_id)
        return self._page(job.job_id, 0)

    def _page(self, job_id: JobId, offset: int) -> OutputPage:
        job = self._guest.jobs[job_id]
        stdout = StreamPage(offset, job.stdout[offset:], len(job.stdout), len(job.stdout), 0)
        return OutputPage(job.report, stdout, StreamPage(0, b"", 0, 0, 0))

    async def job_output(
        self, job_id: JobId, *, stdout: int, stderr: int, limit: int, wait_s: float, deadline_s: float
    ) -> OutputPage:
        def page() -> OutputPage:
            if job_id not in self._guest.jobs:
                raise GuestRefused("not_found", "")
            return self._page(job_id, stdout)

        return await self._ask("job_output", deadline_s, page)

    async def list_jobs(self, *, generation: int, wait_s: float, deadline_s: float) -> JobsReport:
        ends = asyncio.get_running_loop().time() + wait_s
        while generation == self._guest.generation and await self._changed(ends):
            self._refuse_if_gone()
        return await self._ask(
            "list_jobs",
            deadline_s,
            lambda: JobsReport(self._guest.generation, tuple(job.report for job in self._guest.jobs.values())),
        )

    async def cancel_job(self, job_id: JobId, *, deadline_s: float) -> JobReport:
        def cancel() -> JobReport:
            if job_id not in self._guest.jobs:
                raise GuestRefused("not_found", "")
            if self._guest.jobs[job_id].report.state not in FINAL_JOB_STATES:
                self._guest.end_job(job_id, state=JobState.CANCELLED)
            return self._guest.jobs[job_id].report

        return await self._ask("cancel_job", deadline_s, cancel)

    async def forget_job(self, job_id: JobId, *, deadline_s: float) -> None:
        await self._ask("forget_job", deadline_s, lambda: self._guest.jobs.pop(job_id, None))

    async def read_file(self, path: str, *, offset: int, length: int, deadline_s: float) -> FilePage:
        def read() -> FilePage:
            if path not in self._guest.files:
                raise GuestRefused("not_found", "")
            data = self._guest.files[path]
            return FilePage(data[offset : offset + length], offset, len(data), 0o644)

        return await self._ask("read_file", deadline_s, read)

    async def write_file(
        self, path: str, data: bytes, *, offset: int | None, mode: int | None, deadline_s: float
    ) -> FileWritten:
        def write() -> FileWritten:
            self._guest.files[path] = data
            return FileWritten(len(data), 0o644)

        return await self._ask("write_file", deadline_s, write)

    async def set_clock(self, now_ns: int, *, deadline_s: float) -> None:
        await self._ask("set_clock", deadline_s, lambda: setattr(self._guest, "clock_ns", now_ns))

    async def freeze(self, *, deadline_s: float) -> None:
        raise NotImplementedError

    async def thaw(self, *, deadline_s: float) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self._closed = True
        wake(self._guest.waiters)

    def _refuse_if_gone(self) -> None:
        if self._closed or self._process.ended is not None:
            raise LinkLost("the other end is gone", sent=True)

    async def _changed(self, ends: float) -> bool:
        """Whether the guest changed before `ends` (in the loop's time)."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._guest.waiters.append(waiter)
        try:
            async with asyncio.timeout_at(ends):
                await waiter
        except TimeoutError:
            return False
        return True


def host_full() -> HostFailure:
    return HostFailure("has no room for another disk", full=True)
