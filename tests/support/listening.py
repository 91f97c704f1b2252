"""The real service on the fake engine, listening on loopback, and programs run against it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from microvm_mcp.transport.application import build_app
from microvm_mcp.transport.doors import DoorSettings
from microvm_mcp.transport.server import listen, serve_http
from tests.support.door_rig import ALICE, rig


@dataclass(frozen=True)
class Listening:
    url: str
    token_file: Path

    async def run(
        self, *argv: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> tuple[int, bytes, bytes]:
        names = {"PATH": os.environ["PATH"], "MICROVM_URL": self.url, "MICROVM_TOKEN_FILE": str(self.token_file)}
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**names, **(env or {})},
        )
        try:
            async with asyncio.timeout(50):
                out, err = await process.communicate(stdin)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        assert ALICE.encode() not in out + err
        return process.returncode, out, err


@contextlib.asynccontextmanager
async def listening(tmp_path: Path) -> AsyncIterator[Listening]:
    token_file = tmp_path / "token"
    token_file.write_text(ALICE, encoding="ascii")
    token_file.chmod(0o600)
    listener = listen("127.0.0.1", 0)
    host = f"127.0.0.1:{listener.getsockname()[1]}"
    stop = asyncio.Event()
    async with rig(tmp_path) as behind:
        app = build_app(behind.service, DoorSettings(hosts=frozenset({host})))
        serving = asyncio.create_task(serve_http(app, listener, stop))
        try:
            yield Listening(f"http://{host}", token_file)
        finally:
            stop.set()
            await serving
