"""A job's output on this terminal: byte for byte, both streams, until the job is over and all of it was read."""

from __future__ import annotations

import base64
import sys
from typing import Final

from microvm_mcp.cli.remote import Remote, Result
from microvm_mcp.errors import Detail, Unavailable

WAIT_S: Final = 30
TIMED_OUT: Final = 124
CANCELLED: Final = 130


def follow(remote: Remote, vm_id: str, job_id: str, *, to_the_end: bool = True) -> Result:
    """Write what there is to stdout and stderr; the last answer. Without `to_the_end` it waits for nothing."""
    offsets = {"stdout": 0, "stderr": 0}
    while True:
        cursor: dict[str, Detail] = dict(offsets.items())
        page = remote.call(
            "vm_job_output",
            {
                "vm_id": vm_id,
                "job_id": job_id,
                "encoding": "base64",
                "cursor": cursor,
                "wait_seconds": WAIT_S if to_the_end else 0,
            },
        )
        following = {stream: _write(page, stream, offset) for stream, offset in offsets.items()}
        if following == offsets and (page.get("state") != "running" or not to_the_end):
            return page
        offsets = following


def exit_status(remote: Remote, vm_id: str, job_id: str, last: Result) -> int:
    """As a shell would say it: the command's own status, 128 and the signal, 124 for a timeout."""
    code = last.get("exit_code")
    if isinstance(code, int):
        return code & 0xFF
    if last.get("state") in {"timed_out", "cancelled"}:
        return TIMED_OUT if last.get("state") == "timed_out" else CANCELLED
    signal = remote.call("vm_job_status", {"vm_id": vm_id, "job_id": job_id}).get("signal")
    return 128 + signal if isinstance(signal, int) else 1


def _write(page: Result, stream: str, offset: int) -> int:
    """The stream's bytes of this page, after a note on those that were forgotten before them; the next offset."""
    content, cursor = page.get(f"{stream}_base64"), page.get("next_cursor")
    following = cursor.get(stream) if isinstance(cursor, dict) else None
    if not isinstance(content, str) or not isinstance(following, int):
        raise Unavailable("The service's answer to vm_job_output makes no sense; are both of one version?")
    data = base64.b64decode(content)
    if missing := following - offset - len(data):
        print(f"[{missing} bytes of {stream} left out; all of it is in {page.get('log_path')}]", file=sys.stderr)
    out = sys.stdout if stream == "stdout" else sys.stderr
    out.flush()
    out.buffer.write(data)
    out.flush()
    return following
