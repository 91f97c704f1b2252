"""The one entry point of all doors: `invoke` limits, looks up, validates, runs, cleans; raises only public errors.

What goes wrong unexpectedly is logged here with its traceback and leaves as `internal`. Never logged: arguments,
results, tokens.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from microvm_mcp.engine.port import Engine
from microvm_mcp.errors import Busy, Internal, MicrovmError, NotFound
from microvm_mcp.model import Principal
from microvm_mcp.service import catalog
from microvm_mcp.service.auth import Authenticator
from microvm_mcp.service.call import HARD_CAP_S, WORK_BUDGET_S, Call, ServiceSettings
from microvm_mcp.service.clock import Clock
from microvm_mcp.service.jsonschema import Json, JsonObject
from microvm_mcp.service.ratelimit import RateLimiter
from microvm_mcp.service.receipts import Receipts
from microvm_mcp.store.database import Database

log = logging.getLogger(__name__)


class UnknownTool(NotFound):
    """Of its own class because MCP wants a protocol error here, where HTTP wants a 404."""


class Service:
    def __init__(self, db: Database, engine: Engine, settings: ServiceSettings, clock: Clock) -> None:
        self.settings = settings
        self.auth = Authenticator(db, clock, settings.default_limits)
        self._engine = engine
        self._clock = clock
        self._limiter = RateLimiter(per_second=settings.calls_per_second, burst=settings.call_burst)
        self._receipts = Receipts(
            db, engine, clock, keep_hours=settings.receipt_hours, max_rows=settings.max_receipts
        )

    def tools(self) -> tuple[catalog.Tool, ...]:
        """What MCP lists."""
        return catalog.listed(self.settings.tools)

    async def authenticate(self, token: str) -> Principal:
        return await self.auth.authenticate(token)

    async def invoke(self, name: str, arguments: object, principal: Principal) -> JsonObject:
        """The result as a JSON object. May be cancelled at any time: what takes effect once still does."""
        now = self._clock.monotonic()
        self._limiter.take(principal.workspace, now=now)
        tool = catalog.BY_NAME.get(name)
        if tool is None:
            raise UnknownTool("There is no such tool; known are " + ", ".join(catalog.BY_NAME) + ".")
        call = Call(
            principal=principal,
            engine=self._engine,
            receipts=self._receipts,
            settings=self.settings,
            clock=self._clock,
            deadline=now + WORK_BUDGET_S,
        )
        try:
            run = tool.prepare(arguments)
            async with asyncio.timeout(HARD_CAP_S) as cap:
                result = await run(call)
            return cast("JsonObject", _clean(result.model_dump(mode="json", exclude_unset=True)))
        except MicrovmError as error:
            error.message = _clean_text(error.message)
            error.details = cast("JsonObject", _clean(error.details))
            log.debug("tool=%s workspace=%s code=%s", name, principal.workspace, error.code)
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and cap.expired():
                raise Busy(
                    "The call takes longer than 45 s and goes on; repeat it unchanged to join it."
                ) from error
            log.exception("tool=%s workspace=%s failed", name, principal.workspace)
            raise Internal from error

    async def close(self, *, wait_s: float = 5.0) -> None:
        """After the doors are closed and before the engine is: let attempts in progress end."""
        await self._receipts.close(wait_s=wait_s)


def _clean(value: Json) -> Json:
    """A lone surrogate in any string breaks every JSON peer, so none leaves."""
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, dict):
        return {_clean_text(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _clean_text(text: str) -> str:
    # Nearly all text of ours is ASCII, and asking costs nothing.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
