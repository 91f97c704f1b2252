"""Firecracker's CONNECT handshake, pure and against a small local server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from microvm_mcp.link.dial import DialFailed, dialer, parse_connect_answer, render_connect


def test_the_request_names_the_port() -> None:
    assert render_connect(1024) == b"CONNECT 1024\n"


def test_an_ok_line_names_the_port_of_the_host() -> None:
    assert parse_connect_answer(b"OK 1073741824\n") == 1073741824


@pytest.mark.parametrize(
    "line", [b"", b"OK\n", b"OK \n", b"OK x\n", b"ok 5\n", b"OK 5", b"OK 5\n\n", b"OK 12345678901\n", b"\xff\n"]
)
def test_everything_else_is_a_failure(line: bytes) -> None:
    with pytest.raises(DialFailed):
        parse_connect_answer(line)


async def serve(path: Path, answer: bytes) -> asyncio.Server:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(answer if line == b"CONNECT 1024\n" else b"unexpected")
        await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(talk, str(path))


async def test_what_follows_the_ok_line_is_the_guests(tmp_path: Path) -> None:
    async with await serve(tmp_path / "vsock", b"OK 5\nfirst bytes"):
        reader, writer = await dialer("vsock_uds", tmp_path / "vsock", 1024)()
        assert await reader.read() == b"first bytes"
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("answer", [b"", b"NO\n", b"x" * 10_000])
async def test_a_refused_port_is_a_failed_dial(tmp_path: Path, answer: bytes) -> None:
    async with await serve(tmp_path / "vsock", answer):
        with pytest.raises(DialFailed):
            await dialer("vsock_uds", tmp_path / "vsock", 1024)()


@pytest.mark.parametrize("kind", ["unix", "vsock_uds"])
async def test_nobody_there_is_a_failed_dial(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DialFailed):
        await dialer(kind, tmp_path / "none", 1024)()  # type: ignore[arg-type]
