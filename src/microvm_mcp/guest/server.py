"""The supervisor: one loop that hears the host, drains jobs, reaps them and watches their time.

State hangs on jobs, never on the connection: a new hello, or none for hours, changes nothing about them. No
request blocks the loop: what has to wait is parked with a deadline and looked at again after every turn. A request
that fails costs only itself.
"""

# Not pathlib: an emulated guest would pay more for importing it than for all of this package.
# ruff: noqa: PTH103
from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from microvm_mcp import __version__
from microvm_mcp.guest.cgroup import delegated_root, open_user_subtree
from microvm_mcp.guest.channel import Listener, Stream, open_channel
from microvm_mcp.guest.files import Files
from microvm_mcp.guest.jobs import Job, JobTable
from microvm_mcp.guest.options import Options
from microvm_mcp.guest.poller import CHANGED, READABLE, Poller
from microvm_mcp.guest.refusal import Refusal
from microvm_mcp.wire.messages import (
    CancelJob,
    Done,
    ErrorCode,
    ForgetJob,
    Freeze,
    JobOutput,
    Jobs,
    ListJobs,
    OneJob,
    ReadFile,
    Refused,
    Reply,
    Request,
    SetClock,
    StartJob,
    WriteFile,
)
from microvm_mcp.wire.session import Asked, Greeted, GuestSession, Send

FREEZE_S = 10.0
"""A process that the kernel cannot freeze by then (stuck in I/O) makes the freeze fail; all is thawed again."""

Look = Callable[[], Reply | None]
"""The answer, once there is one. May raise Refusal."""


class Parked(NamedTuple):
    request: int
    deadline: float | None
    """None: as long as the session lasts."""
    look: Look
    late: Look
    """The answer at the deadline."""


class Supervisor:
    def __init__(self, options: Options) -> None:
        os.umask(0o022)
        os.setgroups([])
        jobs_dir = f"{options.state_dir}/jobs"
        with contextlib.suppress(OSError):
            os.makedirs(jobs_dir, 0o755, exist_ok=True)
        self._boot_id = f"{_kernel_boot_id()}.{os.urandom(4).hex()}"
        self._poller = Poller()
        self._user = open_user_subtree(options.cgroup_root or delegated_root())
        self._files = Files(options.workspace, jobs_dir)
        self._jobs = JobTable(
            user=self._user,
            poller=self._poller,
            files=self._files,
            jobs_dir=jobs_dir,
            home=options.home,
            log_limit=int(options.log_limit),
        )
        self._session = GuestSession()
        self._parked: list[Parked] = []
        self._stream: Stream | None = None
        # Looking is what makes it quiet again; whoever waits for a freeze looks after every turn anyway.
        self._poller.add(self._user.events_fd, CHANGED, lambda _: self._user.look())
        self._children = _child_signals()
        self._poller.add(self._children, READABLE, self._on_children)
        channel = open_channel(options)
        if isinstance(channel, socket.socket):
            Listener(channel, self._poller, self._accept)
            self._listening = True
        else:
            self._stream = Stream(channel, self._poller, self._receive, for_ever=not options.fd)
            self._listening = False

    def run(self) -> None:
        """Until the only stream there can be is gone, which a virtio port never is."""
        while self._listening or (self._stream is not None and not self._stream.gone):
            self._poller.turn(self._patience())
            now = time.monotonic()
            self._jobs.check_budgets(now)
            self._look_again(now)
            if self._jobs.settle_finished():
                self._look_again(now)

    def _patience(self) -> float | None:
        dues = [parked.deadline for parked in self._parked if parked.deadline is not None]
        due = self._jobs.next_due()
        if due is not None:
            dues.append(due)
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _accept(self, fd: int) -> None:
        if self._stream is not None:
            self._stream.close()
        self._session = GuestSession()
        self._parked.clear()
        self._stream = Stream(fd, self._poller, self._receive, for_ever=False)

    def _on_children(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._children, 4096)
        self._jobs.reap()

    def _receive(self, data: bytes) -> None:
        for event in self._session.receive(data):
            if isinstance(event, Asked):
                self._answer(event.request, event.question)
            elif isinstance(event, Send):
                self._send(event.data)
            else:
                self._welcome(event)

    def _welcome(self, event: Greeted) -> None:
        if event.fresh:
            self._parked.clear()
            if self._stream is not None:
                self._stream.drop_unsent()
        active = len(self._jobs.active)
        self._send(self._session.welcome(supervisor=__version__, boot_id=self._boot_id, active_jobs=active))

    def _answer(self, request: int, question: Request) -> None:
        answer = _attempt(lambda: self._do(request, question))
        if answer is not None:
            self._send(self._session.answer(request, answer))

    def _do(self, request: int, question: Request) -> Reply | None:
        """None: parked."""
        match question:
            case StartJob():
                return self._start(request, question)
            case JobOutput():
                return self._output(request, question)
            case ListJobs():
                return self._list(request, question)
            case CancelJob(job_id):
                return self._cancel(request, self._jobs.get(job_id))
            case ForgetJob(job_id):
                self._jobs.forget(job_id)
                return Done()
            case ReadFile(path, offset, length):
                return self._files.read(path, offset, length)
            case WriteFile(path, data, at, mode):
                return self._files.write(path, data, at, mode)
            case SetClock(now_ns):
                time.clock_settime_ns(time.CLOCK_REALTIME, now_ns)
                return Done()
            case Freeze():
                return self._freeze(request)
            case _:
                return self._thaw()

    def _start(self, request: int, ask: StartJob) -> Reply | None:
        job = self._jobs.start(ask, time.monotonic_ns(), time.monotonic())
        return self._wait(
            request,
            ask.wait_s,
            look=lambda: job.output(0, 0, ask.limit) if job.over else None,
            late=lambda: job.output(0, 0, ask.limit),
        )

    def _output(self, request: int, ask: JobOutput) -> Reply | None:
        job = self._jobs.get(ask.job_id)
        job.output(ask.stdout, ask.stderr, 0)
        return self._wait(
            request,
            ask.wait_s,
            look=lambda: (
                job.output(ask.stdout, ask.stderr, ask.limit)
                if job.over or job.has_more(ask.stdout, ask.stderr)
                else None
            ),
            late=lambda: job.output(ask.stdout, ask.stderr, ask.limit),
        )

    def _list(self, request: int, ask: ListJobs) -> Reply | None:
        return self._wait(
            request,
            ask.wait_s,
            look=lambda: self._all_jobs() if self._jobs.generation != ask.generation else None,
            late=self._all_jobs,
        )

    def _all_jobs(self) -> Reply:
        return Jobs(self._jobs.generation, tuple(job.status() for job in self._jobs.all()))

    def _cancel(self, request: int, job: Job) -> Reply | None:
        self._jobs.cancel(job)
        return self._wait(
            request,
            None,
            look=lambda: OneJob(job.status()) if job.group is None else None,
            late=lambda: None,
        )

    def _freeze(self, request: int) -> Reply | None:
        self._jobs.frozen = True
        self._jobs.stop_budgets(time.monotonic())
        self._user.freeze(on=True)

        def give_up() -> Reply:
            self._thaw()
            raise Refusal(ErrorCode.FAILED, f"a process could not be frozen within {FREEZE_S:.0f} s; all run on")

        return self._wait(request, FREEZE_S, look=lambda: Done() if self._user.frozen else None, late=give_up)

    def _thaw(self) -> Reply:
        """Each timeout gets back what it had left, then the processes run, then the loop checks timeouts."""
        self._jobs.resume_budgets(time.monotonic())
        self._user.freeze(on=False)
        self._jobs.frozen = False
        return Done()

    def _wait(self, request: int, wait_s: float | None, *, look: Look, late: Look) -> Reply | None:
        """`wait_s` None: for as long as the session lasts."""
        answer = look()
        if answer is not None:
            return answer
        if wait_s == 0:
            return late()
        deadline = None if wait_s is None else time.monotonic() + wait_s
        self._parked.append(Parked(request, deadline, look, late))
        return None

    def _look_again(self, now: float) -> None:
        waiting, self._parked = self._parked, []
        for parked in waiting:
            answer = _attempt(parked.look)
            if answer is None and parked.deadline is not None and parked.deadline <= now:
                answer = _attempt(parked.late)
            if answer is None:
                self._parked.append(parked)
            else:
                self._send(self._session.answer(parked.request, answer))

    def _send(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.send(data)


def _attempt(do: Look) -> Reply | Refused | None:
    try:
        return do()
    except Refusal as refusal:
        return Refused(refusal.code, refusal.message)
    except Exception:  # noqa: BLE001 - one request's fault must not cost the jobs of all others
        import traceback

        traceback.print_exc()
        return Refused(ErrorCode.FAILED, "the supervisor failed; its own log in the guest says why")


def _kernel_boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _child_signals() -> int:
    """A descriptor that becomes readable when a child ended."""
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read
