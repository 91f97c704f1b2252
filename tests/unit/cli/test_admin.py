"""Administrative commands as processes, on real files: without a service, beside one, and when things go wrong."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import re
import secrets
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from microvm_mcp.host import cgroup
from microvm_mcp.host.instance import RUN_DIR, ensure_instance_id, tag_of
from microvm_mcp.model import Slot, TokenId, VmId, VmState, WorkspaceName
from microvm_mcp.service.admin import Administration, digest_of
from microvm_mcp.service.clock import SystemClock
from microvm_mcp.store import tokens, vms
from microvm_mcp.store.database import Database
from microvm_mcp.transport.local import LocalSocket, socket_path
from tests.unit.cli.inline import Done, run
from tests.unit.store.rows import a_vm

NOBODY = 65_534
SOME_GROUP = "games"
RUN = "from microvm_mcp.cli.main import main; main()"


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


def run_process(script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=50, check=False
    )


def issue_argv(state_dir: Path, output: Path, workspace: str = "demo") -> list[str]:
    options = {"--state-dir": state_dir, "--workspace": workspace, "--output": output, "--ttl": 3600}
    return ["issue-token", *(str(word) for pair in options.items() for word in pair)]


def issue(state_dir: Path, output: Path, *more: object, workspace: str = "demo") -> Done:
    return run(*issue_argv(state_dir, output, workspace), *more)


def query(state_dir: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(state_dir / "service.db")
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_a_token_is_in_its_file_and_nowhere_else(state_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "token"
    done = issue(state_dir, output, "--allow-network", "--max-vms", 3)
    assert done.returncode == 0, done.stderr
    token = output.read_text()
    assert re.fullmatch(r"mvm_[A-Za-z0-9_-]{43}\n", token)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert re.fullmatch(r"tok-[0-9a-f]{16}\n", done.stdout)
    secret = token.strip().removeprefix("mvm_")
    assert secret not in done.stdout + done.stderr
    for file in state_dir.iterdir():
        assert secret.encode() not in file.read_bytes()
    assert query(state_dir, "SELECT token_id, digest FROM tokens") == [
        (done.stdout.strip(), digest_of(token.strip()))
    ]
    assert query(state_dir, "SELECT name, allow_network, max_vms, max_memory_mib FROM workspaces") == [
        ("demo", 1, 3, None)
    ]


def test_the_files_mode_does_not_depend_on_the_umask(state_dir: Path, tmp_path: Path) -> None:
    old = os.umask(0o777)
    try:
        done = issue(state_dir, tmp_path / "token")
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_an_output_that_exists_is_left_alone_and_nothing_is_issued(state_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "token"
    output.write_text("precious")
    done = issue(state_dir, output)
    assert (done.returncode, done.stdout) == (2, "")
    assert "exists" in done.stderr
    assert output.read_text() == "precious"
    assert not (state_dir / "service.db").exists()


@pytest.mark.parametrize("target", ["victim", "not-there"])
def test_a_symlink_as_output_is_not_followed(state_dir: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "token").symlink_to(tmp_path / target)
    assert issue(state_dir, tmp_path / "token").returncode == 2
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "not-there").exists()
    assert (tmp_path / "token").is_symlink()
    assert not (state_dir / "service.db").exists()


def test_an_output_that_cannot_be_made_leaves_nothing(state_dir: Path, tmp_path: Path) -> None:
    done = issue(state_dir, tmp_path / "no-such-directory" / "token")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert not (state_dir / "service.db").exists()


def test_a_full_file_system_leaves_neither_file_nor_row(state_dir: Path) -> None:
    done = issue(state_dir, Path("/dev/full"))
    assert done.returncode == 2
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
    )
    limited = run_process(limit + RUN, *issue_argv(state_dir, state_dir / "token"))
    assert limited.returncode == 7, limited.stderr
    assert "can't be written" in limited.stderr
    assert list(state_dir.iterdir()) == []


def test_a_refused_token_leaves_no_file(state_dir: Path, tmp_path: Path) -> None:
    assert issue(state_dir, tmp_path / "one").returncode == 0
    refused = issue(state_dir, tmp_path / "two", "--max-vms", 3)
    assert refused.returncode == 6
    assert "max_vms default" in refused.stderr
    assert issue(state_dir, tmp_path / "two", "--max-vms", 0).returncode == 2
    assert not (tmp_path / "two").exists()
    assert query(state_dir, "SELECT count(*) FROM tokens") == [(1,)]


@pytest.mark.parametrize("mode", [0o755, 0o710, None])
def test_a_state_directory_that_is_missing_or_open_to_others_is_refused_with_the_way_out(
    state_dir: Path, tmp_path: Path, mode: int | None
) -> None:
    if mode is None:
        state_dir.rmdir()
    else:
        state_dir.chmod(mode)
    done = issue(state_dir, tmp_path / "token")
    assert done.returncode == 7
    assert ("install -d -m 0700" if mode is None else "chmod 0700") in done.stderr
    assert not (tmp_path / "token").exists()


def test_policy_and_revocations_without_a_service(state_dir: Path, tmp_path: Path) -> None:
    token_id = issue(state_dir, tmp_path / "one").stdout.strip()
    done = run("set-workspace", "--state-dir", state_dir, "--workspace", "demo", "--max-vms", 2, "--allow-network")
    assert done.stdout.splitlines() == [
        "allow_network = yes",
        "max_vms = 2",
        "max_memory_mib = default",
        "max_storage_gib = default",
    ]
    done = run(
        "set-workspace", "--state-dir", state_dir, "--workspace", "demo", "--reset", "max-vms", "--no-allow-network"
    )
    assert done.stdout.splitlines()[:2] == ["allow_network = no", "max_vms = default"]
    done = run("revoke-token", "--state-dir", state_dir, "--id", token_id)
    assert done.stdout == f"revoked {token_id} of workspace demo\n"
    assert run("revoke-token", "--state-dir", state_dir, "--id", "tok-unknown").returncode == 5
    assert run("revoke-workspace", "--state-dir", state_dir, "--workspace", "demo").returncode == 0
    assert run("revoke-workspace", "--state-dir", state_dir, "--workspace", "other").returncode == 5
    assert issue(state_dir, tmp_path / "two").returncode == 7
    assert not (tmp_path / "two").exists()
    assert query(state_dir, "SELECT count(*) FROM tokens WHERE revoked_at IS NULL") == [(0,)]


async def test_commands_of_other_processes_do_not_disturb_a_service_that_writes(
    state_dir: Path, tmp_path: Path
) -> None:
    """The socket is not there (a service that starts or stops), so they work on the same database."""
    async with await Database.open(state_dir / "service.db") as db:
        before = db.revision()
        issuing = [
            asyncio.create_task(
                asyncio.to_thread(run_process, RUN, *issue_argv(state_dir, tmp_path / f"token-{number}"))
            )
            for number in range(3)
        ]
        own = 0
        while not all(task.done() for task in issuing):
            await db.write(lambda tx: tx.execute("INSERT OR REPLACE INTO meta VALUES ('beat', 'x')").rowcount)
            own += 1
            await asyncio.sleep(0.005)
        done = await asyncio.gather(*issuing)
        assert [one.returncode for one in done] == [0, 0, 0]
        assert own > 10
        assert db.revision() != before
        known = await db.read(lambda tx: tokens.of_workspace(tx, WorkspaceName("demo")))
        assert {token.token_id for token in known} == {TokenId(one.stdout.strip()) for one in done}

        seen = db.revision()
        assert (
            await asyncio.to_thread(run, "revoke-token", "--state-dir", state_dir, "--id", known[0].token_id)
        ).returncode == 0
        assert db.revision() != seen


def test_a_command_killed_between_file_and_row_leaves_a_token_that_opens_nothing(
    state_dir: Path, tmp_path: Path
) -> None:
    assert issue(state_dir, tmp_path / "first").returncode == 0
    output = tmp_path / "killed"
    with closing(sqlite3.connect(state_dir / "service.db", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        process = subprocess.Popen([sys.executable, "-c", RUN, *issue_argv(state_dir, output)])
        try:
            deadline = time.monotonic() + 30
            while not (output.exists() and output.read_text().endswith("\n")):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait(10)
    assert query(state_dir, "PRAGMA integrity_check") == [("ok",)]
    assert query(state_dir, "SELECT digest FROM tokens") == [(digest_of((tmp_path / "first").read_text().strip()),)]
    assert issue(state_dir, tmp_path / "last").returncode == 0


class Stops:
    def __init__(self) -> None:
        self.of: list[str] = []

    async def __call__(self, workspace: WorkspaceName) -> int:
        self.of.append(workspace)
        return 2


@asynccontextmanager
async def service(state_dir: Path, *, group: str = "no-such-group") -> AsyncIterator[tuple[Database, Stops]]:
    """As much of the service as these commands meet: its database and its socket where they look for it."""
    tag = tag_of(ensure_instance_id(state_dir))
    path = socket_path(RUN_DIR, tag)
    stops = Stops()
    async with await Database.open(state_dir / "service.db") as db:
        admin = Administration(db, SystemClock(), stop=stops, about={"state_dir": str(state_dir)})
        server = LocalSocket(path, admin.call, group=group)
        await server.start()
        try:
            yield db, stops
        finally:
            await server.close()
            path.parent.rmdir()


@pytest.mark.needs("root")
async def test_beside_a_service_commands_go_through_its_socket(state_dir: Path, tmp_path: Path) -> None:
    async with service(state_dir) as (db, stops):
        # A database that only the service can still reach shows which way the commands take.
        (state_dir / "service.db").rename(state_dir / "moved.db")
        done = await asyncio.to_thread(issue, state_dir, tmp_path / "token")
        assert done.returncode == 0, done.stderr
        assert not (state_dir / "service.db").exists()
        # `write`, because its connection is the one that surely was there before the move.
        known = await db.write(lambda tx: tokens.of_workspace(tx, WorkspaceName("demo")))
        assert [token.digest for token in known] == [digest_of((tmp_path / "token").read_text().strip())]
        refused = await asyncio.to_thread(issue, state_dir, tmp_path / "other", "--max-vms", 3)
        assert (refused.returncode, (tmp_path / "other").exists()) == (6, False)
        done = await asyncio.to_thread(
            run, "revoke-workspace", "--state-dir", state_dir, "--workspace", "demo", "--stop"
        )
        assert done.stdout.splitlines()[1] == "ended 2 machines; none of this workspace runs"
        assert stops.of == ["demo"]
        (state_dir / "moved.db").rename(state_dir / "service.db")


AS_MEMBER = """
import json, os, sys
# Read while we still may: the interpreter may live where only root gets to.
import asyncio, sqlite3, typer.rich_utils
import microvm_mcp.cli.admin, microvm_mcp.host.instance, microvm_mcp.host.cgroup, microvm_mcp.service.admin
import microvm_mcp.transport.local
from microvm_mcp.cli.main import main
uid, groups = int(sys.argv[1]), json.loads(sys.argv[2])
os.setgroups(groups); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
sys.argv = ["microvm-mcp", *sys.argv[3:]]
main()
"""


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory of the member's own, where pytest's are closed to other users."""
    path = Path(tempfile.mkdtemp(prefix="microvm-member-", dir="/tmp"))
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.needs("root")
async def test_a_member_of_the_group_administers_without_looking_into_the_state_directory(
    state_dir: Path, open_dir: Path
) -> None:
    gid = grp.getgrnam(SOME_GROUP).gr_gid

    def run_as(groups: list[int], name: str) -> subprocess.CompletedProcess[str]:
        return run_process(AS_MEMBER, str(NOBODY), json.dumps(groups), *issue_argv(state_dir, open_dir / name))

    async with service(state_dir, group=SOME_GROUP) as (db, _):
        stranger = await asyncio.to_thread(run_as, [5], "stranger")
        assert (stranger.returncode, (open_dir / "stranger").exists()) == (4, False), stranger.stderr
        member = await asyncio.to_thread(run_as, [gid], "member")
        assert member.returncode == 0, member.stderr
        output = open_dir / "member"
        assert (output.stat().st_uid, stat.S_IMODE(output.stat().st_mode)) == (NOBODY, 0o600)
        known = await db.read(lambda tx: tokens.of_workspace(tx, WorkspaceName("demo")))
        assert [token.digest for token in known] == [digest_of(output.read_text().strip())]


async def make_machine(state_dir: Path, *, slot: int | None, pid: int | None, ticks: int | None) -> None:
    async with await Database.open(state_dir / "service.db") as db:
        await db.write(lambda tx: vms.insert(tx, a_vm(1, slot=slot)))
        await db.write(
            lambda tx: vms.move(
                tx,
                VmId(a_vm(1).vm_id),
                expect=VmState.CREATING,
                to=VmState.RUNNING,
                now=1.0,
                vmm_pid=pid,
                vmm_started_ticks=ticks,
            )
        )


def started_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def revoke_and_stop(state_dir: Path, workspace: str = "demo") -> Done:
    return run("revoke-workspace", "--state-dir", state_dir, "--workspace", workspace, "--stop")


def test_stop_without_a_service_is_refused_while_a_machine_lives_but_tokens_die(
    state_dir: Path, tmp_path: Path
) -> None:
    for workspace in ("demo", "other"):
        assert issue(state_dir, tmp_path / workspace, workspace=workspace).returncode == 0
    vmm = subprocess.Popen(["sleep", "60"])
    try:
        asyncio.run(make_machine(state_dir, slot=0, pid=vmm.pid, ticks=started_ticks(vmm.pid)))
        done = revoke_and_stop(state_dir)
        assert done.returncode == 11
        assert "microvm-mcp serve" in done.stderr
        assert query(state_dir, "SELECT revoked_at IS NULL FROM workspaces WHERE name = 'demo'") == [(0,)]
        assert vmm.poll() is None
        # Another workspace has no machine to wait for.
        assert revoke_and_stop(state_dir, "other").returncode == 0
    finally:
        vmm.kill()
        vmm.wait()
    done = revoke_and_stop(state_dir)
    assert done.stdout.splitlines()[1] == "ended 0 machines; none of this workspace runs"


def test_a_process_that_only_got_the_same_pid_is_no_machine(state_dir: Path, tmp_path: Path) -> None:
    assert issue(state_dir, tmp_path / "token").returncode == 0
    asyncio.run(make_machine(state_dir, slot=0, pid=os.getpid(), ticks=started_ticks(os.getpid()) - 1))
    assert revoke_and_stop(state_dir).returncode == 0


@pytest.mark.needs("cgroup2")
def test_a_machine_whose_pid_was_never_recorded_is_found_by_its_cgroup(state_dir: Path, tmp_path: Path) -> None:
    assert issue(state_dir, tmp_path / "token").returncode == 0
    tag = tag_of(ensure_instance_id(state_dir))
    mount = cgroup.find_mount()
    assert mount is not None
    group = cgroup.parent(mount, tag)
    leaf = group / "0"
    leaf.mkdir(parents=True)
    vmm = subprocess.Popen(["sleep", "60"])
    try:
        (leaf / "cgroup.procs").write_text(str(vmm.pid))
        asyncio.run(make_machine(state_dir, slot=Slot(0), pid=None, ticks=None))
        assert revoke_and_stop(state_dir).returncode == 11
    finally:
        vmm.kill()
        vmm.wait()
        leaf.rmdir()
        group.rmdir()
    assert revoke_and_stop(state_dir).returncode == 0


def test_an_unreadable_instance_file_is_an_error_not_a_second_instance(state_dir: Path, tmp_path: Path) -> None:
    (state_dir / "instance").write_text(secrets.token_hex(3))
    done = issue(state_dir, tmp_path / "token")
    assert done.returncode == 7
    assert "no instance id" in done.stderr
    assert not (tmp_path / "token").exists()
