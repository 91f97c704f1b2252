"""Request ids: the same call twice takes effect once, whatever happened to the first answer.

One name space per workspace, over all tools. A receipt stores what was asked (a digest) and what came of it (ids);
a repeated call is answered anew from the ids, so it shows the present state and joins work that still goes on.

    no receipt   run: nothing was sent. The engine makes the receipt in the transaction that comes before the effect
    sent         ask the machine whether the job exists; if that can't be known: outcome_unknown, for good
    done         answer from the ids
    another tool or other arguments, in any phase: conflict

An attempt runs in a task of its own, so a caller that hangs up half-does nothing. Calls with the same id that
arrive meanwhile wait for that attempt and are answered from its receipt. A refusal, after which certainly nothing
was executed, leaves no receipt: the id is free.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from microvm_mcp.engine.port import Engine
from microvm_mcp.errors import Busy, Conflict, Internal, MicrovmError, OutcomeUnknown
from microvm_mcp.model import Receipt, ReceiptClaim, ReceiptPhase, RequestId, WorkspaceName
from microvm_mcp.service.clock import Clock
from microvm_mcp.service.schemas import Arguments
from microvm_mcp.store import receipts as rows
from microvm_mcp.store.database import Database

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ATTEMPTS = 256
"""In progress at the same time in one workspace; each holds a task for as long as its engine call takes."""

NOT_WHAT_RUNS = frozenset({"request_id", "wait_seconds"})
"""Arguments outside the digest: the key itself, and how long a caller is willing to wait for the answer."""


@dataclass(frozen=True, slots=True)
class Key:
    workspace: WorkspaceName
    request_id: RequestId
    tool: str
    digest: str


@dataclass(frozen=True, slots=True)
class _Ran(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _Known:
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class _Attempt:
    key: Key
    task: asyncio.Task[object]


def key_of(workspace: WorkspaceName, tool: str, request_id: str, arguments: Arguments) -> Key:
    """Defaults are part of the digest: leaving an argument out and writing its default is the same call."""
    what_runs = arguments.model_dump(mode="json", exclude=set(NOT_WHAT_RUNS))
    canonical = json.dumps(what_runs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return Key(workspace, RequestId(request_id), tool, hashlib.sha256(canonical.encode()).hexdigest())


class Receipts:
    def __init__(
        self, db: Database, engine: Engine, clock: Clock, *, keep_hours: int = 24, max_rows: int = 4096
    ) -> None:
        self._keep_s = keep_hours * 3600
        self._max_rows = max_rows
        self._db = db
        self._engine = engine
        self._clock = clock
        self._attempts: dict[tuple[WorkspaceName, RequestId], _Attempt] = {}

    async def once(
        self,
        key: Key,
        *,
        run: Callable[[ReceiptClaim], Awaitable[T]],
        replay: Callable[[Receipt], Awaitable[T]],
        left: Callable[[], float],
    ) -> T:
        """`run` with what its receipt will say, or `replay` with a done one.

        `left`: how long this caller may wait.
        """
        place = (key.workspace, key.request_id)
        while True:
            attempt = self._attempts.get(place)
            if attempt is not None:
                if attempt.key != key:
                    raise _reused()
                await self._wait(attempt.task, left)
                continue
            task = self._start(key, run)
            await self._wait(task, left)
            if task.cancelled():
                raise Busy("The service is stopping; repeat the call unchanged when it is back.")
            outcome = task.result()
            return outcome.value if isinstance(outcome, _Ran) else await replay(outcome.receipt)

    async def close(self, *, wait_s: float) -> None:
        """Let attempts end; what is still going on then is cut off (its receipt says how far it got)."""
        tasks = [attempt.task for attempt in self._attempts.values()]
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=wait_s)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=wait_s)

    async def _wait(self, task: asyncio.Task[T], left: Callable[[], float]) -> None:
        done, _ = await asyncio.wait({task}, timeout=left())
        if not done:
            raise Busy("The call with this request_id is still in progress; repeat it unchanged to join it.")

    def _start(self, key: Key, run: Callable[[ReceiptClaim], Awaitable[T]]) -> asyncio.Task[_Ran[T] | _Known]:
        if sum(workspace == key.workspace for workspace, _ in self._attempts) >= MAX_ATTEMPTS:
            raise Busy(
                f"{MAX_ATTEMPTS} calls of this workspace are in progress; repeat this one when some have ended."
            )
        place = (key.workspace, key.request_id)
        task = asyncio.create_task(self._attempt(key, run), name=f"receipt {key.tool} {key.request_id}")
        self._attempts[place] = _Attempt(key, task)

        def ended(_: object) -> None:
            del self._attempts[place]
            if not task.cancelled():
                task.exception()  # looked at here too, or asyncio reports that of a caller who left as lost

        task.add_done_callback(ended)
        return task

    async def _attempt(self, key: Key, run: Callable[[ReceiptClaim], Awaitable[T]]) -> _Ran[T] | _Known:
        receipt = await self._db.read(lambda tx: rows.get(tx, key.workspace, key.request_id))
        if receipt is not None:
            if (receipt.tool, receipt.arguments_digest) != (key.tool, key.digest):
                raise _reused()
            return _Known(receipt if receipt.phase is ReceiptPhase.DONE else await self._resolve(receipt))
        try:
            return _Ran(await run(ReceiptClaim(key.tool, key.digest, self._keep_s, self._max_rows)))
        except OutcomeUnknown as error:
            raise await self._unknown(key) from error
        except MicrovmError:
            raise
        except Exception as error:
            # Logged here because the caller may be gone. The receipt stays: it says how far the attempt got.
            log.exception("tool=%s workspace=%s attempt failed", key.tool, key.workspace)
            raise Internal from error

    async def _resolve(self, receipt: Receipt) -> Receipt:
        job = None
        if receipt.vm_id is not None and receipt.job_id is not None:
            job = await self._engine.resolve_job(receipt.workspace, receipt.vm_id, receipt.job_id)
        if job is None:
            raise _outcome_unknown(receipt)
        now, found = self._clock.wall(), job.job_id
        done = await self._db.write(
            lambda tx: rows.finish(tx, receipt.workspace, receipt.request_id, found, now=now)
        )
        return done or receipt

    async def _unknown(self, key: Key) -> OutcomeUnknown:
        receipt = await self._db.read(lambda tx: rows.get(tx, key.workspace, key.request_id))
        return _outcome_unknown(receipt)


def _reused() -> Conflict:
    return Conflict(
        "This request_id was used with another tool or other arguments; choose a new one for a new action."
    )


def _outcome_unknown(receipt: Receipt | None) -> OutcomeUnknown:
    details = {}
    if receipt is not None and receipt.vm_id is not None:
        details["vm_id"] = str(receipt.vm_id)
    if receipt is not None and receipt.job_id is not None:
        details["job_id"] = str(receipt.job_id)
    return OutcomeUnknown(
        "It is not known whether the first call with this request_id took effect, and it will not be tried again; "
        "look for the request_id in vm_status.jobs, then use a new one.",
        details=details,
    )
