"""The host's end of the link: typed calls to one machine's supervisor, each with a deadline.

At most one connection at a time. A call attaches if need be (one caller tries, the others wait for it), and
attaches anew when the connection breaks under it and the same question may be asked twice; what may not (a write
that extends a file) is told as LinkLost with `sent`. A deadline that passes closes the connection, because a stream
that does not answer cannot be told from one that is dead; others that waited on it attach anew. A guest that lies
or floods costs its own connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from microvm_mcp.link import translate
from microvm_mcp.link.connection import Connection, Gone, attach
from microvm_mcp.link.dial import Dial
from microvm_mcp.link.port import GuestLied, LinkLost
from microvm_mcp.model import (
    FilePage,
    FileWritten,
    GuestInfo,
    JobId,
    JobReport,
    JobRequest,
    JobsReport,
    OutputPage,
)
from microvm_mcp.wire.messages import (
    MAX_WAIT_S,
    CancelJob,
    Done,
    FileContent,
    ForgetJob,
    Freeze,
    JobOutput,
    Jobs,
    ListJobs,
    OneJob,
    Output,
    ReadFile,
    Reply,
    Request,
    SetClock,
    Thaw,
    WriteFile,
    Written,
)

_R = TypeVar("_R", bound=Reply)

_REDIAL_S = 0.01
_REDIAL_MAX_S = 0.25
"""Nothing tells when a socket appears or a guest begins to listen: these pauses, up to the call's deadline."""
_ANSWER_S = 0.2
"""Left to the answer of a request that waits in the guest."""


class LinkClient:
    """Implements `link.port.Link`."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._connection: Connection | None = None
        self._attaching = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<LinkClient {'closed' if self._closed else self._connection or 'detached'}>"

    async def hello(self, *, deadline_s: float) -> GuestInfo:
        connection = await self._attached(_now() + deadline_s, anew=True)
        return translate.guest_info(connection.welcome)

    async def start_job(self, job: JobRequest, *, wait_s: float, deadline_s: float) -> OutputPage:
        reply = await self._ask(
            lambda left: translate.start_job(job, _wait(wait_s, left)),
            Output,
            deadline_s=deadline_s,
            of_one_supervisor=True,
        )
        return translate.output_page(reply)

    async def job_output(
        self, job_id: JobId, *, stdout: int, stderr: int, limit: int, wait_s: float, deadline_s: float
    ) -> OutputPage:
        reply = await self._ask(
            lambda left: JobOutput(job_id, stdout, stderr, limit, _wait(wait_s, left)),
            Output,
            deadline_s=deadline_s,
        )
        return translate.output_page(reply)

    async def list_jobs(self, *, generation: int, wait_s: float, deadline_s: float) -> JobsReport:
        reply = await self._ask(lambda left: ListJobs(generation, _wait(wait_s, left)), Jobs, deadline_s=deadline_s)
        return JobsReport(reply.generation, tuple(map(translate.job_report, reply.jobs)))

    async def cancel_job(self, job_id: JobId, *, deadline_s: float) -> JobReport:
        reply = await self._ask(lambda _: CancelJob(job_id), OneJob, deadline_s=deadline_s)
        return translate.job_report(reply.job)

    async def forget_job(self, job_id: JobId, *, deadline_s: float) -> None:
        await self._ask(lambda _: ForgetJob(job_id), Done, deadline_s=deadline_s)

    async def read_file(self, path: str, *, offset: int, length: int, deadline_s: float) -> FilePage:
        reply = await self._ask(lambda _: ReadFile(path, offset, length), FileContent, deadline_s=deadline_s)
        return FilePage(reply.data, reply.offset, reply.size, reply.mode)

    async def write_file(
        self, path: str, data: bytes, *, offset: int | None, mode: int | None, deadline_s: float
    ) -> FileWritten:
        reply = await self._ask(
            lambda _: WriteFile(path, data, offset, mode), Written, deadline_s=deadline_s, twice=offset is None
        )
        return FileWritten(reply.size, reply.mode)

    async def set_clock(self, now_ns: int, *, deadline_s: float) -> None:
        called_ns = time.monotonic_ns()

        def request(_: float) -> SetClock:
            connection = self._connection
            one_way_s = 0.0 if connection is None else connection.round_trip_s / 2
            return SetClock(now_ns + time.monotonic_ns() - called_ns + int(one_way_s * 1e9))

        await self._ask(request, Done, deadline_s=deadline_s)

    async def freeze(self, *, deadline_s: float) -> None:
        await self._ask(lambda _: Freeze(), Done, deadline_s=deadline_s)

    async def thaw(self, *, deadline_s: float) -> None:
        await self._ask(lambda _: Thaw(), Done, deadline_s=deadline_s)

    async def close(self) -> None:
        self._closed = True
        self._drop("the link was closed")

    async def _ask(
        self,
        request: Callable[[float], Request],
        reply: type[_R],
        *,
        deadline_s: float,
        twice: bool = True,
        of_one_supervisor: bool = False,
    ) -> _R:
        """`request` gets the seconds that are left. `twice`: it may be sent again if its first answer is lost.

        `of_one_supervisor`: only to the one that had it first. Another, restarted meanwhile, has no memory of it
        and would do it a second time.
        """
        deadline = _now() + deadline_s
        sent = False
        asked: str | None = None
        pause = _REDIAL_S
        while True:
            try:
                connection = await self._attached(deadline)
            except LinkLost as lost:
                raise LinkLost(str(lost), sent=sent or lost.sent) from lost
            if of_one_supervisor and sent and connection.welcome.boot_id != asked:
                raise LinkLost("the supervisor that was asked is gone", sent=True)
            asked = connection.welcome.boot_id
            try:
                async with asyncio.timeout_at(deadline):
                    answer = await connection.ask(request(deadline - _now()))
            except TimeoutError as error:
                connection.close("a call got no answer before its deadline")
                raise LinkLost("the guest did not answer before the deadline", sent=True) from error
            except Gone as gone:
                sent = sent or gone.sent
                if sent and not twice:
                    raise LinkLost(str(gone), sent=True) from gone
                # Whoever welcomes and hangs up at once is not to keep the loop busy until the deadline.
                await asyncio.sleep(min(pause, max(0.0, deadline - _now())))
                pause = min(2 * pause, _REDIAL_MAX_S)
                continue
            if not isinstance(answer, reply):
                raise GuestLied("the guest answered another question")
            return answer

    async def _attached(self, deadline: float, *, anew: bool = False) -> Connection:
        why = "another call is still attaching"
        try:
            async with asyncio.timeout_at(deadline), self._attaching:
                if anew:
                    self._drop("attached anew")
                pause = _REDIAL_S
                while self._connection is None or not self._connection.is_open:
                    if self._closed:
                        raise LinkLost("the link is closed", sent=False)
                    why = "no answer to the hello"
                    try:
                        self._take(await attach(self._dial))
                    except Gone as gone:
                        why = str(gone)
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, _REDIAL_MAX_S)
                return self._connection
        except TimeoutError as error:
            raise LinkLost(f"the guest does not answer: {why}", sent=False) from error

    def _take(self, connection: Connection) -> None:
        """Unless the link was closed while it attached: nobody would close this one then."""
        if self._closed:
            connection.close("the link was closed")
            raise LinkLost("the link is closed", sent=False)
        self._connection = connection

    def _drop(self, why: str) -> None:
        if self._connection is not None:
            self._connection.close(why)
            self._connection = None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _wait(wait_s: float, left_s: float) -> float:
    return max(0.0, min(wait_s, MAX_WAIT_S, left_s - _ANSWER_S))
