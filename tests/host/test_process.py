"""The launcher and the processes it makes, seen from outside through /proc."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from microvm_mcp.host import cgroup, network, process
from tests.support import xfs
from tests.support.confined import Place, inode, look_at, place

pytestmark = pytest.mark.needs("root", "netns", "cgroup2")

SLEEP = ("/usr/bin/sleep", "1000")
SHELL = "/bin/sh"


@pytest.fixture
async def here() -> AsyncIterator[Place]:
    async with place() as made:
        yield made


def plan(here: Place, *argv: str) -> process.Plan:
    return process.Plan(
        argv=argv,
        uid=here.uid,
        gid=here.uid,
        output=here.runtime_dir / "output",
        cgroup=here.cgroup,
        netns=network.path(here.netns),
    )


async def said(here: Place, script: str) -> str:
    """What a confined shell prints for `script`."""
    launched = await process.launch(plan(here, SHELL, "-c", script), timeout_s=20)
    async with asyncio.timeout(20):
        await launched.wait()
    return launched.output()


def exists(path: Path) -> bool:
    return path.exists()


async def test_a_launched_program_has_nothing_but_what_its_plan_names(here: Place) -> None:
    read, write = os.pipe()
    launched = await process.launch(
        replace(plan(here, *SLEEP), descriptors={9: write}, limits={"NOFILE": 77}, tap=process.Tap("tap0", 5)),
        timeout_s=20,
    )
    os.close(read)
    os.close(write)
    seen = look_at(launched.pid)
    (fields,) = seen.threads
    assert fields["Uid"].split() == [str(here.uid)] * 4
    assert fields["Gid"].split() == [str(here.uid)] * 4
    assert fields["Groups"] == ""
    for which in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[which], 16) == 0, which
    assert fields["NoNewPrivs"] == "1"
    assert fields["SigBlk"] == "0" * 16
    # 32 and 33 belong to the C library and come from whoever started the tests.
    assert int(fields["SigIgn"], 16) & 0x7FFFFFFF == 0
    assert cgroup.pids(here.cgroup) == (launched.pid,)
    assert seen.own_namespaces == {"mnt", "ipc", "uts", "net"}
    assert seen.netns_inode == inode(network.path(here.netns))
    assert seen.session == launched.pid
    assert sorted(seen.descriptors) == [0, 1, 2, 5, 9]
    assert seen.descriptors[5] == "/dev/net/tun"
    assert seen.limits["Max core file size"] == ("0", "0")
    assert seen.limits["Max open files"] == ("77", "77")
    assert seen.environment == {"PATH", "LC_ALL", "HOME"}
    launched.signal(signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await launched.wait() == -signal.SIGKILL


async def test_a_launched_program_sees_little_of_the_host(here: Place) -> None:
    script = "ls /home /root /run /tmp /var /dev; echo --; ls /proc | grep -c '^[0-9]'; touch /tmp/x /dev/x 2>&1"
    listing, _, rest = (await said(here, script)).partition("--")
    names = [line for line in listing.split() if not line.endswith(":")]
    assert sorted(names) == ["full", "null", "random", "urandom", "zero"]
    # Itself and the two of its pipeline, not the hundred others of this host.
    assert int(rest.split()[0]) <= 4
    assert "cannot touch '/tmp/x'" in rest
    assert "cannot touch '/dev/x'" in rest


async def test_it_keeps_nothing_mounted_that_the_host_unmounts(here: Place, tmp_path: Path) -> None:
    odd = tmp_path / "with blank"
    odd.mkdir()
    with xfs.mounted(odd):
        launched = await process.launch(plan(here, *SLEEP), timeout_s=20)
        mounts = Path(f"/proc/{launched.pid}/mountinfo").read_text()
        assert not [line for line in mounts.splitlines() if line.split()[4].startswith("/tmp/")]
    launched.signal(signal.SIGKILL)
    async with asyncio.timeout(20):
        await launched.wait()


async def test_a_private_device_belongs_to_the_programs_user_alone(here: Place) -> None:
    launched = await process.launch(
        replace(plan(here, SHELL, "-c", "stat -c '%u %a' /dev/ptmx"), private_devices=("/dev/ptmx",)), timeout_s=20
    )
    async with asyncio.timeout(20):
        assert await launched.wait() == 0
    assert launched.output().split() == [str(here.uid), "600"]


async def test_it_finds_no_interface_but_loopback_and_its_tap(here: Place) -> None:
    interfaces = await said(
        here, "cat /proc/net/dev | tail -n +3 | cut -d: -f1; cat /proc/net/route /proc/net/if_inet6"
    )
    assert sorted(interfaces.split()[:2]) == ["lo", "tap0"]
    assert "fe80" not in interfaces
    assert "tap0" not in interfaces.partition("Iface")[2]


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"argv": ("/nonexistent",)}, "exec"),
        ({"cgroup": Path("/sys/fs/cgroup/nonexistent")}, "cgroup"),
        ({"netns": Path("/run/netns/nonexistent")}, "network namespace"),
        ({"tap": process.Tap("absent", 5)}, "tap"),
        ({"private_devices": ("/dev/nonexistent",)}, "mount namespace"),
        ({"limits": {"NONSENSE": 1}}, "privileges"),
    ],
)
async def test_a_launch_that_fails_names_its_step_and_leaves_nothing(
    here: Place, change: dict[str, object], stage: str
) -> None:
    with pytest.raises(process.LaunchFailed) as caught:
        await process.launch(replace(plan(here, *SLEEP), **change), timeout_s=20)  # type: ignore[arg-type]
    assert caught.value.stage == stage
    assert cgroup.pids(here.cgroup) == ()


async def test_a_flood_of_output_is_bounded_and_stops_nobody(here: Place) -> None:
    script = "head -c 3000000 /dev/zero | tr '\\0' x; exit 7"
    launched = await process.launch(plan(here, SHELL, "-c", script), timeout_s=20)
    async with asyncio.timeout(20):
        await launched.wait()
    assert 0 < len(launched.output()) <= process.OUTPUT_BYTES


async def test_every_waiter_hears_of_the_end(here: Place) -> None:
    launched = await process.launch(plan(here, SHELL, "-c", "read x < /dev/zero; exit 5"), timeout_s=20)
    waiters = [asyncio.create_task(launched.wait()) for _ in range(5)]
    await asyncio.sleep(0)
    launched.signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        assert set(await asyncio.gather(*waiters)) == {-signal.SIGTERM}
        assert await launched.wait() == -signal.SIGTERM


async def test_an_exit_status_is_told(here: Place) -> None:
    launched = await process.launch(plan(here, SHELL, "-c", "exit 5"), timeout_s=20)
    async with asyncio.timeout(20):
        assert await launched.wait() == 5


async def test_it_outlives_the_process_that_started_it(here: Place) -> None:
    starter = f"""
import asyncio, os
from pathlib import Path
from microvm_mcp.host import process
async def main():
    p = await process.launch(process.Plan(argv={SLEEP!r}, uid={here.uid}, gid={here.uid},
        output=Path({str(here.runtime_dir / "output")!r}), cgroup=Path({str(here.cgroup)!r})), timeout_s=20)
    print(p.pid, p.started_ticks, flush=True)
    os._exit(0)
asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", starter], capture_output=True, text=True, timeout=30, check=True
    )
    pid, ticks = map(int, done.stdout.split())
    adopted = process.adopt(pid, ticks, here.runtime_dir / "output")
    assert adopted is not None
    adopted.signal(signal.SIGKILL)
    async with asyncio.timeout(20):
        # Not our child: nobody can know how it ended.
        assert await adopted.wait() is None
    assert process.adopt(pid, ticks, here.runtime_dir / "output") is None


async def test_another_start_time_is_another_process(here: Place) -> None:
    launched = await process.launch(plan(here, *SLEEP), timeout_s=20)
    assert process.adopt(launched.pid, launched.started_ticks + 1, here.runtime_dir / "output") is None
    assert process.adopt(1 << 30, 1, here.runtime_dir / "output") is None
    assert process.started_ticks_of(launched.pid) == launched.started_ticks
    launched.signal(signal.SIGKILL)
    await launched.wait()
    assert process.started_ticks_of(launched.pid) is None


async def test_a_cancelled_launch_leaves_no_process(here: Place) -> None:
    task = asyncio.create_task(process.launch(plan(here, *SLEEP), timeout_s=20))
    while not exists(here.runtime_dir / "output"):
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await cgroup.kill(here.cgroup, timeout_s=20)
    assert cgroup.pids(here.cgroup) == ()


async def test_killing_the_cgroup_ends_children_that_left_the_session(here: Place) -> None:
    script = "setsid sleep 1000 & setsid sleep 1000 & sleep 1000"
    launched = await process.launch(plan(here, SHELL, "-c", script), timeout_s=20)
    async with asyncio.timeout(20):
        while len(cgroup.pids(here.cgroup)) < 3:
            await asyncio.sleep(0.005)
        await cgroup.kill(here.cgroup, timeout_s=20)
        await launched.wait()
    assert cgroup.pids(here.cgroup) == ()


def test_a_name_with_parentheses_does_not_shift_the_start_time() -> None:
    fields = " ".join(["S", *("0" for _ in range(18)), "4242", "9"])
    assert process.parse_started_ticks(f"1 (a) b) (c)) {fields}") == 4242
    assert process.parse_started_ticks(f"1 (z) {fields.replace('S', 'Z', 1)}") is None


async def test_a_process_that_cannot_be_held_is_ended_and_not_left_to_itself(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def no_descriptors(pid: int) -> int:
        started.append(pid)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptors)
    with pytest.raises(OSError, match="Too many"):
        await process.launch(plan(here, *SLEEP), timeout_s=20)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
