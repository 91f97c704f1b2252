"""Machines as a whole: isolation seen from the host, restarts of the service, deaths, neighbours, limits."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.running import (
    COMMAND,
    Door,
    RunningService,
    ToolError,
    create_vm,
    execute,
    finished,
    open_door,
    processes_of_uid,
    request_id,
    wait_gone,
    write_file,
)

pytestmark = [pytest.mark.needs("root", "qemu", "image", "reflink", "netns", "cgroup2"), pytest.mark.timeout(600)]

MakeService = Callable[..., RunningService]


def vmm_of(service: RunningService, vm_id: str) -> tuple[int, int]:
    """Pid and slot, from the row."""
    with closing(sqlite3.connect(service.state_dir / "service.db")) as db:
        row = db.execute("SELECT vmm_pid, slot FROM vms WHERE vm_id = ?", (vm_id,)).fetchone()
    return int(row[0]), int(row[1])


def status_of(pid: int, thread: int | None = None) -> dict[str, str]:
    where = Path(f"/proc/{pid}") if thread is None else Path(f"/proc/{pid}/task/{thread}")
    pairs = (line.partition(":") for line in (where / "status").read_text().splitlines())
    return {key: value.strip() for key, _, value in pairs}


async def test_vmm_is_confined_as_seen_from_the_host(service: RunningService, vm: str) -> None:
    pid, slot = vmm_of(service, vm)
    uid = service.uid_base + slot
    threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    assert threads
    for thread in threads:
        status = status_of(pid, thread)
        assert status["Uid"].split() == [str(uid)] * 4
        assert status["Gid"].split() == [str(uid)] * 4
        assert status["Groups"] == ""
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
    assert processes_of_uid(uid) == [pid]
    assert Path(f"/proc/{pid}/ns/net").stat().st_ino != Path("/proc/self/ns/net").stat().st_ino
    limits = Path(f"/proc/{pid}/limits").read_text()
    core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]
    assert os.getsid(pid) == pid
    assert f"microvm-{service.tag}" in Path(f"/proc/{pid}/cgroup").read_text()


async def test_machine_has_no_way_out(door: Door, vm: str) -> None:
    command = "timeout 5 bash -c 'exec 3<>/dev/tcp/192.0.2.1/80' 2>/dev/null; echo $?; ip route | grep -c default"
    answer = await execute(door, vm, command, shell="plain")
    status, routes = answer["stdout"].split()
    assert status != "0"
    assert routes == "0" or status in {"1", "124"}


async def test_guest_says_that_its_disk_is_full_and_recovers(own_service: MakeService) -> None:
    service = own_service("tiny")
    async with open_door("http", service.url, service.issue_token("disk")) as door:
        vm = await create_vm(door)
        full = await execute(door, vm, "dd if=/dev/zero of=fill bs=1M 2>&1; sync; echo done", shell="plain")
        if full["state"] == "running":
            await finished(door, vm, full["job_id"])
        with pytest.raises(ToolError) as refused:
            await write_file(door, vm, "more", b"x" * 100_000)
        assert refused.value.code == "resource_exhausted"
        assert "machine" in refused.value.message.lower()
        assert "host" not in refused.value.message.lower()
        await execute(door, vm, "rm fill; sync", shell="plain")
        assert (await write_file(door, vm, "more", b"x" * 100_000))["size"] == 100_000


async def test_two_machines_do_not_see_each_others_files(own_service: MakeService) -> None:
    service = own_service("tiny")
    async with open_door("mcp", service.url, service.issue_token("two")) as door:
        one, two = await asyncio.gather(create_vm(door), create_vm(door))
        await write_file(door, one, "secret", b"of one")
        with pytest.raises(ToolError) as missing:
            await door.call("vm_read_file", vm_id=two, path="secret")
        assert missing.value.code == "not_found"
        await write_file(door, two, "secret", b"of two")
        for vm, expected in ((one, b"of one"), (two, b"of two")):
            read = await door.call("vm_read_file", vm_id=vm, path="secret")
            assert base64.b64decode(read["content_base64"]) == expected


async def test_jobs_and_output_survive_three_kills_of_the_service(own_service: MakeService) -> None:
    service = own_service("tiny")
    token = service.issue_token("restart")
    counting = 'i=0; while :; do i=$((i+1)); echo "$i $$"; sleep 0.2; done'
    async with open_door("http", service.url, token) as door:
        vm = await create_vm(door)
        key = request_id()
        job = (await door.call("vm_exec", vm_id=vm, request_id=key, command=counting))["job_id"]
    pid, _ = vmm_of(service, vm)
    read, cursor = "", {"stdout": 0, "stderr": 0}
    for _cycle in range(3):
        service.kill()
        assert Path(f"/proc/{pid}").exists()
        service.start()
        async with open_door("http", service.url, token) as door:
            assert (await door.call("vm_status", vm_id=vm))["state"] == "running"
            again = await door.call("vm_exec", vm_id=vm, request_id=key, command=counting)
            assert again["job_id"] == job
            page = await door.call("vm_job_output", vm_id=vm, job_id=job, cursor=cursor, wait_seconds=10)
            read, cursor = read + page["stdout"], page["next_cursor"]
            assert (await execute(door, vm, "echo new connection", shell="plain"))["stdout"] == "new connection\n"
    assert vmm_of(service, vm)[0] == pid
    numbers, pids = zip(*(line.split() for line in read.splitlines()), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert len(set(pids)) == 1
    async with open_door("http", service.url, token) as door:
        assert (await door.call("vm_job_cancel", vm_id=vm, job_id=job))["state"] == "cancelled"


async def test_dead_vmm_fails_its_machine_and_no_other(own_service: MakeService) -> None:
    service = own_service("tiny")
    async with open_door("http", service.url, service.issue_token("death")) as door:
        victim, other = await asyncio.gather(create_vm(door), create_vm(door))
        job = (await door.call("vm_exec", vm_id=victim, request_id=request_id(), command="sleep 3000"))["job_id"]
        pid, _ = vmm_of(service, victim)
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        for _ in range(100):
            status = await door.call("vm_status", vm_id=victim)
            if status["state"] != "running":
                break
            await asyncio.sleep(0.1)
        assert status["state"] == "failed"
        assert status["failure"]["reason"]
        assert [entry["state"] for entry in status["jobs"] if entry["job_id"] == job] == ["lost"]
        with pytest.raises(ToolError) as refused:
            await execute(door, victim, "true")
        assert refused.value.code == "failed_precondition"
        assert (await execute(door, other, "echo fine", shell="plain"))["stdout"] == "fine\n"
        await door.call("vm_destroy", vm_id=victim)
        assert (await door.call("vm_destroy", vm_id=victim))["state"] == "destroyed"


async def test_killed_instance_leaves_its_neighbour_alone(own_service: MakeService) -> None:
    one, two = own_service("tiny"), own_service("tiny")
    async with open_door("http", two.url, two.issue_token("b")) as theirs:
        kept = await create_vm(theirs)
        async with open_door("http", one.url, one.issue_token("a")) as ours:
            await create_vm(ours)
        pid, _ = vmm_of(two, kept)
        one.kill()
        assert (await execute(theirs, kept, "echo during", shell="plain"))["stdout"] == "during\n"
        one.start()
        assert (await execute(theirs, kept, "echo after", shell="plain"))["stdout"] == "after\n"
        assert vmm_of(two, kept)[0] == pid


async def test_destroy_gives_everything_back(own_service: MakeService) -> None:
    service = own_service("tiny")
    async with open_door("http", service.url, service.issue_token("give-back")) as door:
        for _cycle in range(3):
            vm = await create_vm(door)
            pid, slot = vmm_of(service, vm)
            name = f"mvm-{service.tag}-{slot}"
            assert Path(f"/run/netns/{name}").exists()
            assert (await door.call("vm_destroy", vm_id=vm))["state"] == "destroyed"
            assert not Path(f"/proc/{pid}").exists()
            assert not Path(f"/run/netns/{name}").exists()
            assert list((service.state_dir / "machines").iterdir()) == []
            assert list((service.base / "jail").rglob("*.sock")) == []


async def test_revoked_workspace_is_stopped_and_its_tokens_are_dead(own_service: MakeService) -> None:
    service = own_service("tiny")
    token = service.issue_token("revoked")
    async with open_door("http", service.url, token) as door:
        vm = await create_vm(door)
        pid, _ = vmm_of(service, vm)
        done = service.run(
            "revoke-workspace", "--state-dir", str(service.state_dir), "--workspace", "revoked", "--stop"
        )
        assert done.returncode == 0, done.stderr
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(ToolError) as refused:
            await door.call("vm_list")
        assert refused.value.code == "unauthenticated"


def refused_start(config: Path) -> str:
    """What `serve` says on stderr where it must not start."""
    argv = [str(COMMAND), "serve", "--config", str(config)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


def other_config(service: RunningService, *lines: str, uid_base: int) -> Path:
    """The service's own configuration with another state directory beside it, other users, and `lines` before."""
    text = (service.base / "service.toml").read_text()
    text = text.replace(str(service.state_dir), str(service.base / "other"))
    text = text.replace(f"uid_base = {service.uid_base}", f"uid_base = {uid_base}")
    path = service.base / "other.toml"
    path.write_text("\n".join([*lines, text]))
    return path


def test_second_service_on_one_state_directory_is_refused(service: RunningService) -> None:
    assert str(service.state_dir) in refused_start(service.base / "service.toml")


def test_second_instance_with_users_of_the_first_is_refused(service: RunningService) -> None:
    said = refused_start(other_config(service, uid_base=service.uid_base + 100))
    assert service.tag in said
    assert "uid_base" in said


def test_image_that_does_not_match_its_digest_is_refused(service: RunningService) -> None:
    config = other_config(service, f'image_sha256 = "{"0" * 64}"', uid_base=service.uid_base + 500_000)
    said = refused_start(config)
    assert "image_sha256" in said
    assert "digest" in said
