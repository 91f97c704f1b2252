"""A fork whose child is born in a given cgroup: clone3 with CLONE_INTO_CGROUP.

Moving a process afterwards costs an RCU grace period, 10 to 20 ms on an otherwise idle machine and more than all
the rest of starting a command. Python has no call for it. The child is a plain copy, as after fork, of a process
with one thread; it may only make system calls and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal

_SYS_CLONE3 = 435
"""The same on every architecture."""
_CLONE_INTO_CGROUP = 0x2_0000_0000
# PyDLL keeps the interpreter's lock across the call, so that both sides own it afterwards.
_LIBC = ctypes.PyDLL(None, use_errno=True)


class _Arguments(ctypes.Structure):
    """struct clone_args up to `cgroup`, linux/sched.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    )


def fork_into(group_fd: int) -> int:
    """0 in the child, its pid in the parent. `group_fd`: the cgroup's directory."""
    arguments = _Arguments(flags=_CLONE_INTO_CGROUP, exit_signal=signal.SIGCHLD, cgroup=group_fd)
    pid: int = _LIBC.syscall(_SYS_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid
