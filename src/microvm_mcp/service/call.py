"""What one call of a tool works with: who asks, the engine, and how long an answer may still take.

No call blocks for more than 45 seconds, because clients of MCP give up at 60. Use cases ask `left()` for the time
that a wait may take; `HARD_CAP_S` is the net under them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from microvm_mcp.engine.port import Engine
from microvm_mcp.model import Limits, Principal, WorkspaceName
from microvm_mcp.service.clock import Clock
from microvm_mcp.service.receipts import Receipts

WORK_BUDGET_S = 43.0
"""For waiting on purpose; what remains up to the cap is for rendering and a slow disk."""
HARD_CAP_S = 45.0
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    calls_per_second: float = 20.0
    """Per workspace, over every door."""
    call_burst: int = 100
    max_job_seconds: int = 86_400
    """Bounds jobs without a timeout, and the timeouts that may be asked for."""
    tools: Literal["core", "all"] = "core"
    """Which tools MCP lists."""
    default_limits: Limits = field(default_factory=Limits)
    """Of workspaces that have none of their own."""
    receipt_hours: int = 24
    """How long a request id is remembered at least."""
    max_receipts: int = 4096
    """Per workspace; above, the oldest finished ones past that time make room."""


@dataclass(frozen=True, slots=True)
class Call:
    principal: Principal
    engine: Engine
    receipts: Receipts
    settings: ServiceSettings
    clock: Clock
    deadline: float
    """Monotonic time at which waiting ends."""

    @property
    def workspace(self) -> WorkspaceName:
        return self.principal.workspace

    def left(self, asked_s: float = WORK_BUDGET_S) -> float:
        """Seconds that this call may still wait, at most what was asked for."""
        return max(0.0, min(asked_s, self.deadline - self.clock.monotonic()))

    def left_for_others(self) -> float:
        """Seconds to wait for an attempt that may itself wait until the deadline: a little longer than that."""
        return max(0.0, self.deadline + _GRACE_S - self.clock.monotonic())
