"""The whole output of one job as a file in the guest, readable by its user, gone with the record.

Both streams in the order in which they were drained. It ends at its limit, or where the guest's disk was full: the
job goes on and its kept output too. The directory is root's, so that the user can read the log and not replace it.
"""

# Not pathlib: an emulated guest would pay more for importing it than for all of this package.
# ruff: noqa: PTH103, PTH106, PTH108
from __future__ import annotations

import contextlib
import os

_LOG = "output.log"
_KEPT = "kept"


class JobLog:
    def __init__(self, directory: str, limit: int) -> None:
        self.path = f"{directory}/{_LOG}"
        self.kept_path = f"{directory}/{_KEPT}"
        """Where the kept output of a job that is over may be put; root's alone."""
        self._directory = directory
        self._left = limit
        self._fd = -1
        with contextlib.suppress(OSError):
            os.makedirs(directory, 0o755, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)

    def append(self, data: bytes) -> None:
        if self._fd < 0:
            return
        view = memoryview(data)[: self._left]
        try:
            while view:
                count = os.write(self._fd, view)
                view = view[count:]
                self._left -= count
        except OSError:
            self.close()
            return
        if self._left <= 0:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        self.close()
        remove_log(self._directory)


def remove_log(directory: str) -> None:
    """Nothing else is ever in it, and nobody but root can put it there."""
    for name in (_LOG, _KEPT):
        with contextlib.suppress(OSError):
            os.unlink(f"{directory}/{name}")
    with contextlib.suppress(OSError):
        os.rmdir(directory)
