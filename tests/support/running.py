"""The real service as its own process, started by its own command line, and clients for both of its doors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

COMMAND = Path(sys.executable).with_name("microvm-mcp")
START_S = 90.0
"""The first start on a host boots a probe guest and hashes the image."""


class ToolError(Exception):
    """A tool refused. Equal over both doors."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['code']}: {error['message']}")
        self.code: str = error["code"]
        self.message: str = error["message"]
        self.details: dict[str, Any] = error.get("details", {})


class Door(Protocol):
    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]: ...


class HttpDoor:
    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        answer = await self._http.post(f"/v1/tools/{tool}", json=arguments)
        body: dict[str, Any] = answer.json()
        if answer.status_code != 200:
            raise ToolError(body["error"])
        return body


class McpDoor:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = await self._client.call_tool(tool, arguments)
        text = json.loads(result.content[0].text)  # type: ignore[union-attr]
        if result.is_error:
            assert result.structured_content is None
            raise ToolError(text["error"])
        assert result.structured_content == text
        return dict(result.structured_content)


DoorName = Literal["http", "mcp"]


@contextlib.asynccontextmanager
async def open_door(name: DoorName, url: str, token: str) -> AsyncIterator[Door]:
    headers = {"Authorization": f"Bearer {token}"}
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, headers=headers, timeout=60))
        if name == "http":
            yield HttpDoor(http)
        else:
            transport = streamable_http_client(f"{url}/mcp", http_client=http)
            yield McpDoor(await stack.enter_async_context(Client(transport)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class RunningService:
    """One instance. `start` returns when it answers; `stop` asks, `kill` does not."""

    base: Path
    image: Path
    uid_base: int
    settings: dict[str, object] = field(default_factory=dict)
    tables: dict[str, dict[str, object]] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def state_dir(self) -> Path:
        return self.base / "state"

    @property
    def log(self) -> str:
        return (self.base / "service.log").read_text(encoding="utf-8", errors="replace")

    @property
    def tag(self) -> str:
        return (self.state_dir / "instance").read_text(encoding="ascii")[:8]

    def write_config(self) -> Path:
        keys: dict[str, object] = {
            "state_dir": str(self.state_dir),
            "jail_dir": str(self.base / "jail"),
            "image_dir": str(self.image),
            "uid_base": self.uid_base,
            **self.settings,
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in keys.items()]
        config = self.base / "service.toml"
        tables: dict[str, dict[str, object]] = {"listen": {"port": self.port}, **self.tables}
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
        config.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return config

    def start(self) -> None:
        config = self.write_config()
        with (self.base / "service.log").open("ab") as log:
            self.process = subprocess.Popen(
                [COMMAND, "serve", "--config", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}/healthz", timeout=5).close()
                return
            assert self.process.poll() is None, f"the service ended at its start:\n{self.log[-4000:]}"
            assert time.monotonic() < deadline, f"the service does not answer:\n{self.log[-4000:]}"
            time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        self.process = None
        return status

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)

    def issue_token(self, workspace: str, *options: str) -> str:
        file = self.base / f"token-{secrets.token_hex(4)}"
        state = ("--state-dir", str(self.state_dir))
        done = self.run(
            "issue-token", *state, "--workspace", workspace, "--output", str(file), "--ttl", "3600", *options
        )
        assert done.returncode == 0, done.stderr
        return file.read_text(encoding="ascii").strip()

    def end(self) -> None:
        """Destroy every machine, then end the service."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        for workspace in sorted(self._workspaces()):
            token = self.issue_token(workspace)
            asyncio.run(self._destroy_all(token))
        self.stop()

    def _workspaces(self) -> set[str]:
        with contextlib.closing(sqlite3.connect(self.state_dir / "service.db")) as db:
            rows = db.execute(
                "SELECT DISTINCT vms.workspace FROM vms JOIN workspaces ON workspaces.name = vms.workspace"
                " WHERE vms.state != 'destroyed' AND workspaces.revoked_at IS NULL"
            )
            return {str(row[0]) for row in rows}

    async def _destroy_all(self, token: str) -> None:
        async with open_door("http", self.url, token) as door:
            for vm in (await door.call("vm_list"))["vms"]:
                await door.call("vm_destroy", vm_id=vm["vm_id"])


def request_id() -> str:
    return f"test-{secrets.token_hex(6)}"


async def create_vm(door: Door, **arguments: Any) -> str:
    arguments.setdefault("request_id", request_id())
    vm = await door.call("vm_create", **arguments)
    while vm["state"] == "creating":
        vm = await door.call("vm_create", **arguments)
    assert vm["state"] == "running", vm
    return str(vm["vm_id"])


async def execute(door: Door, vm_id: str, command: str, **arguments: Any) -> dict[str, Any]:
    """Run to the end; the answer of vm_exec, or of the last page where the end took longer."""
    arguments = {"request_id": request_id(), "wait_seconds": 45, **arguments}
    return await door.call("vm_exec", vm_id=vm_id, command=command, **arguments)


async def finished(door: Door, vm_id: str, job_id: str, *, deadline_s: float = 120) -> dict[str, Any]:
    """The job's status once it is final."""
    until = time.monotonic() + deadline_s
    while True:
        status = await door.call("vm_job_status", vm_id=vm_id, job_id=job_id)
        if status["state"] != "running":
            return status
        assert time.monotonic() < until, status
        await asyncio.sleep(0.2)


async def write_file(door: Door, vm_id: str, path: str, data: bytes, **arguments: Any) -> dict[str, Any]:
    content = base64.b64encode(data).decode("ascii")
    return await door.call("vm_write_file", vm_id=vm_id, path=path, content_base64=content, **arguments)


def processes_of_uid(uid: int) -> list[int]:
    """Pids on this host whose real UID is `uid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid or f"Uid:\t{uid}\t" in (entry / "status").read_text():
                    found.append(int(entry.name))
    return found


def wait_gone(pid: int, *, deadline_s: float = 30) -> None:
    until = time.monotonic() + deadline_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.05)


@contextlib.contextmanager
def running(base: Path, image: Path, uid_base: int, **settings: object) -> Iterator[RunningService]:
    base.mkdir(parents=True, mode=0o700)
    service = RunningService(base, image, uid_base, settings)
    service.start()
    try:
        yield service
    finally:
        service.end()


def volume() -> Path:
    """A directory on a reflink volume, from scripts/test."""
    where = os.environ.get("MICROVM_TEST_DIR")
    assert where, "MICROVM_TEST_DIR names no reflink volume: use scripts/test"
    return Path(where)
