"""The jobs of this machine: start, drain, end, remember, forget.

A job is over when its shell is; whoever it left behind stays in the job's cgroup, goes on being drained, and keeps
the group until the last one is gone. Both pipes are drained always and independently, so a flooding command is held
up by nobody. Ends are the kernel's: cgroup.kill, and cgroup.events for "nothing is left".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from microvm_mcp.guest.budget import Budget
from microvm_mcp.guest.cgroup import MAX_PROCESSES, Group
from microvm_mcp.guest.files import Files
from microvm_mcp.guest.joblog import JobLog, remove_log
from microvm_mcp.guest.poller import CHANGED, READABLE, Poller
from microvm_mcp.guest.refusal import Refusal, refusal_of
from microvm_mcp.guest.retain import KeptStream, PastEnd, Retained
from microvm_mcp.guest.spawn import Command, Spawned, capacity, spawn
from microvm_mcp.wire.messages import MAX_JOBS, ErrorCode, JobState, JobStatus, Output, StartJob

MAX_ACTIVE = 4
_READ_BYTES = 65_536


class Job:
    """One record. `group` is None once no process is left and everything is drained."""

    def __init__(self, ask: StartJob, spawned: Spawned, group: Group, log: JobLog, now: float) -> None:
        self.job_id = ask.job_id
        self.request_id = ask.request_id
        self.state = JobState.RUNNING
        self.started_at = time.time()
        self.finished_at: float | None = None
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.service_time_us: int | None = None
        self.pid = spawned.pid
        self.group: Group | None = group
        self.log = log
        self.retained = Retained()
        self.pipes: dict[int, KeptStream] = {
            spawned.stdout: self.retained.stdout,
            spawned.stderr: self.retained.stderr,
        }
        self.timeout = None if ask.timeout_s is None else Budget(ask.timeout_s, now)
        """As the caller gave it: ends what the shell left behind, too."""
        self.longest: Budget | None = Budget(ask.max_s, now)
        self.ending: JobState | None = None
        """Why it was killed, until its end is seen."""

    @property
    def over(self) -> bool:
        return self.state is not JobState.RUNNING

    @property
    def budgets(self) -> list[Budget]:
        """Those that can still end something."""
        if self.group is None:
            return []
        return [budget for budget in (self.timeout, None if self.over else self.longest) if budget is not None]

    def status(self) -> JobStatus:
        return JobStatus(
            job_id=self.job_id,
            request_id=self.request_id,
            state=self.state,
            started_at=self.started_at,
            finished_at=self.finished_at,
            exit_code=self.exit_code,
            signal=self.signal,
            truncated=self.retained.truncated,
            detached=self.group.process_count if self.group is not None and self.over else 0,
            log_path=self.log.path,
            service_time_us=self.service_time_us,
        )

    def output(self, stdout: int, stderr: int, limit: int) -> Output:
        pages = []
        for name, stream, offset in (
            ("stdout", self.retained.stdout, stdout),
            ("stderr", self.retained.stderr, stderr),
        ):
            try:
                pages.append(stream.page(offset, limit))
            except PastEnd as error:
                message = f"the cursor of {name} is past the end; {name} has {error.end} bytes so far"
                raise Refusal(ErrorCode.INVALID, message) from None
        return Output(self.status(), *pages)

    def has_more(self, stdout: int, stderr: int) -> bool:
        return self.retained.stdout.written > stdout or self.retained.stderr.written > stderr


class JobTable:
    def __init__(
        self, *, user: Group, poller: Poller, files: Files, jobs_dir: str, home: str, log_limit: int
    ) -> None:
        self.generation = 0
        self.frozen = False
        self._jobs: dict[str, Job] = {}
        self._live: dict[str, Job] = {}
        """Those with a group: what every turn of the loop looks at, records of the past not."""
        self._by_pid: dict[int, tuple[Job, int]] = {}
        self._finished: list[Job] = []
        self._leftover_groups: list[Group] = []
        self._user = user
        self._poller = poller
        self._files = files
        self._jobs_dir = jobs_dir
        self._home = home
        self._log_limit = log_limit

    @property
    def active(self) -> list[str]:
        return [job.job_id for job in self._live.values() if not job.over]

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def get(self, job_id: str) -> Job:
        try:
            return self._jobs[job_id]
        except KeyError:
            raise Refusal(ErrorCode.NOT_FOUND, "the supervisor has no record of this job") from None

    def start(self, ask: StartJob, decoded_ns: int, now: float) -> Job:
        known = self._jobs.get(ask.job_id)
        if known is not None:
            if known.request_id != ask.request_id:
                raise Refusal(ErrorCode.CONFLICT, "the job id belongs to another request")
            return known
        self._admit()
        cwd_fd = self._files.open_directory(ask.cwd)
        group = None
        log = JobLog(f"{self._jobs_dir}/{ask.job_id}", self._log_limit)
        try:
            group = Group(f"{self._user.path}/{ask.job_id}")
            group.limit_processes(MAX_PROCESSES)
            group_fd = group.open()
            try:
                spawned = spawn(Command(ask.shell, ask.command, ask.env, self._home, cwd_fd, group_fd))
            finally:
                os.close(group_fd)
        except OSError as error:
            if group is not None:
                group.kill()
                self._remove_group(group)
            log.remove()
            raise refusal_of(error) from error
        finally:
            os.close(cwd_fd)
        job = Job(ask, spawned, group, log, now)
        self._jobs[job.job_id] = self._live[job.job_id] = job
        self._by_pid[job.pid] = (job, decoded_ns)
        for fd in job.pipes:
            self._poller.add(fd, READABLE, self._drainer(job, fd))
        self._poller.add(group.events_fd, CHANGED, lambda _: self._settle(job))
        self.generation += 1
        return job

    def cancel(self, job: Job) -> None:
        """Answerable once `job.group` is None."""
        self._end(job, JobState.CANCELLED)

    def forget(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            # Of an earlier boot: the record is gone, the file is not.
            remove_log(f"{self._jobs_dir}/{job_id}")
            return
        self._settle(job)
        if job.group is not None:
            raise Refusal(ErrorCode.BUSY, f"{job_id} still has processes; cancel it first")
        del self._jobs[job_id]
        job.log.remove()
        self.generation += 1

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job, decoded_ns = self._by_pid.pop(pid, (None, 0))
            if job is not None:
                job.service_time_us = (time.monotonic_ns() - decoded_ns) // 1000
                self._finish(job, os.waitstatus_to_exitcode(status))

    def settle_finished(self) -> bool:
        """After the answers are on their way: a caller waits for the end of its job, not for our housekeeping."""
        finished, self._finished = self._finished, []
        for job in finished:
            self._settle(job)
        return bool(finished)

    def check_budgets(self, now: float) -> None:
        for job in list(self._live.values()):
            if any(budget.due_at is not None and budget.due_at <= now for budget in job.budgets):
                # Once is enough: what the kernel cannot end now it ends when it can.
                job.timeout = job.longest = None
                self._end(job, JobState.TIMED_OUT)
        if self._leftover_groups:
            self._leftover_groups = [group for group in self._leftover_groups if not group.remove()]

    def next_due(self) -> float | None:
        dues = [budget.due_at for job in self._live.values() for budget in job.budgets]
        return min((due for due in dues if due is not None), default=None)

    def stop_budgets(self, now: float) -> None:
        for job in self._live.values():
            for budget in job.budgets:
                budget.stop(now)

    def resume_budgets(self, now: float) -> None:
        for job in self._live.values():
            for budget in job.budgets:
                budget.resume(now)

    def _admit(self) -> None:
        if self.frozen:
            raise Refusal(ErrorCode.BUSY, "the machine is being put to sleep; thaw it first")
        active = self.active
        if len(active) >= MAX_ACTIVE:
            raise Refusal(ErrorCode.BUSY, f"{len(active)} jobs are active: {', '.join(active)}")
        if len(self._jobs) >= MAX_JOBS:
            raise Refusal(ErrorCode.BUSY, f"{MAX_JOBS} records are kept already; forget one first")

    def _end(self, job: Job, why: JobState) -> None:
        if job.group is None:
            return
        if not job.over and job.ending is None:
            job.ending = why
        job.group.kill()
        self._settle(job)

    def _finish(self, job: Job, code: int) -> None:
        """The shell is gone: whatever it wrote is in the pipes by now, and belongs to its answer."""
        for fd in list(job.pipes):
            self._drain(job, fd, capacity(fd))
        job.exit_code, job.signal = (code, None) if code >= 0 else (None, -code)
        killed_by_us = job.ending is not None and code == -9
        job.state = job.ending if job.ending is not None and killed_by_us else JobState.COMPLETED
        job.finished_at = time.time()
        self.generation += 1
        self._finished.append(job)

    def _settle(self, job: Job) -> None:
        """Let go of the group once the shell is reaped and nothing of it is left."""
        group = job.group
        if group is None or group.populated or not job.over:
            return
        for fd in list(job.pipes):
            self._drain(job, fd, capacity(fd))
            self._close_pipe(job, fd)
        self._poller.remove(group.events_fd)
        job.group = None
        del self._live[job.job_id]
        job.log.close()
        job.retained.move_to_file(job.log.kept_path)
        self._remove_group(group)
        self.generation += 1

    def _remove_group(self, group: Group) -> None:
        if not group.remove():
            self._leftover_groups.append(group)

    def _drainer(self, job: Job, fd: int) -> Callable[[int], None]:
        return lambda _: self._drain(job, fd, _READ_BYTES)

    def _drain(self, job: Job, fd: int, at_most: int) -> None:
        stream = job.pipes.get(fd)
        while stream is not None and at_most > 0:
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close_pipe(job, fd)
                return
            at_most -= len(data)
            job.retained.append(stream, data)
            job.log.append(data)

    def _close_pipe(self, job: Job, fd: int) -> None:
        if job.pipes.pop(fd, None) is not None:
            self._poller.remove(fd)
            os.close(fd)
