"""Entry of the supervisor: `python3 -I -S supervisor.pyz [--name value]…`, as root, once per boot."""

from __future__ import annotations

import contextlib
import gc
import sys

from microvm_mcp.guest.options import parse_options
from microvm_mcp.guest.server import Supervisor

_OOM_SCORE = "-900"


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)
    supervisor = Supervisor(options)
    # What exists by now lives as long as the process; forked children need not copy its pages.
    gc.freeze()
    supervisor.run()


if __name__ == "__main__":
    main()
