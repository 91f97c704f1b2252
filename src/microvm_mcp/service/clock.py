"""Time as the service sees it, passed in so that tests can turn it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def wall(self) -> float:
        """Seconds since the epoch, for rows and expiry."""

    def monotonic(self) -> float:
        """Seconds since some start, for deadlines and rates."""


class SystemClock:
    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
