"""New ids: opaque, 96 random bits, never reused. A name, not a capability: every call checks the owner."""

from __future__ import annotations

import base64
import re
import secrets

from microvm_mcp.model import JobId, VmId

_BITS = 96
_VM_ID = re.compile(r"vm-[a-z2-7]{20}", re.ASCII)


def new_vm_id() -> VmId:
    return VmId(f"vm-{_random()}")


def new_job_id() -> JobId:
    return JobId(f"job-{_random()}")


def is_vm_id(text: str) -> bool:
    return _VM_ID.fullmatch(text) is not None


def _random() -> str:
    """Lower-case base32: copied more reliably than mixed case, and 20 digits hold the 96 bits."""
    return base64.b32encode(secrets.token_bytes(_BITS // 8)).decode().rstrip("=").lower()
