"""Calls in progress belong to the service, not to the connection that brought them.

A call runs in a task of its own: the client may hang up, the server may cancel the request's task, the call ends
by itself. At the stop of the service `drain` waits a bounded time for all of them; what is left then is cancelled,
which must be as safe as a crash, and is told to a client that still listens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from microvm_mcp.errors import Detail, Internal, MicrovmError, OutcomeUnknown, Unavailable
from microvm_mcp.model import Principal
from microvm_mcp.transport.doors import ToolService

log = logging.getLogger(__name__)

Result = Mapping[str, Detail]


class Calls:
    def __init__(self, service: ToolService) -> None:
        self._service = service
        self._tasks: set[asyncio.Task[Result | MicrovmError]] = set()
        self._stopping = False

    async def invoke(self, name: str, arguments: object, principal: Principal) -> Result:
        """The tool's result. Raises only MicrovmError; a bug below is logged here and becomes Internal."""
        if self._stopping:
            raise Unavailable("The service is stopping; repeat the call when it is back.")
        task = asyncio.create_task(self._run(name, arguments, principal), name="call")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # `wait` leaves the task alone when the waiting request is cancelled.
        await asyncio.wait({task})
        if task.cancelled():
            raise OutcomeUnknown(
                "The service stopped before this call ended, and it may have taken effect; look with vm_status, or "
                "repeat it with the same request_id once the service is back."
            )
        outcome = task.result()
        if isinstance(outcome, MicrovmError):
            raise outcome
        return outcome

    async def drain(self, deadline_s: float) -> int:
        """Refuse further calls and wait for those in progress; the number that had to be cancelled."""
        self._stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
        return len(left)

    async def _run(self, name: str, arguments: object, principal: Principal) -> Result | MicrovmError:
        """Errors are values here: a call that nobody waits for any more leaves no unread exception behind."""
        try:
            return await self._service.invoke(name, arguments, principal)
        except MicrovmError as error:
            return error
        except Exception:
            log.exception("a call crashed workspace=%s", principal.workspace)
            return Internal()
