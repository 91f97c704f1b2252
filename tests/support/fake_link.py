"""A guest in memory behind the link port, for tests of what stands above it. It passes `tests.contract.link_suite`.

Commands are steps separated by `;`, each one of: `echo WORDS`, `sleep SECONDS`, `exit CODE`, `head -c N /dev/zero`,
`true`; with ` >&2` after it to write to stderr, with ` &` after it to leave it behind (`sleep 9 & echo hi`).

Knobs of `FakeGuest` make it silent, lying, refusing, or lose what is sent and answered.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from microvm_mcp.guest.budget import Budget
from microvm_mcp.guest.jobs import MAX_ACTIVE
from microvm_mcp.guest.retain import KeptStream, PastEnd, Retained
from microvm_mcp.link.port import GuestLied, GuestRefused, LinkLost
from microvm_mcp.model import (
    FilePage,
    FileWritten,
    GuestInfo,
    JobId,
    JobReport,
    JobRequest,
    JobsReport,
    JobState,
    OutputPage,
    StreamPage,
)
from microvm_mcp.wire.messages import MAX_DATA, MAX_JOBS, MAX_PATH, PAGE_BYTES

T = TypeVar("T")
STATE = "/var/lib/microvm/jobs"


class FakeJob:
    def __init__(self, guest: FakeGuest, request: JobRequest, now: float) -> None:
        self.request = request
        self.state = JobState.RUNNING
        self.started_at = time.time()
        self.finished_at: float | None = None
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.retained = Retained()
        self.log = bytearray()
        self.left: set[asyncio.Task[None]] = set()
        """What runs in the background."""
        timeout = request.timeout_seconds
        self.timeout = None if timeout is None else Budget(timeout, now)
        self.longest = Budget(request.max_seconds, now)
        self._guest = guest
        self.shell = asyncio.create_task(self._run(), name=f"fake {request.job_id}")

    @property
    def budgets(self) -> list[Budget]:
        mine = [self.timeout] if self.state is not JobState.RUNNING else [self.timeout, self.longest]
        return [budget for budget in mine if budget is not None]

    @property
    def is_empty(self) -> bool:
        return self.state is not JobState.RUNNING and not self.left

    def report(self) -> JobReport:
        return JobReport(
            job_id=self.request.job_id,
            request_id=self.request.request_id,
            state=self.state,
            started_at=self.started_at,
            finished_at=self.finished_at,
            exit_code=self.exit_code,
            signal=self.signal,
            truncated=self.retained.truncated,
            detached=0 if self.state is JobState.RUNNING else len(self.left),
            log_path=f"{STATE}/{self.request.job_id}/output.log",
            service_time_us=None if self.finished_at is None else 1000,
        )

    def page(self, stdout: int, stderr: int, limit: int) -> OutputPage:
        streams = (("stdout", self.retained.stdout, stdout), ("stderr", self.retained.stderr, stderr))
        pages = []
        for name, stream, offset in streams:
            try:
                pages.append(StreamPage(*stream.page(offset, limit)))
            except PastEnd as error:
                raise GuestRefused("invalid", f"{name} has {error.end} bytes so far") from error
        return OutputPage(self.report(), *pages)

    def end(self, state: JobState) -> None:
        """As the kernel does: everything at once, by signal 9."""
        for task in (*self.left, self.shell):
            task.cancel()
        self.left.clear()
        if self.state is JobState.RUNNING:
            self.finish(state, None, 9)

    def finish(self, state: JobState, exit_code: int | None, signal: int | None = None) -> None:
        self.state, self.exit_code, self.signal = state, exit_code, signal
        self.finished_at = time.time()
        self._guest.change()

    async def _run(self) -> None:
        code = 0
        for part in re.findall(r"[^;&]+(?:>&2)?[;&]?", self.request.command.replace(">&2", "\1")):
            step = part.strip(" ;&").replace("\1", ">&2")
            if part.endswith("&"):
                task = asyncio.create_task(self._step(step), name="fake left behind")
                self.left.add(task)
                task.add_done_callback(self._gone)
            elif step.startswith("exit "):
                code = int(step.removeprefix("exit "))
                break
            else:
                await self._step(step)
        self.finish(JobState.COMPLETED, code)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self.left.discard(task)
        self._guest.change()

    async def _step(self, step: str) -> None:
        words = step.removesuffix(">&2").split()
        stream = self.retained.stderr if step.endswith(">&2") else self.retained.stdout
        match words:
            case ["echo", *rest]:
                self._write(stream, " ".join(rest).encode() + b"\n")
            case ["head", "-c", count, "/dev/zero"]:
                self._write(stream, bytes(int(count)))
            case ["sleep", seconds]:
                await asyncio.sleep(float(seconds))
                await self._guest.thawed.wait()
            case ["true"]:
                pass
            case _:
                raise AssertionError(f"the fake knows no such command: {step}")

    def _write(self, stream: KeptStream, data: bytes) -> None:
        for start in range(0, len(data), 65_536):
            self.retained.append(stream, data[start : start + 65_536])
        self.log += data
        self._guest.change(new_generation=False)


@dataclass
class FakeFile:
    data: bytes
    mode: int


@dataclass
class FakeGuest:
    """What runs in a machine. It outlives any link to it; `stop` ends its tasks."""

    boot_id: str = "00000000-0000.0000"
    jobs: dict[JobId, FakeJob] = field(default_factory=dict)
    files: dict[str, FakeFile] = field(default_factory=dict)
    clock_settings: list[int] = field(default_factory=list)
    generation: int = 0
    silent: bool = False
    """Nothing is answered, and nothing done."""
    lies: bool = False
    refuses: tuple[str, str] | None = None
    """Code and message, for everything but the hello."""
    unsent: int = 0
    """So many calls never leave the host."""
    lost_answers: int = 0
    """So many answers to start_job and write_file are lost after they took effect."""
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.thawed.set()

    def change(self, *, new_generation: bool = True) -> None:
        self.generation += new_generation
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self, ends: float) -> bool:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout_at(ends):
                await waiter
        except TimeoutError:
            return False
        return True

    def watch_time(self) -> None:
        """End what is due, and come back when the next one is."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dues = []
        for job in self.jobs.values():
            due = min((b.due_at for b in job.budgets if b.due_at is not None), default=None)
            if due is None or job.is_empty:
                continue
            if due <= loop.time():
                job.end(JobState.TIMED_OUT)
                self.change()
            else:
                dues.append(due)
        if dues:
            self._timer = loop.call_at(min(dues), self.watch_time)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [task for job in self.jobs.values() for task in (*job.left, job.shell)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FakeLink:
    """Implements `link.port.Link` on a FakeGuest."""

    def __init__(self, guest: FakeGuest) -> None:
        self._guest = guest
        self._closed = False

    async def hello(self, *, deadline_s: float) -> GuestInfo:
        def greet() -> GuestInfo:
            active = sum(job.state is JobState.RUNNING for job in self._guest.jobs.values())
            return GuestInfo(1, "0.0.0", self._guest.boot_id, active)

        return await self._ask(greet, deadline_s, hello=True)

    async def start_job(self, job: JobRequest, *, wait_s: float, deadline_s: float) -> OutputPage:
        fake = await self._ask(lambda: self._start(job), deadline_s)
        self._lose_answer()
        await self._until(lambda: fake.state is not JobState.RUNNING, min(wait_s, deadline_s))
        return fake.page(0, 0, PAGE_BYTES)

    async def job_output(
        self, job_id: JobId, *, stdout: int, stderr: int, limit: int, wait_s: float, deadline_s: float
    ) -> OutputPage:
        job = await self._ask(lambda: self._job(job_id), deadline_s)
        kept = job.retained
        job.page(stdout, stderr, 0)
        await self._until(
            lambda: (
                job.state is not JobState.RUNNING or kept.stdout.written > stdout or kept.stderr.written > stderr
            ),
            min(wait_s, deadline_s),
        )
        return job.page(stdout, stderr, limit)

    async def list_jobs(self, *, generation: int, wait_s: float, deadline_s: float) -> JobsReport:
        guest = self._guest
        await self._ask(lambda: None, deadline_s)
        await self._until(lambda: guest.generation != generation, min(wait_s, deadline_s))
        return JobsReport(guest.generation, tuple(job.report() for job in guest.jobs.values()))

    async def cancel_job(self, job_id: JobId, *, deadline_s: float) -> JobReport:
        def cancel() -> JobReport:
            job = self._job(job_id)
            if not job.is_empty:
                job.end(JobState.CANCELLED)
                self._guest.change()
            return job.report()

        return await self._ask(cancel, deadline_s)

    async def forget_job(self, job_id: JobId, *, deadline_s: float) -> None:
        def forget() -> None:
            job = self._guest.jobs.get(job_id)
            if job is not None and not job.is_empty:
                raise GuestRefused("busy", f"{job_id} still has processes")
            if self._guest.jobs.pop(job_id, None) is not None:
                self._guest.change()

        await self._ask(forget, deadline_s)

    async def read_file(self, path: str, *, offset: int, length: int, deadline_s: float) -> FilePage:
        def read() -> FilePage:
            for job in self._guest.jobs.values():
                if path == job.report().log_path:
                    return FilePage(bytes(job.log[offset : offset + length]), offset, len(job.log), 0o644)
            if path.startswith(f"{STATE}/") and path.endswith("/output.log"):
                raise GuestRefused("not_found", "no such file or directory")
            name = self._locate(path)
            file = self._guest.files.get(name)
            if file is None:
                raise GuestRefused("not_found", "no such file or directory")
            return FilePage(file.data[offset : offset + length], offset, len(file.data), file.mode)

        return await self._ask(read, deadline_s)

    async def write_file(
        self, path: str, data: bytes, *, offset: int | None, mode: int | None, deadline_s: float
    ) -> FileWritten:
        def write() -> FileWritten:
            if len(data) > MAX_DATA:
                raise GuestRefused("invalid", "too much data")
            name = self._locate(path)
            present = self._guest.files.get(name)
            if offset is not None and offset > 0 and present is None:
                raise GuestRefused("not_found", "no such file or directory")
            size = 0 if present is None else len(present.data)
            if offset is not None and offset != size:
                raise GuestRefused("conflict", f"the file has {size} bytes, not {offset}")
            before = present.data if present is not None and offset is not None else b""
            kept = 0o644 if present is None else present.mode
            self._guest.files[name] = FakeFile(before + data, kept if mode is None else mode)
            return FileWritten(len(before) + len(data), self._guest.files[name].mode)

        written = await self._ask(write, deadline_s)
        self._lose_answer()
        return written

    async def set_clock(self, now_ns: int, *, deadline_s: float) -> None:
        await self._ask(lambda: self._guest.clock_settings.append(now_ns), deadline_s)

    async def freeze(self, *, deadline_s: float) -> None:
        await self._ask(self._freeze, deadline_s)

    async def thaw(self, *, deadline_s: float) -> None:
        await self._ask(self._thaw, deadline_s)

    async def close(self) -> None:
        self._closed = True
        self._guest.change(new_generation=False)

    def _start(self, request: JobRequest) -> FakeJob:
        guest = self._guest
        known = guest.jobs.get(request.job_id)
        if known is not None:
            if known.request.request_id != request.request_id:
                raise GuestRefused("conflict", "the job id belongs to another request")
            return known
        active = [job_id for job_id, job in guest.jobs.items() if job.state is JobState.RUNNING]
        if not guest.thawed.is_set() or len(active) >= MAX_ACTIVE or len(guest.jobs) >= MAX_JOBS:
            raise GuestRefused("busy", f"frozen, or {len(active)} jobs are active: {', '.join(active)}")
        self._locate_directory(request.cwd)
        job = guest.jobs[request.job_id] = FakeJob(guest, request, asyncio.get_running_loop().time())
        guest.change()
        guest.watch_time()
        return job

    def _job(self, job_id: JobId) -> FakeJob:
        try:
            return self._guest.jobs[job_id]
        except KeyError:
            raise GuestRefused("not_found", "no record of this job") from None

    def _freeze(self) -> None:
        self._guest.thawed.clear()
        for job in self._guest.jobs.values():
            for budget in job.budgets:
                budget.stop(asyncio.get_running_loop().time())

    def _thaw(self) -> None:
        for job in self._guest.jobs.values():
            for budget in job.budgets:
                budget.resume(asyncio.get_running_loop().time())
        self._guest.thawed.set()
        self._guest.watch_time()

    def _locate(self, path: str) -> str:
        """The name in `files`, or the refusal of a path that names no file."""
        components = _components(path)
        name = "/".join(components)
        for depth in range(1, len(components)):
            if "/".join(components[:depth]) in self._guest.files:
                raise GuestRefused("invalid", "a component of the path is not a directory")
        if not name or self._is_directory(name):
            raise GuestRefused("not_regular", "the path names a directory")
        return name

    def _locate_directory(self, path: str) -> None:
        name = "/".join(_components(path))
        if name in self._guest.files:
            raise GuestRefused("invalid", "a component of the path is not a directory")
        if name and not self._is_directory(name):
            raise GuestRefused("not_found", "no such file or directory")

    def _is_directory(self, name: str) -> bool:
        return any(other.startswith(f"{name}/") for other in self._guest.files)

    def _lose_answer(self) -> None:
        if self._guest.lost_answers:
            self._guest.lost_answers -= 1
            raise LinkLost("the answer was lost", sent=True)

    async def _ask(self, answer: Callable[[], T], deadline_s: float, *, hello: bool = False) -> T:
        if self._closed:
            raise LinkLost("the link is closed", sent=False)
        if self._guest.unsent:
            self._guest.unsent -= 1
            raise LinkLost("not attached", sent=False)
        if self._guest.silent:
            await asyncio.sleep(deadline_s)
            raise LinkLost("no answer before the deadline", sent=not hello)
        await asyncio.sleep(0)
        if self._guest.lies:
            raise GuestLied("that is no frame")
        if self._guest.refuses is not None and not hello:
            raise GuestRefused(*self._guest.refuses)
        return answer()

    async def _until(self, met: Callable[[], bool], wait_s: float) -> None:
        ends = asyncio.get_running_loop().time() + wait_s
        while not met() and await self._guest.changed(ends):
            if self._closed:
                raise LinkLost("the link was closed", sent=True)


def _components(path: str) -> list[str]:
    components = [component for component in path.split("/") if component not in ("", ".")]
    if "\0" in path or len(path.encode()) > MAX_PATH or any(len(c.encode()) > 255 for c in components):
        raise GuestRefused("invalid", "no path")
    if ".." in components:
        raise GuestRefused("invalid", "the path has a `..` component")
    if path.startswith("/"):
        if components[:1] != ["workspace"]:
            raise GuestRefused("invalid", "an absolute path must lie under /workspace")
        return components[1:]
    return components
