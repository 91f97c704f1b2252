"""A control socket whose other end is silent, broken or hostile: every call ends, in time, as `QmpFailed`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from microvm_mcp.vmm.qemu.qmp import MAX_PENDING, Qmp, QmpFailed

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}, "capabilities": []}}
SOON_S = 0.3


@asynccontextmanager
async def peer(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Path]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.close()

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "qmp.sock"
        async with await asyncio.start_unix_server(serve, path):
            yield path


def line(document: object) -> bytes:
    return json.dumps(document).encode() + b"\n"


async def answer(streams: Streams, result: object) -> None:
    """Answers the next command with `result` as its return value."""
    reader, writer = streams
    request = json.loads(await reader.read(65536))
    # The first command, which ends the negotiation, has no id.
    writer.write(line({"return": result} | ({"id": request["id"]} if "id" in request else {})))


async def greeted(streams: Streams) -> None:
    streams[1].write(line(GREETING))
    await answer(streams, {})


async def idle(reader: asyncio.StreamReader) -> None:
    await reader.read()


async def test_a_peer_without_a_greeting_is_given_up_in_time() -> None:
    async with peer(lambda reader, _: idle(reader)) as path:
        with pytest.raises(QmpFailed, match="no greeting"):
            await Qmp.connect(path, timeout_s=SOON_S)


@pytest.mark.parametrize(
    "greeting", [b"", b"garbage\n", b"[]\n", b'{"hello": 1}\n', b"\xff\xfe\n", b"x" * (11 << 20)]
)
async def test_a_peer_that_greets_wrongly_is_no_connection(greeting: bytes) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await writer.drain()

    async with peer(talk) as path:
        with pytest.raises(QmpFailed):
            await Qmp.connect(path, timeout_s=5)


async def test_nobody_there_is_no_connection(tmp_path: Path) -> None:
    with pytest.raises(QmpFailed, match="no connection"):
        await Qmp.connect(tmp_path / "absent", timeout_s=5)


async def test_a_command_without_an_answer_is_given_up_in_time() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeted((reader, writer))
        await idle(reader)

    async with peer(talk) as path:
        qmp = await Qmp.connect(path, timeout_s=5)
        with pytest.raises(QmpFailed, match="stop: no answer"):
            await qmp.execute("stop", timeout_s=SOON_S)
        await qmp.close()


@pytest.mark.parametrize("result", [None, 5, [], "running", {}, {"status": 5}])
async def test_an_answer_of_another_shape_is_a_failure(result: object) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeted((reader, writer))
        await answer((reader, writer), result)
        await idle(reader)

    async with peer(talk) as path:
        qmp = await Qmp.connect(path, timeout_s=5)
        with pytest.raises(QmpFailed, match="query-status"):
            await qmp.query("query-status", "status", timeout_s=5)
        await qmp.close()


@pytest.mark.parametrize("noise", [b"garbage\n", b'{"return": {}, "id": "another"}\n', b"{}\n", b""])
async def test_noise_in_place_of_an_answer_ends_the_connection_and_the_call(noise: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeted((reader, writer))
        await reader.read(65536)
        writer.write(noise)
        await writer.drain()

    async with peer(talk) as path:
        qmp = await Qmp.connect(path, timeout_s=5)
        with pytest.raises(QmpFailed):
            await qmp.execute("stop", timeout_s=5)
        with pytest.raises(QmpFailed):
            await qmp.execute("cont", timeout_s=5)
        await qmp.close()


async def test_a_refusal_carries_the_vmms_words() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeted((reader, writer))
        request = json.loads(await reader.read(65536))
        error = {"class": "GenericError", "desc": "no such thing"}
        writer.write(line({"error": error, "id": request["id"]}))
        await idle(reader)

    async with peer(talk) as path:
        qmp = await Qmp.connect(path, timeout_s=5)
        with pytest.raises(QmpFailed, match="cont: no such thing"):
            await qmp.execute("cont", timeout_s=5)
        await qmp.close()


async def test_events_that_matter_arrive_and_others_are_not_even_kept() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeted((reader, writer))
        for number in range(1000):
            writer.write(line({"event": "RTC_CHANGE", "data": {"offset": number}, "timestamp": {}}))
        writer.write(line({"event": "SHUTDOWN", "data": {"guest": True, "reason": "guest-reset"}, "timestamp": {}}))
        writer.write(line({"event": "GUEST_PANICKED", "data": "not an object", "timestamp": {}}))
        await idle(reader)

    async with peer(talk) as path:
        qmp = await Qmp.connect(path, timeout_s=5)
        async with asyncio.timeout(10):
            assert await qmp.next_event() == ("SHUTDOWN", {"guest": True, "reason": "guest-reset"})
            assert await qmp.next_event() == ("GUEST_PANICKED", {})
        await qmp.close()


async def test_a_descriptor_goes_over_with_its_name() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "qmp.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            received: list[bytes] = []

            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(line(GREETING))
                    connection.recv(65536)
                    connection.sendall(line({"return": {}}))
                    data, descriptors, _, _ = socket.recv_fds(connection, 65536, 1)
                    while b"getfd" not in data:
                        data += connection.recv(65536)
                    request = json.loads(data)
                    received.append(str(request["arguments"]["fdname"]).encode())
                    received.append(os.read(descriptors[0], 100))
                    os.close(descriptors[0])
                    connection.sendall(line({"return": {}, "id": request["id"]}))

            serving = asyncio.create_task(asyncio.to_thread(serve))
            qmp = await Qmp.connect(path, timeout_s=5)
            read, write = os.pipe()
            os.write(write, b"through")
            os.close(write)
            await qmp.give("state", read, timeout_s=5)
            os.close(read)
            await serving
            await qmp.close()
    assert received == [b"state", b"through"]


async def test_a_peer_that_floods_events_fills_no_memory() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeted((reader, writer))
        event = {"event": "MIGRATION", "data": {"status": "active"}, "timestamp": {"seconds": 1, "microseconds": 1}}
        writer.write(line(event) * 5000)
        await answer((reader, writer), {"status": "running"})
        await idle(reader)

    async with peer(talk) as path:
        qmp = await Qmp.connect(path, timeout_s=5)
        assert await qmp.query("query-status", "status", timeout_s=20) == "running"
        seen = 0
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.2):
                    await qmp.next_event()
                seen += 1
        assert 0 < seen <= MAX_PENDING
        await qmp.close()
