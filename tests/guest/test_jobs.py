"""Jobs of the real supervisor on real cgroups: what the link suite's commands cannot show."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from microvm_mcp.link.client import LinkClient
from microvm_mcp.model import JobId, JobRequest, JobState, OutputPage, RequestId, Shell
from tests.contract.link_suite import PAGE, SOON, over, refused, report_of
from tests.support.supervisor import PYTHON, SOURCES, RunningSupervisor, has_pids_controller, running_supervisor

pytestmark = pytest.mark.needs("root", "cgroup2")


@pytest.fixture
def supervisor() -> Iterator[RunningSupervisor]:
    with running_supervisor() as running:
        yield running


@pytest.fixture
async def link(supervisor: RunningSupervisor) -> AsyncIterator[LinkClient]:
    link = supervisor.link()
    yield link
    await link.close()


async def run(
    link: LinkClient,
    command: str,
    *,
    number: int = 1,
    wait_s: float = SOON,
    timeout_seconds: int | None = None,
    env: dict[str, str] | None = None,
    shell: Shell = "plain",
    cwd: str = ".",
) -> OutputPage:
    job = JobRequest(
        job_id=JobId(f"job-{number}"),
        request_id=RequestId(f"r{number}"),
        command=command,
        cwd=cwd,
        shell=shell,
        env=env or {},
        timeout_seconds=timeout_seconds,
    )
    return await link.start_job(job, wait_s=wait_s, deadline_s=wait_s + SOON)


async def text_of(link: LinkClient, command: str, **options: str) -> str:
    page = await run(link, command, **options)  # type: ignore[arg-type]
    assert page.stderr.data == b""
    return page.stdout.data.decode()


def is_alive(pid: int) -> bool:
    """Not gone and no zombie (whoever inherits orphans here reaps them in its own time)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def pid_in(supervisor: RunningSupervisor, name: str) -> int:
    """The pid that a job writes into a file of the workspace."""
    async with asyncio.timeout(SOON):
        while True:
            file = supervisor.workspace / name
            if file.exists() and (text := file.read_text()).endswith("\n"):
                return int(text)
            # The job tells by a file, and nothing announces files: every 10 ms up to the deadline above.
            await asyncio.sleep(0.01)


async def test_a_job_runs_as_the_user_and_nothing_else(link: LinkClient) -> None:
    text = await text_of(link, "cat /proc/self/status")
    status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    assert status["Uid"].split() == ["1000"] * 4
    assert status["Gid"].split() == ["1000"] * 4
    assert status["Groups"].split() == []
    for capabilities in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[capabilities], 16) == 0
    # SIGPIPE (13) and SIGXFSZ (25) are ignored by Python, and must not be by what it starts.
    assert int(status["SigIgn"], 16) == 0
    assert int(status["SigBlk"], 16) == 0


async def test_a_job_has_its_three_descriptors_and_no_other(link: LinkClient) -> None:
    text = await text_of(link, "readlink /proc/$$/fd/0; ls /proc/$$/fd; echo")
    assert text.split() == ["/dev/null", "0", "1", "2"]


async def test_standard_input_is_at_its_end(link: LinkClient) -> None:
    assert await text_of(link, "cat; read line || echo end") == "end\n"


async def test_streams_can_be_opened_by_name(link: LinkClient) -> None:
    page = await run(link, "echo out >/dev/stdout; echo err >/dev/stderr")
    assert (page.stdout.data, page.stderr.data) == (b"out\n", b"err\n")


async def test_a_job_starts_in_its_own_session_cgroup_and_directory(
    supervisor: RunningSupervisor, link: LinkClient
) -> None:
    await link.write_file("sub/dir/file", b"", offset=None, mode=None, deadline_s=SOON)
    text = await text_of(link, "pwd; ps -o sid= -p $$; echo $$; grep ^0:: /proc/self/cgroup; umask", cwd="sub/dir")
    directory, session, pid, cgroup, umask = text.split()
    assert directory == str(supervisor.workspace / "sub/dir")
    assert session == pid
    assert cgroup.endswith(f"{supervisor.cgroup.name}/user/job-1")
    assert umask == "0022"


async def test_the_environment_is_the_users_and_what_the_caller_adds(
    supervisor: RunningSupervisor, link: LinkClient
) -> None:
    page = await run(link, "env", env={"EXTRA": "a=b\nc", "LANG": "C"})
    lines = page.stdout.data.decode().splitlines()
    assert {"EXTRA=a=b", "c", "LANG=C", "USER=user", "LOGNAME=user", "SHELL=/bin/bash"} <= set(lines)
    assert f"HOME={supervisor.base}/home" in lines
    assert not [line for line in lines if line.startswith("PYTHON")]


async def test_a_login_shell_reads_profiles_and_a_plain_one_does_not(
    supervisor: RunningSupervisor, link: LinkClient
) -> None:
    (supervisor.base / "home/.bash_profile").write_text("export FROM_PROFILE=yes\n")
    (supervisor.base / "home/.bashrc").write_text("export FROM_RC=yes\n")
    command = "echo ${FROM_PROFILE-no} ${FROM_RC-no}"
    login = await run(link, command, number=1, shell="login")
    plain = await run(link, command, number=2, shell="plain")
    assert (login.stdout.data, plain.stdout.data) == (b"yes no\n", b"no no\n")


@pytest.mark.parametrize("shell", ["login", "plain"])
async def test_the_command_is_verbatim(link: LinkClient, shell: Shell) -> None:
    page = await run(link, "-c echo", number=1, shell=shell)
    assert page.report.exit_code == 127
    assert b"-c: command not found" in page.stderr.data
    page = await run(link, "printf '%s' 'a\\b\t\"$x\" ü'\n\n", number=2, shell=shell)
    assert page.stdout.data.decode() == 'a\\b\t"$x" ü'


async def test_a_command_of_the_largest_size_runs(link: LinkClient) -> None:
    command = "echo " + "x" * 65_000
    assert len(await text_of(link, command)) in (16_384, 65_001)
    assert (await report_of(link, JobId("job-1"))).exit_code == 0


async def test_the_signal_that_ended_the_shell_is_told(link: LinkClient) -> None:
    report = (await run(link, "kill -TERM $$")).report
    assert (report.state, report.exit_code, report.signal) == (JobState.COMPLETED, None, 15)


async def test_a_broken_pipe_ends_its_writer(link: LinkClient) -> None:
    assert await text_of(link, "yes | head -n 1") == "y\n"


@pytest.mark.parametrize(
    "escape",
    [
        "(setsid bash -c 'echo $BASHPID > pid; exec sleep 1000' &) & wait",
        "setsid setsid bash -c '(echo $BASHPID > pid; trap \"\" TERM HUP INT; sleep 1000)' & disown",
        "(bash -c 'echo $BASHPID > pid; kill -STOP $BASHPID; sleep 1000' &)",
        "nohup bash -c 'echo $BASHPID > pid; while :; do sleep 1000; done' >/dev/null 2>&1 &",
    ],
)
@pytest.mark.parametrize("ending", ["cancel", "timeout"])
async def test_nothing_escapes_the_end_of_its_job(
    supervisor: RunningSupervisor, link: LinkClient, escape: str, ending: str
) -> None:
    timeout = 2 if ending == "timeout" else None
    await run(link, f"{escape}\nsleep 1000", wait_s=0, timeout_seconds=timeout)
    pid = await pid_in(supervisor, "pid")
    assert is_alive(pid)
    if ending == "cancel":
        report = await link.cancel_job(JobId("job-1"), deadline_s=SOON)
        assert report.state is JobState.CANCELLED
    else:
        report = await over(link, JobId("job-1"))
        assert report.state is JobState.TIMED_OUT
    assert report.detached == 0
    assert not is_alive(pid)
    assert not (supervisor.user_cgroup / "job-1").exists()


async def test_a_daemon_that_holds_the_pipes_does_not_hold_the_exit_code(link: LinkClient) -> None:
    page = await run(link, "(while :; do echo tick; sleep 0.05; done) & echo started; exit 3")
    assert (page.report.state, page.report.exit_code) == (JobState.COMPLETED, 3)
    assert page.report.detached >= 1
    seen = page.stdout.written
    async with asyncio.timeout(SOON):
        while (page := await _page(link, seen)).stdout.written == seen:
            await asyncio.sleep(0.02)
    assert b"tick" in page.stdout.data
    report = await link.cancel_job(JobId("job-1"), deadline_s=SOON)
    assert (report.state, report.exit_code, report.detached) == (JobState.COMPLETED, 3, 0)


async def _page(link: LinkClient, stdout: int) -> OutputPage:
    return await link.job_output(JobId("job-1"), stdout=stdout, stderr=0, limit=PAGE, wait_s=0, deadline_s=SOON)


async def test_what_is_in_the_pipes_when_the_shell_ends_is_in_the_answer(link: LinkClient) -> None:
    for number in range(5):
        page = await run(link, "head -c 60000 /dev/zero; head -c 60000 /dev/zero >&2", number=number)
        assert (page.stdout.written, page.stderr.written) == (60_000, 60_000)


async def test_all_that_an_enlarged_pipe_holds_when_the_shell_ends_is_counted(
    supervisor: RunningSupervisor, link: LinkClient
) -> None:
    """The supervisor stands still meanwhile, so that the pipe is full when it learns of the end."""
    script = "import fcntl, os, time; fcntl.fcntl(1, 1031, 1 << 20); time.sleep(0.5); os.write(1, bytes(900_000))"
    await run(link, f"exec {PYTHON} -c '{script}'", wait_s=0)
    os.kill(supervisor.process.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(1.5)
    finally:
        os.kill(supervisor.process.pid, signal.SIGCONT)
    await over(link, JobId("job-1"))
    page = await link.job_output(JobId("job-1"), stdout=0, stderr=0, limit=0, wait_s=0, deadline_s=SOON)
    assert page.stdout.written == 900_000


async def test_a_flood_on_both_streams_is_never_held_up_and_every_byte_is_at_its_offset(link: LinkClient) -> None:
    """Lines of 8 bytes that name their own place."""
    numbers = "for s in 1 2; do seq -f %07.0f 0 131071 >&$s & done; wait"
    page = await run(link, numbers)
    assert page.report.truncated
    total = 0
    for stream in ("stdout", "stderr"):
        cursor, kept = 0, 0
        while True:
            offsets = {"stdout": 0, "stderr": 0, stream: cursor}
            answer = await link.job_output(JobId("job-1"), **offsets, limit=PAGE, wait_s=0, deadline_s=SOON)
            page_of = getattr(answer, stream)
            assert page_of.offset in (cursor, page_of.gap_from + page_of.gap_bytes)
            if not page_of.data:
                break
            first = page_of.offset
            expected = b"".join(b"%07d\n" % n for n in range(first // 8, (first + len(page_of.data)) // 8 + 1))
            assert page_of.data == expected[first % 8 :][: len(page_of.data)]
            kept += len(page_of.data)
            cursor = first + len(page_of.data)
        assert cursor == page_of.written == 1_048_576
        assert kept + page_of.gap_bytes == page_of.written
        assert kept >= 128 * 1024
        total += kept
    assert total == 256 * 1024


async def test_the_log_has_everything_up_to_its_limit(tmp_path: Path) -> None:
    with running_supervisor("--log-limit", "100000") as supervisor:
        link = supervisor.link()
        page = await run(link, "seq -f %07.0f 0 99999")
        log = Path(page.report.log_path).read_bytes()
        await link.close()
    assert page.stdout.written == 800_000
    assert log == b"".join(b"%07d\n" % n for n in range(12_500))


async def test_the_user_can_read_a_log_and_not_touch_it(link: LinkClient) -> None:
    log = (await run(link, "echo out", number=1)).report.log_path
    touch = f"(echo x >> {log}) 2>/dev/null || echo no; rm -f {log} 2>/dev/null || echo no"
    page = await run(link, f"cat {log}; {touch}", number=2)
    assert page.stdout.data == b"out\nno\nno\n"


async def test_a_full_disk_stops_the_log_and_not_the_job(link: LinkClient, supervisor: RunningSupervisor) -> None:
    # A log that cannot be opened is what a full disk leaves: a directory stands in its place.
    place = supervisor.base / "state/jobs/job-1/output.log"
    place.mkdir(parents=True)
    page = await run(link, "echo out")
    assert (page.stdout.data, page.report.exit_code) == (b"out\n", 0)


async def test_stopped_and_frozen_processes_end_with_their_job(link: LinkClient) -> None:
    await run(link, "kill -STOP $$", wait_s=0)
    await link.freeze(deadline_s=SOON)
    assert (await link.cancel_job(JobId("job-1"), deadline_s=SOON)).state is JobState.CANCELLED
    await link.thaw(deadline_s=SOON)


async def test_four_floods_do_not_hold_up_a_request(link: LinkClient) -> None:
    for number in range(4):
        await run(link, "yes flood", number=number, wait_s=0)
    assert "busy" in (await refused(run(link, "true", number=4))).code
    for number in range(4):
        report = await link.cancel_job(JobId(f"job-{number}"), deadline_s=SOON)
        assert report.state is JobState.CANCELLED
        assert report.truncated


async def test_the_257th_record_and_four_more_are_taken_and_then_no_other(link: LinkClient) -> None:
    for number in range(260):
        await run(link, ":", number=number)
    assert (await refused(run(link, ":", number=260))).code == "busy"
    assert len((await link.list_jobs(generation=-1, wait_s=0, deadline_s=SOON)).jobs) == 260
    await over(link, JobId("job-0"))
    await link.forget_job(JobId("job-0"), deadline_s=SOON)
    assert (await run(link, "echo again", number=260)).stdout.data == b"again\n"


async def test_a_fork_bomb_costs_only_its_job(supervisor: RunningSupervisor, link: LinkClient) -> None:
    if not has_pids_controller():
        pytest.skip("needs pids: the cgroup v2 hierarchy of this host has no pids controller")
    await run(link, ":(){ :|:& };:", wait_s=1)
    assert (await run(link, "echo still here", number=2)).stdout.data == b"still here\n"
    await link.cancel_job(JobId("job-1"), deadline_s=SOON)


async def test_the_oom_killer_finds_jobs_before_the_supervisor(
    supervisor: RunningSupervisor, link: LinkClient
) -> None:
    job = int(await text_of(link, "cat /proc/self/oom_score_adj"))
    own = int(Path(f"/proc/{supervisor.process.pid}/oom_score_adj").read_text())
    assert job == 500 > own


async def test_a_supervisor_that_starts_anew_ends_what_the_last_one_left(supervisor: RunningSupervisor) -> None:
    link = supervisor.link()
    await run(link, "(setsid bash -c 'echo $BASHPID > pid; exec sleep 1000' &)", wait_s=0)
    pid = await pid_in(supervisor, "pid")
    first = await link.hello(deadline_s=SOON)
    supervisor.restart()
    second = await link.hello(deadline_s=SOON)
    assert second.boot_id != first.boot_id
    assert not is_alive(pid)
    assert (await link.list_jobs(generation=-1, wait_s=0, deadline_s=SOON)).jobs == ()
    path = str(supervisor.base / "state/jobs/job-1/output.log")
    assert (await link.read_file(path, offset=0, length=9, deadline_s=SOON)).data == b""
    await link.forget_job(JobId("job-1"), deadline_s=SOON)
    assert not (supervisor.base / "state/jobs/job-1").exists()
    await link.close()


def test_the_supervisor_is_small_and_imports_little(supervisor: RunningSupervisor) -> None:
    stream = supervisor.connect()
    stream.close()
    assert _resident_kib(supervisor) < 25 * 1024


def test_it_needs_nothing_but_the_standard_library() -> None:
    """`-I -S` hides site-packages; what is heavy in the standard library stays out, too."""
    heavy = {"asyncio", "dataclasses", "inspect", "pathlib", "subprocess", "argparse", "logging", "ast"}
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules)\n"
        "import microvm_mcp.guest.__main__; print(*sorted(set(sys.modules) - before))"
    )
    argv = [PYTHON, "-I", "-S", "-c", code, str(SOURCES)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.split())
    assert not loaded & heavy
    ours = {name for name in loaded if name.startswith("microvm_mcp.")}
    assert all(name.startswith(("microvm_mcp.guest", "microvm_mcp.wire")) for name in ours)


async def test_finished_jobs_cost_the_supervisor_no_memory(supervisor: RunningSupervisor, link: LinkClient) -> None:
    for number in range(100):
        page = await run(link, "head -c 300000 /dev/zero; echo end", number=number)
        await over(link, page.report.job_id)
    assert _resident_kib(supervisor) < 25 * 1024
    page = await link.job_output(JobId("job-7"), stdout=300_000, stderr=0, limit=9, wait_s=0, deadline_s=SOON)
    assert page.stdout.data == b"end\n"
    await link.forget_job(JobId("job-7"), deadline_s=SOON)
    assert not (supervisor.base / "state/jobs/job-7").exists()


def _resident_kib(supervisor: RunningSupervisor) -> int:
    status = Path(f"/proc/{supervisor.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])
