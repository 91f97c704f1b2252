"""Waiting for effects that must not be left half known: to the end, within a bound, or for the first of two."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def certainly(effect: Coroutine[Any, Any, T]) -> T:
    """Run a short effect to its end, also if the caller is cancelled meanwhile.

    The caller then still gets the result, so that the undo can be armed on the next line; the cancellation is
    raised at its next await.
    """
    task = asyncio.ensure_future(effect)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
    return task.result()


async def finished(task: asyncio.Task[Any], wait_s: float) -> bool:
    """Whether the task is over within `wait_s`. It is never cancelled, its outcome is not looked at."""
    if wait_s > 0 and not task.done():
        await asyncio.wait({task}, timeout=wait_s)
    return task.done()


async def first_of(wanted: Awaitable[T], unless: Awaitable[object]) -> T | None:
    """The result of `wanted`, or None if `unless` came first. Both are over or cancelled afterwards."""
    tasks = (asyncio.ensure_future(wanted), asyncio.ensure_future(unless))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def deadline(seconds: float) -> float:
    """In the loop's time."""
    return asyncio.get_running_loop().time() + seconds


def left(until: float) -> float:
    return max(0.0, until - asyncio.get_running_loop().time())
