"""The live object that owns one machine: its row in memory, its VMM and link, and every change to them.

Operations are serial, named, and belong to the machine: the same one is joined, another is refused as busy, and a
caller that goes away half-does nothing. Two watchers run beside them while a VMM lives: one awaits its end, one
keeps the rows of jobs up to date, so that looking at a machine costs no I/O. What the guest says is never trusted
beyond its own machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from microvm_mcp.engine.certain import deadline, finished, left
from microvm_mcp.engine.context import Context
from microvm_mcp.engine.fetched_output import FetchedOutput
from microvm_mcp.engine.job_book import JobBook
from microvm_mcp.errors import Busy, FailedPrecondition, MicrovmError, Unavailable
from microvm_mcp.lifecycle import NOT_READY, TRANSITIONS, Operation
from microvm_mcp.link.port import GuestLied, GuestRefused, Link, LinkLost
from microvm_mcp.model import GuestInfo, Job, JobId, JobsReport, MachineView, Vm, VmState
from microvm_mcp.vmm.driver import ExitInfo, Vmm

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_STRAYS = 16
"""Per report; the next one brings the rest."""
MAX_PAUSE_S = 1.0
"""Between two polls of a guest that reports changes without end."""


class Machine:
    def __init__(
        self,
        context: Context,
        vm: Vm,
        jobs: list[Job],
        *,
        record_end: Callable[[Machine, ExitInfo | None], Awaitable[None]],
    ) -> None:
        """`record_end` is run when the VMM ended by itself; with None where the guest is to be ended first."""
        self.context = context
        self.vm = vm
        self._record_end = record_end
        settings = context.settings
        self.book = JobBook(vm, jobs, max_active=settings.max_active_jobs, max_records=settings.max_job_records)
        self.output = FetchedOutput(context.db, vm.workspace)
        self.vmm: Vmm | None = None
        self.guest: GuestInfo | None = None
        """As the supervisor last introduced itself; a supervisor that was restarted has forgotten its jobs."""
        self._link: Link | None = None
        self._operation: Operation | None = None
        self._task: asyncio.Task[None] | None = None
        self._watchers: tuple[asyncio.Task[None], ...] = ()
        self._calls: set[asyncio.Task[Any]] = set()
        self._parked = 0
        self._closing = False

    def view(self) -> MachineView:
        running = self.vm.state is VmState.RUNNING
        return MachineView(
            vm=self.vm,
            jobs=self.book.rows(),
            awake_because=self.book.awake_because() if running else (),
            outdated=self.vm.image_digest != self.context.settings.image_digest,
        )

    # Operations.

    def operate(self, operation: Operation, steps: Callable[[Machine], Awaitable[None]]) -> asyncio.Task[None]:
        """Start it, or join it if it is in progress. Busy if another one is, FailedPrecondition by the table."""
        self._refuse_if_closing()
        before = self._task if self._task is not None and not self._task.done() else None
        if before is not None and self._operation is not None:
            if self._operation is operation:
                return before
            if self._operation not in TRANSITIONS[operation].overrides:
                raise Busy(
                    f"The machine is being {TRANSITIONS[self._operation].gerund}; repeat the call after that."
                )
            before.cancel()
        elif before is None:
            self._refuse_from_here(operation)
        return self._begin(operation, steps, before)

    def begin_create(self, steps: Callable[[Machine], Awaitable[None]]) -> None:
        """The one operation that has no state to start from: the row in its state of progress is new."""
        self._begin(Operation.CREATE, steps, None)

    async def cut_off(self, operation: Operation) -> None:
        """End that operation if it is in progress, with whatever it undoes."""
        task = self._task
        if self._operation is operation and task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})

    def _refuse_from_here(self, operation: Operation) -> None:
        if operation is not Operation.CREATE and self.vm.state not in TRANSITIONS[operation].sources:
            raise FailedPrecondition(
                NOT_READY.get(self.vm.state, f"The machine is {self.vm.state.value}; that does not allow it.")
            )

    def _begin(
        self,
        operation: Operation | None,
        steps: Callable[[Machine], Awaitable[None]],
        before: asyncio.Task[None] | None,
    ) -> asyncio.Task[None]:
        name = operation.value if operation is not None else "record_end"

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
                if operation is not None:
                    self._refuse_from_here(operation)
            started = asyncio.get_running_loop().time()
            try:
                await steps(self)
            except MicrovmError:
                raise
            except Exception:
                logger.exception("operation failed vm=%s op=%s", self.vm.vm_id, name)
                raise
            finally:
                took = asyncio.get_running_loop().time() - started
                logger.info("vm=%s op=%s state=%s took_s=%.3f", self.vm.vm_id, name, self.vm.state.value, took)

        self._operation = operation
        self._task = asyncio.create_task(run(), name=f"{name}:{self.vm.vm_id}")
        self._task.add_done_callback(_look_at_outcome)
        return self._task

    def is_settled(self) -> bool:
        return self._task is None or self._task.done()

    async def settle(self, wait_s: float) -> bool:
        """Wait until no operation is in progress; whether that is so now."""
        until = deadline(wait_s)
        while (task := self._task) is not None and not task.done():
            if not await finished(task, left(until)):
                return False
        return True

    async def ready(self, wait_s: float) -> Link:
        """The link of a running machine. Work waits for what leads there, and is told the way out of the rest."""
        self._refuse_if_closing()
        if self.vm.state is not VmState.RUNNING and self.vm.state not in NOT_READY:
            await self.settle(wait_s)
            self._refuse_if_closing()
        if self.vm.state is VmState.RUNNING and self._link is not None:
            return self._link
        if self.vm.state in NOT_READY:
            raise FailedPrecondition(NOT_READY[self.vm.state])
        raise Unavailable(
            f"The machine is still {self.vm.state.value}, nothing was done; repeat the call, vm_status tells when "
            "it runs."
        )

    # The live VMM.

    def attach(self, vmm: Vmm, link: Link, guest: GuestInfo | None) -> None:
        """Take over a VMM whose supervisor answered (None: its CPUs are stopped, it cannot), and watch both."""
        self.vmm, self._link, self.guest = vmm, link, guest
        self._watchers = (
            asyncio.create_task(self._watch_exit(vmm), name=f"exit:{self.vm.vm_id}"),
            asyncio.create_task(self._watch_jobs(link), name=f"jobs:{self.vm.vm_id}"),
        )
        for task in self._watchers:
            task.add_done_callback(_look_at_outcome)

    async def detach(self) -> Vmm | None:
        """Stop watching and close the link. The VMM is not touched; the caller ends it or lets it run."""
        watchers, self._watchers = self._watchers, ()
        current = asyncio.current_task()
        for task in watchers:
            if task is not current:
                task.cancel()
        await asyncio.gather(*(task for task in watchers if task is not current), return_exceptions=True)
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        vmm, self.vmm = self.vmm, None
        return vmm

    async def _watch_exit(self, vmm: Vmm) -> None:
        info = await vmm.wait_exit()
        logger.warning(
            "VMM ended vm=%s exit_status=%s shutdown=%s panicked=%s last_output=%r",
            self.vm.vm_id,
            info.exit_status,
            info.guest_shutdown,
            info.guest_panicked,
            info.last_output[-2000:],
        )
        await self._end(vmm, info)

    def distrust(self, error: GuestLied) -> None:
        """The guest breaks the protocol: nobody knows what it does, so it is ended."""
        logger.warning("guest breaks the protocol vm=%s: %s", self.vm.vm_id, error)
        if self.vmm is not None:
            task = asyncio.create_task(self._end(self.vmm, None), name=f"distrust:{self.vm.vm_id}")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _end(self, vmm: Vmm, info: ExitInfo | None) -> None:
        """Record the end of that VMM, unless an operation ends it anyway."""
        while (task := self._task) is not None and not task.done():
            await asyncio.wait({task})
        if self.vmm is vmm and self.vm.state is VmState.RUNNING and not self._closing:
            self._begin(None, lambda machine: self._record_end(machine, info), None)

    # Jobs.

    async def _watch_jobs(self, link: Link) -> None:
        timeouts = self.context.settings.timeouts
        generation, pause = -1, timeouts.poll_pause_s
        while True:
            await self.book.watched.wait()
            asked = deadline(0)
            try:
                generation = await self.poll_jobs(link, generation, timeouts.poll_s)
            except GuestLied as error:
                self.distrust(error)
                return
            except (LinkLost, GuestRefused, MicrovmError) as error:
                logger.info("no report of jobs vm=%s: %s", self.vm.vm_id, error)
                generation = -1
                await asyncio.sleep(timeouts.retry_s)
                continue
            quick = deadline(0) - asked < MAX_PAUSE_S
            pause = min(pause * 2, MAX_PAUSE_S) if quick else timeouts.poll_pause_s
            await asyncio.sleep(pause)

    async def poll_jobs(self, link: Link, generation: int, wait_s: float) -> int:
        """One report of all jobs, recorded. Active jobs that the guest does not know are lost."""
        candidates = self.book.settled_active()
        answer_s = self.context.settings.timeouts.answer_s
        report = await link.list_jobs(generation=generation, wait_s=wait_s, deadline_s=wait_s + answer_s)
        await self._record_reports(link, report, candidates)
        return report.generation

    async def _record_reports(self, link: Link, report: JobsReport, candidates: frozenset[JobId]) -> None:
        now = self.context.now()
        told = [one for one in report.jobs if self.book.would_change(one, now)]
        missing = candidates - {one.job_id for one in report.jobs}
        lost = [job.job_id for job in self.book.active() if job.job_id in missing]
        if told or lost:
            rows = await self.context.db.write(lambda tx: self.book.record(tx, told, lost, now))
            self.book.show(rows)
        await self._forget_strays(link, report)

    async def _forget_strays(self, link: Link, report: JobsReport) -> None:
        """Records of finished jobs that were displaced while the guest did not answer."""
        strays = [one.job_id for one in report.jobs if self.book.is_stray(one)]
        for job_id in strays[:MAX_STRAYS]:
            await link.forget_job(job_id, deadline_s=self.context.settings.timeouts.answer_s)

    # Calls.

    async def own(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call's work as the machine's: a caller that goes away does not stop it halfway."""
        task = asyncio.create_task(work, name=f"call:{self.vm.vm_id}")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(_look_at_outcome)
        return await asyncio.shield(task)

    @contextmanager
    def parked(self, wait_s: float) -> Iterator[float]:
        """How long a call may wait in the guest: not at all where too many do."""
        if self._parked >= self.context.settings.max_parked_calls:
            yield 0.0
            return
        self._parked += 1
        try:
            yield wait_s
        finally:
            self._parked -= 1

    async def close(self) -> None:
        """Let go of everything and leave the VMM running, for the next start to adopt."""
        self._closing = True
        until = deadline(self.context.settings.timeouts.close_s)
        busy = {task for task in (self._task, *self._calls) if task is not None and not task.done()}
        if busy:
            await asyncio.wait(busy, timeout=left(until))
            for task in busy:
                task.cancel()
            await asyncio.wait(busy, timeout=self.context.settings.timeouts.close_s)
        vmm = await self.detach()
        if vmm is not None:
            await vmm.close()

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise Unavailable("The service is stopping; repeat the call when it runs again.")


def _look_at_outcome(task: asyncio.Task[Any]) -> None:
    """Whoever waits gets the exception as well; nobody may be waiting."""
    if not task.cancelled():
        task.exception()
