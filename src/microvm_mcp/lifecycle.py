"""The life of a machine as data: states, operations, what work needs, and what recovery may conclude. Pure.

    create                         (none)                     → creating    → running      else failed
    pause                          running                    → pausing     → paused       else failed
    hibernate                      running paused             → hibernating → hibernated   else failed
    resume                         paused hibernated          → resuming    → running      else failed
    cold_boot                      stopped failed hibernated  → resuming    → running      else failed
    stop                           running paused (stopping)  → stopping    → stopped      else failed
    destroy                        anything but destroyed     → destroying  → destroyed    else destroying

A destruction that failed is to be repeated. A transition that was cut off ends in the last state that is certainly
true. Memory is never assumed: only a live VMM whose supervisor answers a hello proves it. The rows are moved by the
engine alone, each by compare-and-set; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from microvm_mcp.model import Vm, VmState


class Operation(StrEnum):
    CREATE = "create"
    PAUSE = "pause"
    HIBERNATE = "hibernate"
    RESUME = "resume"
    COLD_BOOT = "cold_boot"
    STOP = "stop"
    DESTROY = "destroy"


@dataclass(frozen=True, slots=True)
class Transition:
    sources: frozenset[VmState]
    through: VmState
    to: VmState
    on_failure: VmState
    gerund: str
    """Completes "The machine is being …"."""
    overrides: frozenset[Operation] = frozenset()
    """Operations in progress that this one cuts off, in place of being refused as busy."""


S = VmState
STABLE = frozenset({S.RUNNING, S.PAUSED, S.HIBERNATED, S.STOPPED, S.FAILED, S.DESTROYED})
IN_PROGRESS = frozenset(S) - STABLE
RESIDENT = frozenset({S.RUNNING, S.PAUSED})
"""Stable states in which a VMM holds the machine's memory."""
WITHOUT_VMM = STABLE - RESIDENT

TRANSITIONS: Mapping[Operation, Transition] = {
    Operation.CREATE: Transition(frozenset(), S.CREATING, S.RUNNING, S.FAILED, "created"),
    Operation.PAUSE: Transition(frozenset({S.RUNNING}), S.PAUSING, S.PAUSED, S.FAILED, "paused"),
    Operation.HIBERNATE: Transition(RESIDENT, S.HIBERNATING, S.HIBERNATED, S.FAILED, "hibernated"),
    Operation.RESUME: Transition(frozenset({S.PAUSED, S.HIBERNATED}), S.RESUMING, S.RUNNING, S.FAILED, "resumed"),
    Operation.COLD_BOOT: Transition(
        frozenset({S.STOPPED, S.FAILED, S.HIBERNATED}), S.RESUMING, S.RUNNING, S.FAILED, "booted"
    ),
    Operation.STOP: Transition(RESIDENT | {S.STOPPING}, S.STOPPING, S.STOPPED, S.FAILED, "stopped"),
    Operation.DESTROY: Transition(
        frozenset(S) - {S.DESTROYED},
        S.DESTROYING,
        S.DESTROYED,
        S.DESTROYING,
        "destroyed",
        frozenset({Operation.CREATE}),
    ),
}
"""`through` of a transition is left only by that operation or by recovery."""

_NO_RESTART = "starting it again is not available yet, so destroy it and create a new one"

NOT_READY: Mapping[VmState, str] = {
    S.PAUSED: f"The machine is paused; {_NO_RESTART}.",
    S.HIBERNATED: f"The machine is hibernated; {_NO_RESTART}.",
    S.STOPPED: f"The machine is stopped; {_NO_RESTART}.",
    S.FAILED: f"The machine has failed, and vm_status says why; {_NO_RESTART}.",
    S.DESTROYING: "The machine is being destroyed; create a new one.",
    S.DESTROYED: "The machine was destroyed; create a new one.",
}
"""States in which work (commands, files, live output) is refused for good, each with the way out.

Work needs RUNNING. Any other state is a transition towards it or away from it, which work waits for.
"""


# Recovery after the service was away.


@dataclass(frozen=True, slots=True)
class Evidence:
    """What can be observed about one machine when the service starts."""

    same_host_boot: bool
    vmm_alive: bool
    """A process with the row's pid and start time runs, and the driver took hold of it."""
    answered: bool
    """The supervisor answered a hello over that VMM's channel."""
    powered_off: bool = False
    """The guest shut down by itself; the VMM was found, or waited, to tell."""


class Remedy(StrEnum):
    """What recovery does with what the machine has on the host."""

    ADOPT = "adopt"
    """Nothing is touched; the live VMM is taken over."""
    END_VMM = "end_vmm"
    """VMM, network and runtime directory go, the disk stays."""
    GIVE_BACK = "give_back"
    """All of it goes, the disk included."""


@dataclass(frozen=True, slots=True)
class Decision:
    state: VmState
    """A stable state; it is recorded after the remedy took effect."""
    remedy: Remedy
    reason: str = ""
    """Set where the state became FAILED: what happened, fit for the owner."""
    lost: str = ""
    cold_boot_possible: bool = False


MEMORY_LOST = "Memory and running jobs are lost; the disk is kept."
NOTHING_LOST = "Nothing: the machine had not run yet."


def recover(row: Vm, evidence: Evidence) -> Decision:
    match row.state:
        case S.DESTROYED | S.DESTROYING:
            return Decision(S.DESTROYED, Remedy.GIVE_BACK)
        case S.CREATING:
            return Decision(
                S.FAILED, Remedy.GIVE_BACK, "The service ended while the machine was being created.", NOTHING_LOST
            )
        case S.FAILED if row.slot is None:
            return Decision(S.FAILED, Remedy.GIVE_BACK)
        case S.FAILED | S.STOPPED | S.HIBERNATED:
            return Decision(row.state, Remedy.END_VMM)
        case S.RUNNING | S.PAUSED:
            return _recover_resident(row, evidence)
        case S.PAUSING | S.HIBERNATING | S.RESUMING | S.STOPPING:
            return _failed(f"The service ended while the machine was {row.state.value}.")


def _recover_resident(row: Vm, evidence: Evidence) -> Decision:
    if evidence.powered_off:
        return Decision(S.STOPPED, Remedy.END_VMM)
    if not evidence.same_host_boot:
        return _failed("The host was restarted while the machine ran.")
    if not evidence.vmm_alive:
        return _failed("The machine's VMM ended while the service was not running.")
    # A paused guest cannot answer; its identity is all the proof there is until it runs.
    if not evidence.answered and row.state is S.RUNNING:
        return _failed("The machine's supervisor did not answer after the service was restarted.")
    return Decision(row.state, Remedy.ADOPT)


def _failed(reason: str) -> Decision:
    return Decision(S.FAILED, Remedy.END_VMM, reason, MEMORY_LOST, cold_boot_possible=True)
