"""A guest's refusals and silences in the words of the public errors.

The text that a guest sends along is never shown: only its code is taken, out of a fixed list. A disk that is full
is the guest's own here, and the answer says so; a full host speaks in `policy` and in the store.
"""

from __future__ import annotations

from microvm_mcp.errors import (
    Busy,
    Conflict,
    FailedPrecondition,
    InvalidArguments,
    MicrovmError,
    NotFound,
    OutcomeUnknown,
    ResourceExhausted,
    TooLarge,
    Unavailable,
)
from microvm_mcp.link.port import GuestRefused, LinkLost


def start_refused(refused: GuestRefused) -> MicrovmError:
    match refused.code:
        case "invalid" | "not_found" | "not_regular" | "symlink" | "denied":
            return InvalidArguments.field(
                "cwd", "is no directory that the guest's user may enter; make it first or leave cwd out"
            )
        case "busy":
            return Busy("The machine runs as many jobs as it can; wait for one or cancel it.")
        case "no_space":
            return guest_disk_full()
        case "too_large":
            return TooLarge("The command and its environment are too large; put them into a file and run that.")
        case _:
            return FailedPrecondition(
                "The guest could not start the command and may be out of processes or memory; cancel some jobs."
            )


def file_refused(refused: GuestRefused, *, writing: bool) -> MicrovmError:
    match refused.code:
        case "not_found":
            return NotFound("The machine has no such file; list its directory with vm_exec.")
        case "symlink":
            return InvalidArguments.field("path", "leads through a symlink; name the file by its real path")
        case "not_regular":
            return InvalidArguments.field("path", "names something that is no regular file")
        case "invalid":
            return InvalidArguments.field("path", "is not allowed; use a path under /workspace")
        case "denied":
            return FailedPrecondition("The guest's user may not access that file; change its mode with vm_exec.")
        case "conflict":
            return Conflict("The file's size is not the offset; vm_read_file tells its size.")
        case "too_large":
            return TooLarge("The file would be too large; write it in smaller parts or with vm_exec.")
        case "no_space":
            return guest_disk_full()
        case "busy":
            return Busy("The file is being changed by another call; repeat the call.")
        case _ if writing:
            return OutcomeUnknown(
                "The guest failed while it wrote; read the file, or repeat the call, which is safe."
            )
        case _:
            return Unavailable("The guest failed to read the file; repeat the call.")


def guest_disk_full() -> ResourceExhausted:
    return ResourceExhausted(
        "The machine's own disk is full; remove files in it with vm_exec.", details={"limit": "guest_disk"}
    )


def no_answer(lost: LinkLost, *, changes: str) -> MicrovmError:
    """`changes` completes "the machine may have …"; empty for calls that change nothing."""
    if lost.sent and changes:
        return OutcomeUnknown(
            f"The guest did not answer in time and may have {changes}; repeating the call is safe."
        )
    return Unavailable(
        "The guest did not answer in time; repeat the call, vm_status tells the state of the machine."
    )


def guest_untrusted() -> MicrovmError:
    return FailedPrecondition(
        "The machine's supervisor broke the protocol and the machine is being ended; create a new one."
    )
