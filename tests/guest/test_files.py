"""Files of the real supervisor on a real file system: links, special files, permissions, full disks, races."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from microvm_mcp.guest.options import GID, UID
from microvm_mcp.link.client import LinkClient
from microvm_mcp.model import JobId, JobRequest, RequestId
from tests.contract.link_suite import SOON, refused
from tests.support.supervisor import RunningSupervisor, running_supervisor

pytestmark = pytest.mark.needs("root", "cgroup2")


@pytest.fixture
def supervisor() -> Iterator[RunningSupervisor]:
    with running_supervisor() as running:
        yield running


@pytest.fixture
def workspace(supervisor: RunningSupervisor) -> Path:
    return supervisor.workspace


@pytest.fixture
async def link(supervisor: RunningSupervisor) -> AsyncIterator[LinkClient]:
    link = supervisor.link()
    yield link
    await link.close()


async def write(link: LinkClient, path: str, data: bytes = b"new", *, offset: int | None = None) -> int:
    return (await link.write_file(path, data, offset=offset, mode=None, deadline_s=SOON)).size


async def read(link: LinkClient, path: str) -> bytes:
    return (await link.read_file(path, offset=0, length=131_072, deadline_s=SOON)).data


def own(path: Path) -> Path:
    os.chown(path, UID, GID, follow_symlinks=False)
    return path


async def test_what_is_written_belongs_to_the_user(link: LinkClient, workspace: Path) -> None:
    await write(link, "a/b/file")
    for path, mode in ((workspace / "a", 0o755), (workspace / "a/b", 0o755), (workspace / "a/b/file", 0o644)):
        status = path.stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (UID, GID, mode)


async def test_absolute_paths_under_the_workspace_are_taken(link: LinkClient, workspace: Path) -> None:
    await write(link, f"{workspace}/file", b"x")
    assert await read(link, f"{workspace}//./file") == b"x"


@pytest.mark.parametrize(
    "path", ["link", "dir/link", "dirlink/secret", "dirlink/new", "dir/up/secret", "loop", "self"]
)
async def test_no_component_may_be_a_symbolic_link(
    supervisor: RunningSupervisor, link: LinkClient, workspace: Path, path: str
) -> None:
    outside = supervisor.base / "outside"
    outside.mkdir(mode=0o777)
    secret = outside / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    own(outside)
    (workspace / "dir").mkdir()
    (workspace / "real").mkdir()
    (workspace / "link").symlink_to(secret)
    (workspace / "dir/link").symlink_to("../../outside/secret")
    (workspace / "dirlink").symlink_to(outside)
    (workspace / "dir/up").symlink_to("../../outside")
    (workspace / "loop").symlink_to("loop")
    (workspace / "self").symlink_to("real")
    assert (await refused(read(link, path))).code == "symlink"
    for offset in (None, 0, 6):
        assert (await refused(write(link, path, offset=offset))).code == "symlink"
    assert secret.read_text() == "secret"
    assert sorted(entry.name for entry in outside.iterdir()) == ["secret"]
    assert (workspace / "link").is_symlink()


async def test_a_job_may_not_start_behind_a_symbolic_link(link: LinkClient, workspace: Path) -> None:
    (workspace / "link").symlink_to("/tmp")
    job = JobRequest(JobId("job-1"), RequestId("r"), "pwd", cwd="link")
    assert (await refused(link.start_job(job, wait_s=5, deadline_s=SOON))).code == "symlink"


async def test_special_files_are_refused_without_blocking(link: LinkClient, workspace: Path) -> None:
    os.mkfifo(workspace / "fifo")
    os.chown(workspace / "fifo", UID, GID)
    os.mknod(workspace / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(workspace / "socket"))
        (workspace / "directory").mkdir()
        for name in ("fifo", "device", "socket", "directory"):
            assert (await refused(read(link, name))).code == "not_regular"
            for offset in (None, 0, 3):
                assert (await refused(write(link, name, offset=offset))).code == "not_regular"
    assert stat.S_ISFIFO((workspace / "fifo").stat().st_mode)
    assert stat.S_ISCHR((workspace / "device").stat().st_mode)


async def test_files_of_others_are_as_closed_as_to_the_user(link: LinkClient, workspace: Path) -> None:
    secret = workspace / "roots"
    secret.write_text("root only")
    secret.chmod(0o600)
    closed = workspace / "closed"
    closed.mkdir(mode=0o700)
    assert (await refused(read(link, "roots"))).code == "denied"
    assert (await refused(write(link, "roots", offset=9))).code == "denied"
    assert (await refused(read(link, "closed/file"))).code == "denied"
    assert (await refused(write(link, "closed/file"))).code == "denied"
    assert secret.read_text() == "root only"


async def test_a_hard_link_to_a_file_of_root_gives_no_more_than_the_user_has(
    supervisor: RunningSupervisor, link: LinkClient, workspace: Path
) -> None:
    theirs = supervisor.base / "theirs"
    theirs.write_text("root's")
    theirs.chmod(0o644)
    os.link(theirs, workspace / "hard")
    assert (await refused(write(link, "hard", offset=6))).code == "denied"
    await write(link, "hard", b"mine")
    assert theirs.read_text() == "root's"
    assert (workspace / "hard").stat().st_uid == UID


async def test_a_write_replaces_the_file_and_not_its_bytes(link: LinkClient, workspace: Path) -> None:
    await write(link, "file", b"old content")
    before = (workspace / "file").stat().st_ino
    with open(workspace / "file", "rb") as reader:
        await write(link, "file", b"new")
        assert reader.read() == b"old content"
    assert (workspace / "file").stat().st_ino != before
    assert sorted(entry.name for entry in workspace.iterdir()) == ["file"]


async def test_an_extension_keeps_the_file(link: LinkClient, workspace: Path) -> None:
    await write(link, "file", b"abc")
    before = (workspace / "file").stat().st_ino
    assert await write(link, "file", b"def", offset=3) == 6
    assert (workspace / "file").read_bytes() == b"abcdef"
    assert (workspace / "file").stat().st_ino == before


async def test_set_user_id_bits_do_not_survive_a_write(link: LinkClient, workspace: Path) -> None:
    await write(link, "file")
    (workspace / "file").chmod(0o4755)
    written = await link.write_file("file", b"x", offset=None, mode=None, deadline_s=SOON)
    assert written.mode == 0o755


@pytest.mark.needs("reflink")
async def test_a_full_guest_disk_is_told_and_changes_nothing(
    supervisor: RunningSupervisor, link: LinkClient
) -> None:
    small = supervisor.workspace / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=64k,uid={UID},gid={GID}", "tmpfs", small], check=True)
    try:
        await write(link, "small/file", bytes(30_000))
        assert (await refused(write(link, "small/file", bytes(120_000)))).code == "no_space"
        error = await refused(write(link, "small/file", bytes(120_000), offset=30_000))
        assert error.code == "no_space"
        assert "guest" in str(error)
        assert (small / "file").stat().st_size == 30_000
        assert sorted(entry.name for entry in small.iterdir()) == ["file"]
        assert await write(link, "small/file", bytes(1000), offset=30_000) == 31_000
    finally:
        subprocess.run(["umount", small], check=True)


async def test_links_swapped_in_during_the_walk_lead_nowhere(
    supervisor: RunningSupervisor, link: LinkClient, workspace: Path
) -> None:
    """A job keeps exchanging a directory for a link to one outside while files are written through it."""
    outside = supervisor.base / "outside"
    outside.mkdir()
    own(outside)
    swap = (
        f"mkdir real; ln -s {outside} fake; while :; do"
        " mv -T real dir 2>/dev/null; mv -T dir real; mv -T fake dir; mv -T dir fake; done"
    )
    job = JobRequest(JobId("job-1"), RequestId("r"), swap, shell="plain")
    await link.start_job(job, wait_s=0, deadline_s=SOON)
    outcomes = set()
    for number in range(300):
        try:
            await write(link, f"dir/file-{number}", b"x")
            outcomes.add("written")
        except Exception as error:
            outcomes.add(getattr(error, "code", "?"))
    await link.cancel_job(JobId("job-1"), deadline_s=SOON)
    assert outcomes <= {"written", "symlink", "not_found", "invalid"}
    assert list(outside.iterdir()) == []


async def test_concurrent_writers_of_one_file_leave_one_whole_content(link: LinkClient, workspace: Path) -> None:
    contents = [bytes([65 + n]) * 100_000 for n in range(8)]
    await asyncio.gather(*(write(link, "file", content) for content in contents))
    assert (workspace / "file").read_bytes() in contents
    assert sorted(entry.name for entry in workspace.iterdir()) == ["file"]
