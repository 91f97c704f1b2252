"""Where things are in the guest, and who its user is. The image relies on the defaults."""

from __future__ import annotations

from typing import NamedTuple

UID = GID = 1000
"""The only identity that anything runs or writes as on a caller's behalf."""


class Options(NamedTuple):
    workspace: str = "/workspace"
    state_dir: str = "/var/lib/microvm"
    home: str = "/home/user"
    cgroup_root: str = ""
    """Existing cgroup for the user subtree. Empty: the one that this process was delegated."""
    fd: str = ""
    """Number of an open stream to the host. Empty: see `listen`."""
    listen: str = ""
    """Path of a Unix socket to listen on. Empty, and no `fd`: the virtio port, or vsock."""
    log_limit: str = str(64 * 1024 * 1024)
    """Bytes of each job's log file."""


def parse_options(arguments: list[str]) -> Options:
    """`--name value` pairs. `argparse` would double what the supervisor imports."""
    values: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name = argument.removeprefix("--").replace("-", "_")
        if not argument.startswith("--") or name not in Options._fields:
            raise SystemExit(f"unknown option {argument}; known: {', '.join(Options._fields)}")
        value = next(rest, None)
        if value is None:
            raise SystemExit(f"{argument} needs a value")
        values[name] = value
    return Options()._replace(**values)
