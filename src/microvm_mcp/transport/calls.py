"""The calls in progress behind both doors, and their bounded end when the service stops.

A call runs in the task of its request, which the server does not cancel when the client hangs up; were it
cancelled, the service promises that what takes effect does so once and whole. At the stop `drain` waits a bounded
time. What is left then is cut off, which must be as safe as a crash, and is told to a client that still listens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from microvm_mcp.errors import Detail, Internal, MicrovmError, OutcomeUnknown, Unavailable
from microvm_mcp.model import Principal
from microvm_mcp.transport.doors import ToolService

log = logging.getLogger(__name__)

_CUT_S = 1.0


class Calls:
    def __init__(self, service: ToolService) -> None:
        self._service = service
        self._running: set[asyncio.Task[object]] = set()
        self._cut: set[asyncio.Task[object]] = set()
        self._ended = asyncio.Event()
        self._stopping = False

    async def invoke(self, name: str, arguments: object, principal: Principal) -> Mapping[str, Detail]:
        """The tool's result. Raises only MicrovmError; a bug below is logged here and becomes Internal."""
        if self._stopping:
            raise Unavailable("The service is stopping; repeat the call when it is back.")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._service.invoke(name, arguments, principal)
        except MicrovmError:
            raise
        except asyncio.CancelledError:
            if task not in self._cut:
                raise
            # Our own cancellation has arrived where it was meant to; the request's task goes on to answer.
            task.uncancel()
            raise OutcomeUnknown(
                "The service stopped before this call ended, and it may have taken effect; look with vm_status, or "
                "repeat it with the same request_id once the service is back."
            ) from None
        except Exception as error:
            log.exception("a call crashed workspace=%s", principal.workspace)
            raise Internal from error
        finally:
            self._running.discard(task)
            self._cut.discard(task)
            if not self._running:
                self._ended.set()

    async def drain(self, deadline_s: float) -> int:
        """Refuse further calls and wait for those in progress; the number that had to be cut off."""
        self._stopping = True
        await self._wait(deadline_s)
        left = list(self._running)
        self._cut.update(left)
        for task in left:
            task.cancel()
        await self._wait(_CUT_S)
        return len(left)

    async def _wait(self, deadline_s: float) -> None:
        while self._running:
            self._ended.clear()
            try:
                await asyncio.wait_for(self._ended.wait(), deadline_s)
            except TimeoutError:
                return
