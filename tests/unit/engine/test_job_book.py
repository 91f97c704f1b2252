"""What a report of the guest may change in a job's row, whatever it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm_mcp.engine.job_book import MAX_DETACHED, merge
from microvm_mcp.model import FINAL_JOB_STATES, Job, JobId, JobReport, JobState, RequestId, VmId, WorkspaceName

ROW = Job(
    job_id=JobId("job-1"),
    vm_id=VmId("vm-1"),
    workspace=WorkspaceName("w"),
    request_id=RequestId("r"),
    state=JobState.RUNNING,
    started_at=100.0,
)
REPORT = JobReport(
    job_id=JobId("job-1"),
    request_id=RequestId("r"),
    state=JobState.COMPLETED,
    started_at=1.0,
    finished_at=150.0,
    exit_code=0,
    signal=None,
    truncated=False,
    detached=0,
    log_path="/var/log/output.log",
)
REPORTED = [state for state in JobState if state is not JobState.LOST]


def test_an_end_is_taken_over() -> None:
    told = merge(ROW, replace(REPORT, exit_code=3, truncated=True, detached=2), now=200.0)
    assert (told.state, told.exit_code, told.finished_at) == (JobState.COMPLETED, 3, 150.0)
    assert (told.truncated, told.detached, told.log_path) == (True, 2, REPORT.log_path)


@pytest.mark.parametrize(("claimed", "kept"), [(1e12, 200.0), (-5.0, 100.0), (None, 200.0), (150.0, 150.0)])
def test_a_drifting_guest_ends_its_job_within_the_life_of_the_job(claimed: float | None, kept: float) -> None:
    assert merge(ROW, replace(REPORT, finished_at=claimed), now=200.0).finished_at == kept


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.CANCELLED, JobState.TIMED_OUT])
def test_a_final_state_and_exit_code_are_never_taken_back(state: JobState) -> None:
    final = replace(ROW, state=state, exit_code=5, finished_at=120.0)
    for claimed in REPORTED:
        told = merge(final, replace(REPORT, state=claimed, exit_code=9, signal=9), now=200.0)
        assert (told.state, told.exit_code, told.signal, told.finished_at) == (state, 5, None, 120.0)


def test_what_a_finished_job_left_running_is_followed() -> None:
    final = replace(ROW, state=JobState.COMPLETED, exit_code=0, detached=3)
    assert merge(final, replace(REPORT, detached=1), now=200.0).detached == 1


def test_a_lost_job_that_the_guest_still_knows_was_not_lost() -> None:
    lost = replace(ROW, state=JobState.LOST, finished_at=110.0)
    told = merge(lost, replace(REPORT, state=JobState.RUNNING, finished_at=None, exit_code=None), now=200.0)
    assert (told.state, told.finished_at) == (JobState.RUNNING, None)


@given(
    state=st.sampled_from(JobState),
    claimed=st.sampled_from(REPORTED),
    times=st.tuples(st.floats(-1e15, 1e15), st.none() | st.floats(-1e15, 1e15)),
    detached=st.integers(0, 2**62),
    request_id=st.text(max_size=9),
)
def test_reports_never_rename_a_job_or_move_its_start(
    state: JobState, claimed: JobState, times: tuple[float, float | None], detached: int, request_id: str
) -> None:
    row = replace(ROW, state=state)
    report = replace(
        REPORT,
        state=claimed,
        started_at=times[0],
        finished_at=times[1],
        detached=detached,
        request_id=RequestId(request_id),
    )
    told = merge(row, report, now=200.0)
    assert (told.job_id, told.request_id, told.started_at) == (ROW.job_id, ROW.request_id, ROW.started_at)
    assert told.detached <= MAX_DETACHED
    if told.state in FINAL_JOB_STATES and told.finished_at is not None:
        assert 100.0 <= told.finished_at <= 200.0
