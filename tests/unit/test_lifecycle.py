"""The table of states and operations, walked; and what recovery concludes from each kind of evidence."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from microvm_mcp.lifecycle import (
    IN_PROGRESS,
    NOT_READY,
    STABLE,
    TRANSITIONS,
    Decision,
    Evidence,
    Operation,
    Remedy,
    recover,
)
from microvm_mcp.model import Slot, Vm, VmId, VmState, WorkspaceName

EVIDENCE = [Evidence(*facts) for facts in product((True, False), repeat=4)]
ALIVE = Evidence(same_host_boot=True, vmm_alive=True, answered=True)

ROW = Vm(
    vm_id=VmId("vm-1"),
    workspace=WorkspaceName("w"),
    state=VmState.RUNNING,
    slot=Slot(0),
    memory_mib=512,
    vcpus=1,
    disk_bytes=1 << 30,
    network="off",
    idle_seconds=300,
    idle_mode="hibernate",
    created_at=1.0,
    state_since=1.0,
    driver="fake",
    image_digest="d",
)


def decided(state: VmState, evidence: Evidence) -> Decision:
    return recover(dataclasses.replace(ROW, state=state), evidence)


def test_every_operation_is_in_the_table_and_passes_through_a_state_of_progress() -> None:
    assert set(TRANSITIONS) == set(Operation)
    for transition in TRANSITIONS.values():
        assert transition.through in IN_PROGRESS
        assert transition.to in STABLE
        # An end that was cut off halfway may be repeated from its own state; destruction starts from anywhere.
        repeated = frozenset({transition.through}) if transition.to is VmState.STOPPED else frozenset()
        assert transition.sources <= STABLE | (IN_PROGRESS if transition.to is VmState.DESTROYED else repeated)


def test_every_state_of_progress_belongs_to_an_operation() -> None:
    assert {transition.through for transition in TRANSITIONS.values()} == IN_PROGRESS


def test_no_stable_state_but_destroyed_is_a_dead_end() -> None:
    for state in STABLE:
        ways = [operation for operation, transition in TRANSITIONS.items() if state in transition.sources]
        assert bool(ways) == (state is not VmState.DESTROYED)


def test_every_stable_state_can_be_reached() -> None:
    assert {transition.to for transition in TRANSITIONS.values()} | {
        transition.on_failure for transition in TRANSITIONS.values()
    } >= STABLE


def test_work_is_either_possible_or_waits_or_is_told_the_way_out() -> None:
    for state in STABLE - {VmState.RUNNING}:
        assert NOT_READY[state].endswith("create a new one.")
    assert VmState.RUNNING not in NOT_READY
    assert VmState.CREATING not in NOT_READY


@pytest.mark.parametrize("state", VmState)
@pytest.mark.parametrize("evidence", EVIDENCE)
def test_recovery_always_ends_in_a_stable_state_with_a_reason_where_it_failed(
    state: VmState, evidence: Evidence
) -> None:
    decision = decided(state, evidence)
    assert decision.state in STABLE
    newly_failed = decision.state is VmState.FAILED and state is not VmState.FAILED
    assert bool(decision.reason) == newly_failed
    assert bool(decision.lost) == newly_failed


@pytest.mark.parametrize("state", sorted(IN_PROGRESS | {VmState.RUNNING}))
@pytest.mark.parametrize("evidence", EVIDENCE)
def test_a_disk_that_a_guest_has_used_is_kept_unless_it_was_being_destroyed(
    state: VmState, evidence: Evidence
) -> None:
    given_back = decided(state, evidence).remedy is Remedy.GIVE_BACK
    assert given_back == (state in {VmState.CREATING, VmState.DESTROYING})


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_a_running_machine_is_adopted_only_when_its_vmm_lives_and_its_supervisor_answered(
    evidence: Evidence,
) -> None:
    decision = decided(VmState.RUNNING, evidence)
    assert (decision.remedy is Remedy.ADOPT) == (evidence == ALIVE)
    if evidence.powered_off:
        assert decision.state is VmState.STOPPED
    elif evidence != ALIVE:
        assert decision.state is VmState.FAILED
        assert decision.cold_boot_possible


def test_a_paused_machine_needs_no_answer_to_be_adopted() -> None:
    silent = dataclasses.replace(ALIVE, answered=False)
    assert decided(VmState.PAUSED, silent) == Decision(VmState.PAUSED, Remedy.ADOPT)


def test_a_machine_cut_off_while_creating_gives_everything_back() -> None:
    decision = decided(VmState.CREATING, ALIVE)
    assert (decision.state, decision.remedy) == (VmState.FAILED, Remedy.GIVE_BACK)
    assert not decision.cold_boot_possible


def test_a_destruction_that_was_cut_off_is_finished() -> None:
    assert decided(VmState.DESTROYING, ALIVE) == Decision(VmState.DESTROYED, Remedy.GIVE_BACK)


@pytest.mark.parametrize("state", [VmState.STOPPED, VmState.HIBERNATED, VmState.FAILED])
def test_a_state_without_a_vmm_stays_and_leftovers_end(state: VmState) -> None:
    assert decided(state, ALIVE) == Decision(state, Remedy.END_VMM)


def test_destroying_may_be_repeated_and_cuts_creation_off() -> None:
    destroy = TRANSITIONS[Operation.DESTROY]
    assert VmState.DESTROYING in destroy.sources
    assert destroy.on_failure is VmState.DESTROYING
    assert Operation.CREATE in destroy.overrides
