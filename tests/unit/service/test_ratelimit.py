"""Token buckets: a burst, then the rate, one workspace never at another's cost."""

from __future__ import annotations

import pytest

from microvm_mcp.errors import RateLimited
from microvm_mcp.model import WorkspaceName
from microvm_mcp.service.ratelimit import RateLimiter

A, B = WorkspaceName("a"), WorkspaceName("b")


def test_a_burst_passes_and_the_next_call_is_told_how_long_to_wait() -> None:
    limiter = RateLimiter(per_second=0.25, burst=3)
    for _ in range(3):
        limiter.take(A, now=10.0)
    with pytest.raises(RateLimited) as caught:
        limiter.take(A, now=10.0)
    assert caught.value.retry_after_s == 4
    assert caught.value.body()["details"] == {"retry_after_s": 4}


def test_waiting_as_told_is_enough() -> None:
    limiter = RateLimiter(per_second=0.3, burst=1)
    limiter.take(A, now=0.0)
    with pytest.raises(RateLimited) as caught:
        limiter.take(A, now=0.1)
    limiter.take(A, now=0.1 + caught.value.retry_after_s)


def test_refused_calls_cost_nothing() -> None:
    limiter = RateLimiter(per_second=1.0, burst=1)
    limiter.take(A, now=0.0)
    for step in range(1, 10):
        with pytest.raises(RateLimited):
            limiter.take(A, now=step / 10)
    limiter.take(A, now=1.001)


def test_one_workspace_does_not_use_up_anothers_calls() -> None:
    limiter = RateLimiter(per_second=1.0, burst=1)
    limiter.take(A, now=0.0)
    limiter.take(B, now=0.0)
    with pytest.raises(RateLimited):
        limiter.take(A, now=0.0)


def test_a_pause_never_saves_up_more_than_the_burst() -> None:
    limiter = RateLimiter(per_second=100.0, burst=2)
    limiter.take(A, now=0.0)
    limiter.take(A, now=1000.0)
    limiter.take(A, now=1000.0)
    with pytest.raises(RateLimited):
        limiter.take(A, now=1000.0)


def test_workspaces_that_went_quiet_are_forgotten() -> None:
    limiter = RateLimiter(per_second=1.0, burst=5)
    for index in range(1000):
        limiter.take(WorkspaceName(f"w{index}"), now=float(index))
    assert len(limiter._buckets) <= 2


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_a_limit_that_lets_nothing_through_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="rate limit"):
        RateLimiter(per_second=rate, burst=burst)
