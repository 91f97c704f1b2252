"""Slow, broken and silent clients against a real listener: each costs itself only, and none holds up the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator

import pytest

from microvm_mcp.errors import FailedPrecondition
from microvm_mcp.transport.doors import DoorLimits
from microvm_mcp.transport.server import listen
from tests.support.doors import Served, on_loopback

SHORT = DoorLimits(head_s=0.3, body_s=0.4, idle_s=0.3, write_s=0.5, linger_s=0.3, stop_s=0.5, max_connections=8)


def parsed(answer: bytes) -> tuple[int, dict[str, object]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@contextlib.asynccontextmanager
async def connection(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)


async def repeat(writer: asyncio.StreamWriter, data: bytes) -> None:
    for _ in range(100):
        writer.write(data)
        await writer.drain()


async def works(served: Served) -> bool:
    head = served.head("POST /v1/tools/echo HTTP/1.1", "Content-Length: 2", "Content-Type: application/json")
    answer = await served.exchange(head[:-2] + b"Connection: close\r\n\r\n{}")
    return answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("kept", [False, True])
async def test_headers_that_trickle_are_cut_off_with_408_also_on_a_kept_connection(kept: bool) -> None:
    async with on_loopback(SHORT) as served, connection(served) as (reader, writer), asyncio.timeout(10):
        if kept:
            writer.write(served.head("GET /healthz HTTP/1.1"))
            await reader.readuntil(b'{"status":"ok"}')
        sender = asyncio.create_task(trickle(writer, b"POST /mcp HTTP/1.1\r\nX-Slow: " + b"a" * 500))
        assert await works(served)
        status, error = parsed(await reader.read())
        assert (status, error["code"], error["retryable"]) == (408, "slow_request", True)
        sender.cancel()


async def test_a_body_that_trickles_is_cut_off_with_408() -> None:
    async with on_loopback(SHORT) as served, connection(served) as (reader, writer), asyncio.timeout(10):
        writer.write(
            served.head("POST /v1/tools/echo HTTP/1.1", "Content-Length: 500", "Content-Type: application/json")
        )
        sender = asyncio.create_task(trickle(writer, b" " * 499))
        assert await works(served)
        status, error = parsed(await reader.read())
        assert (status, error["code"]) == (408, "slow_request")
        sender.cancel()


async def test_a_refused_body_that_never_ends_is_not_read_for_ever() -> None:
    async with on_loopback(SHORT) as served, connection(served) as (reader, writer), asyncio.timeout(10):
        writer.write(served.head("POST /mcp HTTP/1.1", "Transfer-Encoding: chunked", token=None))
        sender = asyncio.create_task(trickle(writer, b"1\r\n \r\n" * 200))
        status, _ = parsed(await reader.read())
        assert status == 408
        sender.cancel()


async def test_a_client_that_says_nothing_is_disconnected_without_a_word() -> None:
    async with on_loopback(SHORT) as served, connection(served) as (reader, _), asyncio.timeout(10):
        assert await reader.read() == b""


async def test_an_idle_kept_connection_is_closed() -> None:
    async with on_loopback(SHORT) as served, connection(served) as (reader, writer), asyncio.timeout(10):
        for _ in range(3):
            writer.write(served.head("GET /healthz HTTP/1.1"))
            await reader.readuntil(b'{"status":"ok"}')
        assert await reader.read() == b""


async def test_a_call_that_takes_longer_than_all_client_deadlines_is_answered() -> None:
    async with on_loopback(SHORT) as served, asyncio.timeout(10):
        head = served.head("POST /v1/tools/slow HTTP/1.1", "Connection: close", "Content-Length: 0")
        call = asyncio.create_task(served.exchange(head))
        await served.service.started.wait()
        await asyncio.sleep(0.6)
        served.service.go.set()
        assert (await call).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"\r\n\r\n\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_a_json_400(garbage: bytes) -> None:
    async with on_loopback(SHORT) as served:
        status, error = parsed(await served.exchange(garbage))
        assert (status, error["code"]) == (400, "invalid_arguments")


async def test_a_broken_chunked_body_gets_a_json_400_and_the_service_goes_on() -> None:
    async with on_loopback(SHORT) as served:
        head = served.head("POST /v1/tools/echo HTTP/1.1", "Transfer-Encoding: chunked")
        status, error = parsed(await served.exchange(head + b"zz\r\n"))
        assert (status, error["code"]) == (400, "invalid_arguments")
        assert await works(served)


@pytest.mark.parametrize("ended", [b"", b"\r\n\r\n"])
async def test_headers_over_the_limit_are_431_in_one_piece_or_not(ended: bytes) -> None:
    async with on_loopback(SHORT) as served:
        head = served.head("GET /healthz HTTP/1.1")[:-4] + b"\r\nX-Long: " + b"a" * 17_000 + ended
        status, error = parsed(await served.exchange(head))
        assert (status, error["code"]) == (431, "too_large")


async def test_a_refusal_is_readable_although_the_client_sends_much_more() -> None:
    async with on_loopback() as served:
        size = 2 * 1024 * 1024
        head = served.head("POST /mcp HTTP/1.1", f"Content-Length: {size}", "Connection: close")
        status, error = parsed(await served.exchange(head + b"a" * size))
        assert (status, error["code"]) == (413, "too_large")


async def test_a_body_that_is_declared_too_large_and_never_sent_is_refused_as_too_large() -> None:
    # The time for a body is 30 s here; an answer within this exchange's 10 s came from the refusal itself.
    async with on_loopback() as served:
        head = served.head("POST /mcp HTTP/1.1", f"Content-Length: {2 * 1024 * 1024}")
        status, error = parsed(await served.exchange(head))
        assert (status, error["code"]) == (413, "too_large")


async def test_a_method_that_is_not_allowed_is_readable_although_a_body_follows() -> None:
    async with on_loopback() as served:
        size = 2 * 1024 * 1024
        head = served.head("PUT /mcp HTTP/1.1", f"Content-Length: {size}", "Connection: close")
        answer = await served.exchange(head + b"a" * size)
        status, error = parsed(answer)
        assert (status, error["code"]) == (405, "method_not_allowed")
        assert b"\r\nallow: POST\r\n" in answer.lower().replace(b"post", b"POST")


async def test_an_upgrade_to_websocket_without_token_is_a_plain_401() -> None:
    upgrade = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    async with on_loopback(SHORT) as served:
        for path in ("/mcp", "/anything"):
            status, error = parsed(await served.exchange(served.head(f"GET {path} HTTP/1.1", *upgrade, token=None)))
            assert (status, error["code"]) == (401, "unauthenticated")
        status, error = parsed(await served.exchange(served.head("GET /anything HTTP/1.1", *upgrade)))
        assert (status, error["code"]) == (404, "not_found")


async def test_more_connections_than_allowed_push_out_the_longest_waiting_one() -> None:
    async with on_loopback(DoorLimits(max_connections=8)) as served, contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connection(served)) for _ in range(20)]
        async with asyncio.timeout(10):
            assert await works(served)
            assert await silent[0][0].read() == b""


async def test_connections_beyond_the_limit_are_told_so_when_all_are_busy() -> None:
    async with on_loopback(DoorLimits(max_connections=4)) as served, contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            _, writer = await stack.enter_async_context(connection(served))
            writer.write(served.head("POST /v1/tools/slow HTTP/1.1", "Content-Length: 0"))
        async with asyncio.timeout(10):
            await served.service.started.wait()
            await asyncio.sleep(0.2)
            status, error = parsed(await served.exchange(b""))
            assert (status, error["code"]) == (503, "unavailable")


async def test_a_client_that_hangs_up_does_not_stop_its_call() -> None:
    async with on_loopback(SHORT) as served, asyncio.timeout(10):
        async with connection(served) as (_, writer):
            writer.write(served.head("POST /v1/tools/slow HTTP/1.1", "Content-Length: 0"))
            await served.service.started.wait()
        await asyncio.sleep(0.1)
        served.service.go.set()
        await served.service.ended.wait()


async def test_a_client_that_takes_no_answer_is_dropped() -> None:
    async with on_loopback(SHORT) as served, connection(served) as (reader, writer), asyncio.timeout(20):
        body = json.dumps({"value": "x" * 400_000}).encode()
        head = served.head(
            "POST /v1/tools/echo HTTP/1.1", f"Content-Length: {len(body)}", "Content-Type: application/json"
        )
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError):
            await repeat(writer, head + body)


@pytest.mark.parametrize(
    "sent", ["nothing", "half a head", "half a body", "an idle connection", "an unread answer"]
)
async def test_the_end_does_not_wait_for_a_client_that_has_no_complete_request(sent: str) -> None:
    async with on_loopback(DoorLimits(stop_s=5.0)) as served, connection(served) as (reader, writer):
        if sent == "half a head":
            writer.write(b"POST /mcp HTTP/1.1\r\n")
        elif sent == "half a body":
            writer.write(served.head("POST /v1/tools/echo HTTP/1.1", "Content-Length: 10") + b"{")
        elif sent == "an idle connection":
            writer.write(served.head("GET /healthz HTTP/1.1"))
            await reader.readuntil(b"}")
        elif sent == "an unread answer":
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            body = json.dumps({"value": "x" * 400_000}).encode()
            writer.write(
                served.head(
                    "POST /v1/tools/echo HTTP/1.1",
                    f"Content-Length: {len(body)}",
                    "Content-Type: application/json",
                )
                + body
            )
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        served.stop.set()
        async with asyncio.timeout(4):
            await served.task
        assert time.monotonic() - begun < 4


async def test_the_end_lets_a_call_in_progress_answer_and_takes_no_further_one() -> None:
    async with on_loopback(DoorLimits(stop_s=5.0)) as served, asyncio.timeout(10):
        head = served.head("POST /v1/tools/slow HTTP/1.1", "Content-Length: 0")
        call = asyncio.create_task(served.exchange(head))
        await served.service.started.wait()
        served.stop.set()
        await asyncio.sleep(0.4)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", served.port)
        assert not served.task.done()
        served.service.go.set()
        assert (await call).startswith(b"HTTP/1.1 200 ")
        await served.task


async def test_a_call_cut_off_at_the_end_is_told_that_its_outcome_is_unknown() -> None:
    async with on_loopback(SHORT) as served, asyncio.timeout(10):
        call = asyncio.create_task(
            served.exchange(served.head("POST /v1/tools/slow HTTP/1.1", "Content-Length: 0"))
        )
        await served.service.started.wait()
        served.stop.set()
        status, error = parsed(await call)
        assert (status, error["code"]) == (409, "outcome_unknown")
        await served.task


@pytest.mark.parametrize("version", ["2025-06-18", "2026-07-28"])
@pytest.mark.parametrize("let_go", [True, False])
async def test_the_end_treats_calls_over_mcp_alike(version: str, let_go: bool) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params: dict[str, object] = {"name": "slow", "arguments": {}}
    if version == "2026-07-28":
        params["_meta"] = meta
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    async with on_loopback(SHORT) as served, asyncio.timeout(10):
        head = served.head(
            "POST /mcp HTTP/1.1",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"MCP-Protocol-Version: {version}",
            "Mcp-Method: tools/call",
            "Mcp-Name: slow",
        )
        call = asyncio.create_task(served.exchange(head + body))
        await served.service.started.wait()
        served.stop.set()
        if let_go:
            served.service.go.set()
        result = json.loads((await call).partition(b"\r\n\r\n")[2])["result"]
        assert result["isError"] is not let_go
        if not let_go:
            assert json.loads(result["content"][0]["text"])["error"]["code"] == "outcome_unknown"
        await served.task


def test_answers_do_not_wait_for_a_delayed_acknowledgement() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_storm_of_bad_connections_leaves_no_token_and_no_value_in_the_logs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    mark = "LEAKMARK"
    async with on_loopback(SHORT) as served:
        storm = [
            f"{mark}\r\n\r\n".encode(),
            f"GET /{mark} HTTP/1.1\r\nHost: {mark}\r\nbad {mark}\r\n\r\n".encode(),
            served.head(f"GET /{mark}?token={mark} HTTP/1.1", f"Origin: {mark}", token=f"{mark}-unknown"),
            served.head("POST /mcp HTTP/1.1", f"Upgrade: {mark}", "Connection: upgrade", "Content-Length: 1"),
            served.head("POST /v1/tools/echo HTTP/1.1", "Transfer-Encoding: chunked") + mark.encode(),
            served.head(f"POST /v1/tools/{mark} HTTP/1.1", "Content-Length: 9", "Connection: close") + b'{"a":"b"}',
            f"GET / HTTP/1.1\r\nX: {mark * 3000}\r\n\r\n".encode(),
        ]
        for data in storm:
            assert mark.encode() not in await served.exchange(data)
    assert caplog.records
    for record in caplog.records:
        assert mark not in record.getMessage()
        assert "token-alice" not in record.getMessage()


async def test_an_address_in_use_is_an_error_that_says_so() -> None:
    taken = listen("127.0.0.1", 0)
    try:
        with pytest.raises(FailedPrecondition, match=r"Cannot listen on 127\.0\.0\.1"):
            listen("127.0.0.1", taken.getsockname()[1])
    finally:
        taken.close()
