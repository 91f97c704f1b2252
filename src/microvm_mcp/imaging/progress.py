"""How a build says where it stands. The builder speaks to this port; the command line decides how it looks."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def stage(self, title: str) -> None:
        """A new step begins; the one before is done."""

    def detail(self, line: str) -> None:
        """Something inside the present step; may be dropped."""


class Silent:
    def stage(self, title: str) -> None:
        pass

    def detail(self, line: str) -> None:
        pass
