"""A number of seconds that run down on the monotonic clock, and stand still while users' processes are frozen.

While stopped, only what is left is kept: it does not matter what the clock does meanwhile (a sleeping machine's
monotonic clock may go on, stand still or start anew).
"""

from __future__ import annotations


class Budget:
    def __init__(self, seconds: float, now: float) -> None:
        self._left = seconds
        self._since: float | None = now

    def stop(self, now: float) -> None:
        if self._since is not None:
            self._left -= max(0.0, now - self._since)
            self._since = None

    def resume(self, now: float) -> None:
        if self._since is None:
            self._since = now

    @property
    def due_at(self) -> float | None:
        """None while stopped."""
        return None if self._since is None else self._since + self._left
