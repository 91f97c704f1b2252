"""What every link to a supervisor does: the real one over a socket, and the fake that the engine's tests use.

Commands are of the few that the fake knows (see `tests.support.fake_link`). A subclass provides the `rig` fixture.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import pytest

from microvm_mcp.link.port import GuestRefused, Link, LinkLost
from microvm_mcp.model import JobId, JobReport, JobRequest, JobState, OutputPage, RequestId

SOON = 20.0
"""Deadline of whatever is expected to happen."""
PAGE = 16_384


class LinkRig(Protocol):
    def link(self) -> Link:
        """A new link to the same guest; the rig closes it."""

    def clock_settings(self) -> list[int]:
        """Every value that the guest's clock was set to."""


def request(
    number: int, command: str, *, timeout_seconds: int | None = None, max_seconds: int = 600, cwd: str = "."
) -> JobRequest:
    return JobRequest(
        job_id=JobId(f"job-{number:024x}"),
        request_id=RequestId(f"request-{number}"),
        command=command,
        cwd=cwd,
        shell="plain",
        timeout_seconds=timeout_seconds,
        max_seconds=max_seconds,
    )


async def run(link: Link, job: JobRequest, *, wait_s: float = SOON) -> OutputPage:
    return await link.start_job(job, wait_s=wait_s, deadline_s=wait_s + SOON)


async def refused(awaitable: object) -> GuestRefused:
    with pytest.raises(GuestRefused) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value


async def report_of(link: Link, job_id: JobId) -> JobReport:
    jobs = await link.list_jobs(generation=-1, wait_s=0, deadline_s=SOON)
    return next(job for job in jobs.jobs if job.job_id == job_id)


async def over(link: Link, job_id: JobId) -> JobReport:
    """Once the job is in a final state and nothing of it runs."""
    generation = -1
    async with asyncio.timeout(SOON):
        while True:
            jobs = await link.list_jobs(generation=generation, wait_s=5, deadline_s=SOON)
            job = next(job for job in jobs.jobs if job.job_id == job_id)
            if job.state is not JobState.RUNNING and job.detached == 0:
                return job
            generation = jobs.generation


class LinkSuite:
    @pytest.fixture
    def link(self, rig: LinkRig) -> Link:
        return rig.link()

    async def test_every_attach_tells_the_same_boot(self, rig: LinkRig, link: Link) -> None:
        first = await link.hello(deadline_s=SOON)
        again = await link.hello(deadline_s=SOON)
        other = await rig.link().hello(deadline_s=SOON)
        assert first.wire_version == 1
        assert first.boot_id == again.boot_id == other.boot_id

    async def test_hello_counts_active_jobs(self, link: Link) -> None:
        await run(link, request(1, "sleep 100"), wait_s=0)
        assert (await link.hello(deadline_s=SOON)).active_jobs == 1

    async def test_a_short_job_is_complete_in_the_start_answer(self, link: Link) -> None:
        page = await run(link, request(1, "echo out; echo err >&2; exit 3"))
        assert (page.stdout.data, page.stderr.data) == (b"out\n", b"err\n")
        assert (page.report.state, page.report.exit_code, page.report.signal) == (JobState.COMPLETED, 3, None)
        assert page.report.finished_at is not None
        assert page.report.service_time_us is not None
        assert page.report.log_path.endswith(f"/{page.report.job_id}/output.log")

    async def test_start_without_wait_answers_while_the_job_runs(self, link: Link) -> None:
        page = await run(link, request(1, "sleep 100"), wait_s=0)
        assert (page.report.state, page.report.exit_code) == (JobState.RUNNING, None)
        assert page.report.finished_at is None

    async def test_start_answers_when_its_wait_is_over(self, link: Link) -> None:
        page = await run(link, request(1, "echo first; sleep 100"), wait_s=0.3)
        assert (page.report.state, page.stdout.data) == (JobState.RUNNING, b"first\n")

    async def test_the_same_job_id_runs_once(self, link: Link) -> None:
        first = await run(link, request(1, "echo once"))
        second = await run(link, request(1, "echo once"))
        assert second == first

    async def test_two_starts_of_one_job_at_once_run_it_once(self, link: Link) -> None:
        job = request(1, "sleep 0.2; echo once")
        first, second = await asyncio.gather(run(link, job), run(link, job))
        assert first == second
        assert first.stdout.data == b"once\n"

    async def test_a_job_id_of_another_request_is_a_conflict(self, link: Link) -> None:
        await run(link, request(1, "exit 0"))
        other = JobRequest(job_id=request(1, "").job_id, request_id=RequestId("other"), command="exit 0")
        assert (await refused(run(link, other))).code == "conflict"

    async def test_a_fifth_active_job_is_refused_by_name(self, link: Link) -> None:
        for number in range(4):
            await run(link, request(number, "sleep 100"), wait_s=0)
        error = await refused(run(link, request(4, "echo no")))
        assert error.code == "busy"
        assert request(2, "").job_id in str(error)
        await link.cancel_job(request(2, "").job_id, deadline_s=SOON)
        assert (await run(link, request(4, "echo yes"))).stdout.data == b"yes\n"

    async def test_output_is_waited_for(self, link: Link) -> None:
        job = request(1, "sleep 0.3; echo late; sleep 100")
        await run(link, job, wait_s=0)
        page = await link.job_output(job.job_id, stdout=0, stderr=0, limit=PAGE, wait_s=15, deadline_s=SOON)
        assert (page.stdout.data, page.report.state) == (b"late\n", JobState.RUNNING)

    async def test_the_end_of_a_job_ends_the_wait_for_its_output(self, link: Link) -> None:
        job = request(1, "sleep 0.3; exit 7")
        await run(link, job, wait_s=0)
        page = await link.job_output(job.job_id, stdout=0, stderr=0, limit=PAGE, wait_s=15, deadline_s=SOON)
        assert (page.stdout.data, page.report.exit_code) == (b"", 7)

    async def test_waiting_for_output_that_does_not_come_ends(self, link: Link) -> None:
        job = request(1, "echo first; sleep 100")
        await run(link, job, wait_s=0.3)
        page = await link.job_output(job.job_id, stdout=6, stderr=0, limit=PAGE, wait_s=0.2, deadline_s=SOON)
        assert (page.stdout.offset, page.stdout.data, page.stdout.written) == (6, b"", 6)

    async def test_pages_are_limited_and_repeatable(self, link: Link) -> None:
        job = request(1, "echo abcdef")
        await run(link, job)
        for _ in range(2):
            page = await link.job_output(job.job_id, stdout=2, stderr=0, limit=3, wait_s=0, deadline_s=SOON)
            assert (page.stdout.offset, page.stdout.data, page.stdout.written) == (2, b"cde", 7)

    async def test_a_cursor_past_the_end_is_refused_with_the_end(self, link: Link) -> None:
        job = request(1, "echo abcdef")
        await run(link, job)
        reading = link.job_output(job.job_id, stdout=8, stderr=0, limit=PAGE, wait_s=0, deadline_s=SOON)
        error = await refused(reading)
        assert error.code == "invalid"
        assert "7 bytes" in str(error)

    async def test_a_flood_keeps_head_and_tail_at_their_offsets(self, link: Link) -> None:
        job = request(1, "head -c 1000000 /dev/zero; echo end; echo small >&2")
        page = await run(link, job)
        assert page.report.truncated
        kept = bytearray()
        cursor = 0
        while True:
            page = await link.job_output(job.job_id, stdout=cursor, stderr=0, limit=PAGE, wait_s=0, deadline_s=SOON)
            stream = page.stdout
            if cursor == stream.gap_from:
                assert stream.offset == stream.gap_from + stream.gap_bytes
            else:
                assert stream.offset == cursor
            if not stream.data:
                break
            kept += stream.data
            cursor = stream.offset + len(stream.data)
        assert cursor == stream.written == 1_000_004
        assert len(kept) + stream.gap_bytes == stream.written
        assert stream.gap_from == 65_536
        assert len(kept) == 256 * 1024 - len(b"small\n")
        assert kept.endswith(b"\0end\n")
        assert page.stderr.data == b"small\n"

    async def test_a_cursor_in_the_gap_moves_to_its_end(self, link: Link) -> None:
        job = request(1, "head -c 1000000 /dev/zero; echo end")
        await run(link, job)
        page = await link.job_output(job.job_id, stdout=500_000, stderr=0, limit=PAGE, wait_s=0, deadline_s=SOON)
        assert page.stdout.offset == page.stdout.gap_from + page.stdout.gap_bytes > 500_000

    async def test_output_of_an_unknown_job_is_not_found(self, link: Link) -> None:
        reading = link.job_output(JobId("job-x"), stdout=0, stderr=0, limit=1, wait_s=0, deadline_s=SOON)
        assert (await refused(reading)).code == "not_found"

    async def test_cancel_ends_a_job_and_repeating_it_is_harmless(self, link: Link) -> None:
        job = request(1, "echo first; sleep 100")
        await run(link, job, wait_s=0.3)
        first = await link.cancel_job(job.job_id, deadline_s=SOON)
        assert (first.state, first.exit_code, first.signal, first.detached) == (JobState.CANCELLED, None, 9, 0)
        assert await link.cancel_job(job.job_id, deadline_s=SOON) == first
        page = await link.job_output(job.job_id, stdout=0, stderr=0, limit=PAGE, wait_s=0, deadline_s=SOON)
        assert (page.stdout.data, page.report) == (b"first\n", first)

    async def test_cancel_of_a_finished_job_changes_nothing(self, link: Link) -> None:
        job = request(1, "exit 5")
        await run(link, job)
        report = await link.cancel_job(job.job_id, deadline_s=SOON)
        assert (report.state, report.exit_code) == (JobState.COMPLETED, 5)

    async def test_cancel_of_an_unknown_job_is_not_found(self, link: Link) -> None:
        assert (await refused(link.cancel_job(JobId("job-x"), deadline_s=SOON))).code == "not_found"

    async def test_cancel_answers_the_start_that_waits(self, rig: LinkRig, link: Link) -> None:
        job = request(1, "sleep 100")
        waiting = asyncio.create_task(run(link, job))
        while not (jobs := await link.list_jobs(generation=-1, wait_s=0, deadline_s=SOON)).jobs:
            await link.list_jobs(generation=jobs.generation, wait_s=5, deadline_s=SOON)
        await link.cancel_job(job.job_id, deadline_s=SOON)
        assert (await waiting).report.state is JobState.CANCELLED

    async def test_a_timeout_ends_the_job_and_keeps_its_output(self, link: Link) -> None:
        page = await run(link, request(1, "echo first; sleep 100", timeout_seconds=1))
        assert (page.report.state, page.report.signal) == (JobState.TIMED_OUT, 9)
        assert page.stdout.data == b"first\n"

    async def test_max_seconds_ends_a_job_that_gave_no_timeout(self, link: Link) -> None:
        page = await run(link, request(1, "sleep 100", max_seconds=1))
        assert page.report.state is JobState.TIMED_OUT

    async def test_a_job_is_over_when_its_shell_is(self, link: Link) -> None:
        job = request(1, "sleep 100 & echo hi; exit 4")
        page = await run(link, job)
        report = page.report
        assert (report.state, report.exit_code, report.detached) == (JobState.COMPLETED, 4, 1)
        assert page.stdout.data == b"hi\n"
        ended = await link.cancel_job(job.job_id, deadline_s=SOON)
        assert (ended.state, ended.exit_code, ended.detached) == (JobState.COMPLETED, 4, 0)

    async def test_what_a_job_left_behind_takes_none_of_the_four_places(self, link: Link) -> None:
        for number in range(5):
            assert (await run(link, request(number, "sleep 100 & exit 0"))).report.detached == 1

    async def test_a_given_timeout_ends_what_the_job_left_behind(self, link: Link) -> None:
        job = request(1, "sleep 100 & exit 0", timeout_seconds=1)
        assert (await run(link, job)).report.detached == 1
        assert (await over(link, job.job_id)).state is JobState.COMPLETED

    async def test_max_seconds_spares_what_the_job_left_behind(self, link: Link) -> None:
        left = request(1, "sleep 100 & exit 0", max_seconds=1)
        await run(link, left)
        await run(link, request(2, "sleep 100", max_seconds=2))
        assert (await report_of(link, left.job_id)).detached == 1

    async def test_list_waits_for_a_change(self, link: Link) -> None:
        before = await link.list_jobs(generation=-1, wait_s=0, deadline_s=SOON)
        waiting = asyncio.create_task(link.list_jobs(generation=before.generation, wait_s=15, deadline_s=2 * SOON))
        await run(link, request(1, "exit 0"))
        after = await waiting
        assert after.generation > before.generation
        assert [job.job_id for job in after.jobs] == [request(1, "").job_id]

    async def test_list_without_a_change_answers_when_its_wait_is_over(self, link: Link) -> None:
        before = await link.list_jobs(generation=-1, wait_s=0, deadline_s=SOON)
        assert await link.list_jobs(generation=before.generation, wait_s=0.2, deadline_s=SOON) == before

    async def test_the_end_of_what_a_job_left_behind_is_a_change(self, link: Link) -> None:
        job = request(1, "sleep 0.4 & exit 0")
        await run(link, job)
        assert (await over(link, job.job_id)).detached == 0

    async def test_forget_drops_a_finished_record(self, link: Link) -> None:
        job = request(1, "exit 0")
        await run(link, job)
        await over(link, job.job_id)
        await link.forget_job(job.job_id, deadline_s=SOON)
        await link.forget_job(job.job_id, deadline_s=SOON)
        assert (await link.list_jobs(generation=-1, wait_s=0, deadline_s=SOON)).jobs == ()

    async def test_forget_of_a_job_with_processes_is_refused(self, link: Link) -> None:
        for number, command in enumerate(("sleep 100", "sleep 100 & exit 0")):
            job = request(number, command)
            await run(link, job, wait_s=0.3)
            assert (await refused(link.forget_job(job.job_id, deadline_s=SOON))).code == "busy"

    async def test_jobs_outlive_the_link(self, rig: LinkRig, link: Link) -> None:
        job = request(1, "echo before; sleep 0.5; echo after")
        await run(link, job, wait_s=0)
        await link.close()
        other = rig.link()
        page = await run(other, job)
        assert (page.stdout.data, page.report.exit_code) == (b"before\nafter\n", 0)

    async def test_a_closed_link_says_that_nothing_was_sent(self, link: Link) -> None:
        await link.hello(deadline_s=SOON)
        await link.close()
        await link.close()
        with pytest.raises(LinkLost) as caught:
            await run(link, request(1, "exit 0"))
        assert not caught.value.sent

    async def test_sleep_costs_no_timeout(self, link: Link) -> None:
        job = request(1, "sleep 100", timeout_seconds=1)
        await run(link, job, wait_s=0)
        for _ in range(3):
            await link.freeze(deadline_s=SOON)
            await asyncio.sleep(0.6)
            await link.thaw(deadline_s=SOON)
            assert (await report_of(link, job.job_id)).state is JobState.RUNNING
        assert (await over(link, job.job_id)).state is JobState.TIMED_OUT

    async def test_nothing_runs_while_frozen(self, link: Link) -> None:
        job = request(1, "sleep 0.3; echo done")
        await run(link, job, wait_s=0)
        await link.freeze(deadline_s=SOON)
        await link.freeze(deadline_s=SOON)
        page = await link.job_output(job.job_id, stdout=0, stderr=0, limit=PAGE, wait_s=1, deadline_s=SOON)
        assert (page.report.state, page.stdout.data) == (JobState.RUNNING, b"")
        assert (await refused(run(link, request(2, "exit 0")))).code == "busy"
        await link.thaw(deadline_s=SOON)
        await link.thaw(deadline_s=SOON)
        assert (await run(link, job)).stdout.data == b"done\n"

    async def test_a_frozen_job_can_be_cancelled(self, link: Link) -> None:
        job = request(1, "sleep 100")
        await run(link, job, wait_s=0)
        await link.freeze(deadline_s=SOON)
        assert (await link.cancel_job(job.job_id, deadline_s=SOON)).state is JobState.CANCELLED
        await link.thaw(deadline_s=SOON)

    async def test_the_clock_is_set_to_now_plus_the_way(self, rig: LinkRig, link: Link) -> None:
        before = time.monotonic_ns()
        await link.set_clock(1_900_000_000_000_000_000, deadline_s=SOON)
        elapsed = time.monotonic_ns() - before
        (setting,) = rig.clock_settings()
        assert 0 <= setting - 1_900_000_000_000_000_000 <= elapsed

    async def test_files_are_written_with_their_parents_and_read_in_parts(self, link: Link) -> None:
        written = await link.write_file("a/b/file", b"0123456789", offset=None, mode=None, deadline_s=SOON)
        assert (written.size, written.mode) == (10, 0o644)
        page = await link.read_file("a/b/file", offset=4, length=3, deadline_s=SOON)
        assert (page.data, page.offset, page.size, page.mode) == (b"456", 4, 10, 0o644)
        past = await link.read_file("./a//b/./file", offset=20, length=3, deadline_s=SOON)
        assert (past.data, past.size) == (b"", 10)

    async def test_a_file_keeps_its_mode_unless_one_is_given(self, link: Link) -> None:
        await link.write_file("script", b"1", offset=None, mode=0o755, deadline_s=SOON)
        assert (await link.write_file("script", b"2", offset=None, mode=None, deadline_s=SOON)).mode == 0o755
        assert (await link.write_file("script", b"3", offset=None, mode=0o600, deadline_s=SOON)).mode == 0o600
        assert (await link.read_file("script", offset=0, length=9, deadline_s=SOON)).data == b"3"

    async def test_a_write_at_the_end_extends_and_a_repeated_one_is_a_conflict(self, link: Link) -> None:
        await link.write_file("parts", b"abc", offset=0, mode=None, deadline_s=SOON)
        assert (await link.write_file("parts", b"def", offset=3, mode=None, deadline_s=SOON)).size == 6
        for offset in (3, 0, 7):
            error = await refused(link.write_file("parts", b"def", offset=offset, mode=None, deadline_s=SOON))
            assert error.code == "conflict"
            assert "6 bytes" in str(error)
        assert (await link.read_file("parts", offset=0, length=9, deadline_s=SOON)).data == b"abcdef"

    @pytest.mark.parametrize(
        ("path", "code"),
        [
            ("missing", "not_found"),
            ("missing/file", "not_found"),
            ("../file", "invalid"),
            ("a/../../file", "invalid"),
            ("/etc/passwd", "invalid"),
            ("nul\0byte", "invalid"),
            ("x" * 4097, "invalid"),
            ("x" * 300, "invalid"),
            ("file/below", "invalid"),
            ("directory", "not_regular"),
            (".", "not_regular"),
        ],
    )
    async def test_paths_that_name_no_file_of_the_workspace_are_refused(
        self, link: Link, path: str, code: str
    ) -> None:
        await link.write_file("file", b"", offset=None, mode=None, deadline_s=SOON)
        await link.write_file("directory/file", b"", offset=None, mode=None, deadline_s=SOON)
        assert (await refused(link.read_file(path, offset=0, length=1, deadline_s=SOON))).code == code
        if code != "not_found":
            writing = link.write_file(path, b"x", offset=None, mode=None, deadline_s=SOON)
            assert (await refused(writing)).code == code

    async def test_extending_a_missing_file_is_not_found(self, link: Link) -> None:
        writing = link.write_file("missing", b"x", offset=3, mode=None, deadline_s=SOON)
        assert (await refused(writing)).code == "not_found"

    async def test_files_of_the_largest_size_pass(self, link: Link) -> None:
        data = bytes(range(256)) * 512
        await link.write_file("large", data, offset=None, mode=None, deadline_s=SOON)
        assert (await link.read_file("large", offset=0, length=131_072, deadline_s=SOON)).data == data
        writing = link.write_file("large", data + b"x", offset=None, mode=None, deadline_s=SOON)
        assert (await refused(writing)).code == "invalid"

    async def test_a_log_holds_the_output_and_goes_with_the_record(self, link: Link) -> None:
        page = await run(link, request(1, "echo out; echo err >&2"))
        await over(link, page.report.job_id)
        path = page.report.log_path
        log = await link.read_file(path, offset=0, length=100, deadline_s=SOON)
        assert sorted(log.data.splitlines()) == [b"err", b"out"]
        assert (
            await refused(link.write_file(path, b"", offset=None, mode=None, deadline_s=SOON))
        ).code == "invalid"
        await link.forget_job(page.report.job_id, deadline_s=SOON)
        assert (await refused(link.read_file(path, offset=0, length=1, deadline_s=SOON))).code == "not_found"

    @pytest.mark.parametrize(
        ("cwd", "code"), [("missing", "not_found"), ("..", "invalid"), ("/etc", "invalid"), ("file", "invalid")]
    )
    async def test_a_job_needs_a_directory_of_the_workspace(self, link: Link, cwd: str, code: str) -> None:
        await link.write_file("file", b"", offset=None, mode=None, deadline_s=SOON)
        assert (await refused(run(link, request(1, "exit 0", cwd=cwd)))).code == code
        assert (await link.list_jobs(generation=-1, wait_s=0, deadline_s=SOON)).jobs == ()

    async def test_many_calls_at_once_get_each_its_own_answer(self, link: Link) -> None:
        async def one(number: int) -> bytes:
            name = f"file-{number}"
            await link.write_file(name, name.encode() * 1000, offset=None, mode=None, deadline_s=SOON)
            return (await link.read_file(name, offset=0, length=131_072, deadline_s=SOON)).data

        assert await asyncio.gather(*map(one, range(20))) == [f"file-{n}".encode() * 1000 for n in range(20)]
