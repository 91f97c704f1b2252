"""Measures what the service adds to bare floors; see bench/run. Prints one line per figure."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.running import HttpDoor, RunningService, create_vm, execute, free_port, open_door, request_id

_UID_BASE = 1_900_000_000
_STATUS_CALLS = 1500


def show(name: str, values: list[float], unit: str, *, digits: int = 1) -> None:
    low, middle, high = min(values), statistics.median(values), max(values)
    print(
        f"{name}: median {middle:.{digits}f} {unit} (min {low:.{digits}f}, max {high:.{digits}f}, n {len(values)})"
    )


def show_ratios(name: str, ours: list[float], floors: list[float], bound: str) -> None:
    ratios = [one / other for one, other in zip(ours, floors, strict=True)]
    print(
        f"{name}: ratio {statistics.median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f},"
        f" {len(ratios)} interleaved pairs; wanted {bound})"
    )


async def measure_create(service: RunningService, token: str, image: Path, directory: Path, pairs: int) -> None:
    """Cold create to the first command's output, against booting the same image with the same line."""
    ours, floors = [], []
    async with open_door("http", service.url, token) as door:
        for _ in range(pairs):
            floors.append(floor_seconds(image, directory))
            start = time.perf_counter()
            vm = await create_vm(door)
            answer = await execute(door, vm, "echo ready", shell="plain")
            ours.append(time.perf_counter() - start)
            assert answer["stdout"] == "ready\n", answer
            await door.call("vm_destroy", vm_id=vm)
    show("floor: boot to one answer", floors, "s")
    show("create to first output", ours, "s")
    show_ratios("create / floor", ours, floors, "<= 1.25")


def floor_seconds(image: Path, directory: Path) -> float:
    return float(run_floor(image, directory)[0])


def run_floor(image: Path, directory: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "bench.floor", "--image", str(image), "--volume", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.splitlines()


def measure_channel(image: Path, directory: Path, rounds: int) -> None:
    """The part of `vm_exec` beyond the supervisor's own time that the bare channel costs without any service."""
    lines = run_floor(image, directory, "--exec", str(rounds))[1:]
    show("floor: true over the bare channel, beyond the supervisor's own time", [float(x[5:]) for x in lines], "ms")


def measure_exec(service: RunningService, token: str, vm: str, rounds: int) -> None:
    """What `vm_exec` of `true` costs beyond what the supervisor measures itself, for a cheap client."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    whole, beyond = [], []
    for _ in range(rounds):
        arguments = {
            "vm_id": vm,
            "request_id": request_id(),
            "command": "true",
            "shell": "plain",
            "wait_seconds": 45,
        }
        body = json.dumps(arguments).encode()
        start = time.perf_counter()
        connection.request("POST", "/v1/tools/vm_exec", body, headers)
        answer = json.loads(connection.getresponse().read())
        took = (time.perf_counter() - start) * 1000
        whole.append(took)
        beyond.append(took - answer["service_time_us"] / 1000)
    connection.close()
    show("vm_exec true, whole call", whole, "ms")
    show("vm_exec true, beyond the supervisor's own time", beyond, "ms")


def calls_per_second(port: int, token: str, body: bytes, calls: int) -> float:
    """One keep-alive connection, one call after the other, with the cheapest client there is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    start = time.perf_counter()
    for _ in range(calls):
        connection.request("POST", "/v1/tools/vm_status", body, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
    rate = calls / (time.perf_counter() - start)
    connection.close()
    return rate


def measure_status(service: RunningService, token: str, vm: str, pairs: int) -> None:
    port = free_port()
    plain = subprocess.Popen([sys.executable, "-m", "bench.plain", str(port)])
    body = json.dumps({"vm_id": vm}).encode()
    try:
        wait_for(lambda: calls_per_second(port, token, body, 200) > 0)
        calls_per_second(service.port, token, body, 200)
        ours, floors = [], []
        for _ in range(pairs):
            floors.append(calls_per_second(port, token, body, _STATUS_CALLS))
            ours.append(calls_per_second(service.port, token, body, _STATUS_CALLS))
    finally:
        plain.terminate()
        plain.wait(timeout=20)
    show("plain Starlette route", floors, "calls/s", digits=0)
    show("vm_status over HTTP", ours, "calls/s", digits=0)
    show_ratios("vm_status / plain route", ours, floors, ">= 0.6")


def wait_for(ready: Callable[[], bool], deadline_s: float = 30.0) -> None:
    until = time.monotonic() + deadline_s
    while True:
        try:
            if ready():
                return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def resident_mib(status: str) -> float:
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


async def measure_memory(service: RunningService, token: str, vm: str) -> None:
    assert service.process is not None
    own = resident_mib(Path(f"/proc/{service.process.pid}/status").read_text())
    find = "for s in /proc/[0-9]*; do grep -qa supervisor $s/cmdline 2>/dev/null && cat $s/status && break; done"
    async with open_door("http", service.url, token) as door:
        answer = await execute(door, vm, find, shell="plain")
    print(f"service with one machine: {own:.0f} MiB resident (wanted < 120)")
    print(f"supervisor: {resident_mib(answer['stdout']):.0f} MiB resident (wanted < 25)")


async def shared_machine(service: RunningService, token: str) -> str:
    async with open_door("http", service.url, token) as door:
        assert isinstance(door, HttpDoor)
        return await create_vm(door, request_id=request_id())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="on a reflinking file system")
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("what", nargs="*", default=["memory", "status", "exec", "create"])
    options = parser.parse_args()
    base: Path = options.directory / "service"
    base.mkdir(mode=0o700)
    rate: dict[str, object] = {"calls_per_minute": 1_000_000, "burst": 1_000_000}
    service = RunningService(base, options.image, _UID_BASE, tables={"rate_limit": rate})
    service.start()
    try:
        token = service.issue_token("bench")
        if set(options.what) - {"create"}:
            vm = asyncio.run(shared_machine(service, token))
            if "memory" in options.what:
                asyncio.run(measure_memory(service, token, vm))
            if "status" in options.what:
                measure_status(service, token, vm, options.pairs)
            if "exec" in options.what:
                measure_exec(service, token, vm, 3 * options.pairs)
            asyncio.run(destroy(service, token, vm))
        if "exec" in options.what:
            measure_channel(options.image, options.directory, 3 * options.pairs)
        if "create" in options.what:
            asyncio.run(measure_create(service, token, options.image, options.directory, options.pairs))
    finally:
        service.end()


async def destroy(service: RunningService, token: str, vm: str) -> None:
    async with open_door("http", service.url, token) as door:
        await door.call("vm_destroy", vm_id=vm)


if __name__ == "__main__":
    main()
