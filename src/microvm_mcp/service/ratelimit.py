"""Token buckets, one per workspace: a burst, then a steady rate. Pure; time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

from microvm_mcp.errors import RateLimited
from microvm_mcp.model import WorkspaceName


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class RateLimiter:
    def __init__(self, *, per_second: float, burst: int) -> None:
        if per_second <= 0 or burst < 1:
            raise ValueError("a rate limit needs a positive rate and room for one call")
        self._per_second = per_second
        self._burst = float(burst)
        self._buckets: dict[WorkspaceName, _Bucket] = {}

    def take(self, workspace: WorkspaceName, *, now: float) -> None:
        """One call at monotonic time `now`; RateLimited if it does not fit, which costs the caller nothing."""
        bucket = self._buckets.get(workspace)
        if bucket is None:
            self._drop_full(now)
            bucket = self._buckets[workspace] = _Bucket(self._burst, now)
        bucket.tokens = self._filled(bucket, now)
        bucket.at = now
        if bucket.tokens < 1.0:
            wait = max(1, math.ceil((1.0 - bucket.tokens) / self._per_second))
            raise RateLimited(
                f"This workspace makes too many calls; wait {wait} s, and prefer wait_seconds to polling.",
                retry_after_s=wait,
            )
        bucket.tokens -= 1.0

    def _filled(self, bucket: _Bucket, now: float) -> float:
        return min(self._burst, bucket.tokens + max(0.0, now - bucket.at) * self._per_second)

    def _drop_full(self, now: float) -> None:
        """A full bucket is as good as none, so memory is bounded by the workspaces that are busy."""
        for name in [name for name, bucket in self._buckets.items() if self._filled(bucket, now) >= self._burst]:
            del self._buckets[name]
