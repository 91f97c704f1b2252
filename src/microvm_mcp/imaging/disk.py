"""A tree as a raw ext4 file, made by mke2fs without mounting anything, and looked at again by debugfs.

Sparse, and as reproducible as it comes cheap: UUID and hash seed derive from the inputs, times of the file system
itself are fixed. Free blocks are holes, and the inode tables count as zeroed, so a guest does not fill them in.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from microvm_mcp.host.command import run
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.tree import SUPERVISOR_PATH, USER_ID

_NAMESPACE = uuid.UUID("8f7d0d0e-3d3a-5a57-9d7c-6f2b8f1a4c11")
_FIXED_TIME = "1735689600"
_TIMEOUT_S = 300.0
_EXPECTED_OWNERS = {"/": 0, "/home/user": USER_ID, "/workspace": USER_ID, f"/{SUPERVISOR_PATH}": 0}
_OWNER = re.compile(r"^User:\s+(\d+)\s+Group:\s+(\d+)", re.MULTILINE)


async def make_disk(tree: Path, image: Path, *, size_mib: int, bytes_per_inode: int, inputs_digest: str) -> None:
    identity = uuid.uuid5(_NAMESPACE, inputs_digest)
    argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-i", str(bytes_per_inode), "-m", "1"]
    argv += ["-L", "microvm", "-U", str(identity)]
    argv += ["-E", f"hash_seed={identity},root_owner=0:0,lazy_itable_init=0,lazy_journal_init=1"]
    argv += ["-d", str(tree), str(image), f"{size_mib}M"]
    times = {"E2FSPROGS_FAKE_TIME": _FIXED_TIME, "SOURCE_DATE_EPOCH": _FIXED_TIME, "MKE2FS_SYNC": "0"}
    await run(argv, timeout_s=_TIMEOUT_S, env=times)
    for path, owner in _EXPECTED_OWNERS.items():
        shown = (await run(["debugfs", "-R", f"stat {path}", image], timeout_s=30)).text
        found = _OWNER.search(shown)
        if found is None or {int(found[1]), int(found[2])} != {owner}:
            raise ImageError(
                f"{path} on the finished disk is not owned by {owner}; mke2fs may be too old, update e2fsprogs."
            )
