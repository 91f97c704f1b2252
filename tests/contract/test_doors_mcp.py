"""MCP as raw bytes: each protocol generation's handshake, and clients that get it wrong are told, never ignored."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from mcp import Client, MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, KNOWN_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from microvm_mcp import __version__
from microvm_mcp.errors import Detail
from microvm_mcp.service.catalog import INSTRUCTIONS, TOOLS
from tests.support.door_rig import JsonDict, Rig, mcp_answer, rig

JSON_ONLY = {"Content-Type": "application/json"}
NEWEST = "2026-07-28"
META: JsonDict = {
    "io.modelcontextprotocol/protocolVersion": NEWEST,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
}


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path) as made:
        yield made


async def post(
    behind: Rig, message: object, headers: dict[str, str] | None = None, *, path: str = "/mcp"
) -> tuple[int, JsonDict]:
    """Like a plain script: no Accept header unless given."""
    content = message if isinstance(message, bytes) else json.dumps(message).encode()
    async with behind.http() as http:
        del http.headers["accept"]
        response = await http.post(path, content=content, headers={**JSON_ONLY, **(headers or {})})
    assert response.headers["content-type"].startswith("application/json")
    body: JsonDict = response.json() if response.content else {}
    return response.status_code, body


def request(method: str, params: JsonDict | None = None, request_id: Detail = 1) -> JsonDict:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, **({"params": params} if params else {})}


def modern(method: str, params: JsonDict | None = None) -> tuple[JsonDict, dict[str, str]]:
    headers = {"MCP-Protocol-Version": NEWEST, "Mcp-Method": method}
    if params and isinstance(params.get("name"), str):
        headers["Mcp-Name"] = str(params["name"])
    return request(method, {**(params or {}), "_meta": META}), headers


def error_of(body: JsonDict) -> JsonDict:
    error = body["error"]
    assert isinstance(error, dict)
    return error


def test_the_generations_are_those_the_tests_know() -> None:
    """A new one in the SDK makes this fail, so that it is tried before it is offered."""
    assert tuple(KNOWN_PROTOCOL_VERSIONS) == ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", NEWEST)
    assert tuple(MODERN_PROTOCOL_VERSIONS) == (NEWEST,)


@pytest.mark.parametrize("version", HANDSHAKE_PROTOCOL_VERSIONS)
@pytest.mark.parametrize("path", ["/mcp", "/mcp/"])
async def test_each_handshake_generation_initialises_lists_and_calls(behind: Rig, version: str, path: str) -> None:
    hello: JsonDict = {
        "protocolVersion": version,
        "capabilities": {},
        "clientInfo": {"name": "raw", "version": "1"},
    }
    status, body = await post(behind, request("initialize", hello), path=path)
    result = body["result"]
    assert isinstance(result, dict)
    assert (status, result["protocolVersion"]) == (200, version)
    assert result["serverInfo"] == {"name": "microvm-mcp", "title": "microVM machines", "version": __version__}
    assert result["instructions"] == INSTRUCTIONS
    kept = {"MCP-Protocol-Version": version}
    assert await post(behind, {"jsonrpc": "2.0", "method": "notifications/initialized"}, kept, path=path) == (
        202,
        {},
    )
    assert await post(behind, request("ping"), kept, path=path) == (200, {"jsonrpc": "2.0", "id": 1, "result": {}})
    _, listed = await post(behind, request("tools/list"), kept, path=path)
    assert isinstance(listed["result"], dict)
    assert listed["result"]["tools"] == [tool.listing() for tool in TOOLS]
    status, called = await post(
        behind, request("tools/call", {"name": "vm_list", "arguments": {}}), kept, path=path
    )
    assert isinstance(called["result"], dict)
    assert (status, called["result"]["structuredContent"]) == (200, {"vms": [], "next_cursor": None})


async def test_the_stateless_generation_discovers_lists_and_calls(behind: Rig) -> None:
    status, body = await post(behind, *modern("server/discover"))
    result = body["result"]
    assert isinstance(result, dict)
    assert (status, result["instructions"]) == (200, INSTRUCTIONS)
    _, listed = await post(behind, *modern("tools/list"))
    assert isinstance(listed["result"], dict)
    assert listed["result"]["tools"] == [tool.listing() for tool in TOOLS]
    assert listed["result"]["cacheScope"] == "public"
    status, called = await post(behind, *modern("tools/call", {"name": "vm_list", "arguments": {}}))
    assert isinstance(called["result"], dict)
    assert (status, called["result"]["structuredContent"]) == (200, {"vms": [], "next_cursor": None})


@pytest.mark.parametrize("mode", ["auto", "legacy", NEWEST])
async def test_the_official_client_finds_version_instructions_and_tools(
    behind: Rig, mode: Literal["auto", "legacy", "2026-07-28"]
) -> None:
    async with behind.mcp(mode) as client:
        assert client.protocol_version == ("2025-11-25" if mode == "legacy" else NEWEST)
        listed = await client.list_tools()
        assert [tool.name for tool in listed.tools] == [tool.name for tool in TOOLS]
        answer = mcp_answer(await client.call_tool("vm_list", {}))
        assert answer.body == {"vms": [], "next_cursor": None}
        if mode != NEWEST:
            assert client.server_info is not None
            assert client.server_info.version == __version__


@pytest.mark.parametrize("mode", ["auto", "legacy", NEWEST])
async def test_an_unknown_tool_is_a_protocol_error(
    behind: Rig, mode: Literal["auto", "legacy", "2026-07-28"]
) -> None:
    client: Client
    async with behind.mcp(mode) as client:
        with pytest.raises(MCPError) as refusal:
            await client.call_tool("vm_nothing", {})
    assert refusal.value.error.code == -32602


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "OPTIONS", "HEAD"])
async def test_other_methods_are_405_so_that_no_stream_is_held_open(behind: Rig, method: str) -> None:
    async with behind.http() as http:
        response = await http.request(method, "/mcp", headers={"Accept": "text/event-stream"})
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        if method != "HEAD":
            assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("bad_id", [None, True, 1.5, 1.0, [], {}, 2**70])
async def test_a_request_id_that_is_no_string_or_integer_is_answered_with_an_error(
    behind: Rig, bad_id: Detail
) -> None:
    for headers in ({}, {"MCP-Protocol-Version": "2025-06-18"}, {"MCP-Protocol-Version": NEWEST}):
        status, body = await post(behind, request("ping", request_id=bad_id), headers)
        error = error_of(body)
        assert (status, body["id"]) == (400, None)
        assert error["code"] in {-32600, -32700}
        assert "integer" in str(error["message"])


@pytest.mark.parametrize("good_id", ["", "a", "🙂", 0, -1, 2**53, "9" * 200])
async def test_string_and_integer_ids_come_back_as_they_were(behind: Rig, good_id: str | int) -> None:
    assert await post(behind, request("ping", request_id=good_id)) == (
        200,
        {"jsonrpc": "2.0", "id": good_id, "result": {}},
    )


@pytest.mark.parametrize("version", ["2099-01-01", "1", "", "2025-06-18, 2026-07-28", "LEAKMARK"])
async def test_an_unknown_protocol_version_is_told_the_known_ones(behind: Rig, version: str) -> None:
    for message in (request("ping"), {"jsonrpc": "2.0", "method": "notifications/initialized"}):
        status, body = await post(behind, message, {"MCP-Protocol-Version": version})
        error = error_of(body)
        assert (status, error["code"]) == (400, -32022)
        assert isinstance(error["data"], dict)
        assert error["data"]["supported"] == list(KNOWN_PROTOCOL_VERSIONS)
        assert "LEAKMARK" not in json.dumps(body)


async def test_an_unknown_version_in_the_handshake_is_answered_with_one_that_is_spoken(behind: Rig) -> None:
    hello: JsonDict = {
        "protocolVersion": "2099-01-01",
        "capabilities": {},
        "clientInfo": {"name": "x", "version": "1"},
    }
    _, body = await post(behind, request("initialize", hello))
    assert isinstance(body["result"], dict)
    assert body["result"]["protocolVersion"] == "2025-11-25"


MALFORMED: dict[str, tuple[bytes, int]] = {
    "batch": (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', -32600),
    "empty batch": (b"[]", -32600),
    "a string": (b'"LEAKMARK"', -32600),
    "null": (b"null", -32600),
    "no JSON": (b"LEAKMARK", -32700),
    "nothing": (b"", -32700),
    "NaN": (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":NaN}}', -32700),
    "byte order mark": (b'\xef\xbb\xbf{"jsonrpc":"2.0","id":1,"method":"ping"}', -32700),
    "bad UTF-8": (b'{"jsonrpc":"2.0","id":1,"method":"\xff"}', -32700),
    "lone surrogate": (b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}', -32700),
    "duplicate key": (b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}', -32700),
    "too deep": (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":' + b"[" * 80 + b"]" * 80 + b"}}", -32700),
    "no version": (b'{"id":1,"method":"LEAKMARK"}', -32600),
    "old version": (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
    "numeric version": (b'{"jsonrpc":2.0,"id":1,"method":"ping"}', -32600),
    "no method": (b'{"jsonrpc":"2.0","id":1}', -32600),
    "method no string": (b'{"jsonrpc":"2.0","id":1,"method":{"LEAKMARK":1}}', -32600),
    "a response": (b'{"jsonrpc":"2.0","id":1,"result":{"LEAKMARK":1}}', -32600),
    "params a list": (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":["LEAKMARK"]}', -32600),
    "a call without id": (b'{"jsonrpc":"2.0","method":"tools/call","params":{"name":"vm_list"}}', -32600),
}


@pytest.mark.parametrize("version", [None, "2025-06-18", NEWEST])
@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_no_single_message_is_an_error_that_repeats_nothing(
    behind: Rig, name: str, version: str | None
) -> None:
    message, code = MALFORMED[name]
    status, body = await post(behind, message, {"MCP-Protocol-Version": version} if version else {})
    error = error_of(body)
    assert (status, error["code"]) == (400, code)
    assert isinstance(error["data"], dict)
    assert isinstance(error["data"]["error"], dict)
    assert error["data"]["error"]["code"] == "invalid_arguments"
    assert "LEAKMARK" not in json.dumps(body)


ODD_PARAMS: list[JsonDict] = [
    {},
    {"name": 5},
    {"name": ["LEAKMARK"]},
    {"name": "vm_list", "arguments": ["LEAKMARK"]},
    {"name": "vm_list", "arguments": "LEAKMARK"},
    {"name": "vm_list", "arguments": {"LEAKMARKED": {"a": "LEAKMARK"}}, "_meta": {"progressToken": ["LEAKMARK"]}},
]


@pytest.mark.parametrize("params", ODD_PARAMS)
async def test_calls_with_odd_parameters_end_as_errors_without_values(behind: Rig, params: JsonDict) -> None:
    for message, headers in ((request("tools/call", params), {}), modern("tools/call", params)):
        _, body = await post(behind, message, headers)
        result = body.get("result")
        assert "error" in body or (isinstance(result, dict) and result["isError"])
        assert '"LEAKMARK"' not in json.dumps(body)


async def test_an_unknown_method_is_an_error_in_each_generation(behind: Rig) -> None:
    name = "tools/REJECTED-VALUE"
    old = {"MCP-Protocol-Version": "2025-06-18"}
    for (message, headers), expected in (
        ((request(name), {}), 200),
        ((request(name), old), 200),
        (modern(name), 404),
    ):
        status, body = await post(behind, message, headers)
        assert (status, error_of(body)["code"]) == (expected, -32601)
        assert "REJECTED-VALUE" not in str(body)


async def test_headers_that_contradict_the_message_are_refused_in_the_newest_generation(behind: Rig) -> None:
    message, headers = modern("tools/call", {"name": "vm_list", "arguments": {}})
    for wrong in ({"Mcp-Method": "tools/list"}, {"Mcp-Name": "vm_status"}):
        status, body = await post(behind, message, {**headers, **wrong})
        assert (status, error_of(body)["code"]) == (400, -32020)
    blank = {"Mcp-Name": "vm_list \t"}
    assert (await post(behind, message, {**headers, **blank}))[0] == 200


@pytest.mark.parametrize("accept", ["application/json", "*/*", "text/event-stream", "application/*", "image/png"])
async def test_accept_headers_in_use_are_all_answered_with_json(behind: Rig, accept: str) -> None:
    for message, headers in ((request("ping"), {}), modern("tools/list")):
        status, body = await post(behind, message, {**headers, "Accept": accept})
        assert (status, "result" in body) == (200, True)


async def test_a_stream_of_changes_is_not_offered(behind: Rig) -> None:
    message, headers = modern("subscriptions/listen")
    _, body = await post(behind, message, {**headers, "Accept": "application/json, text/event-stream"})
    assert error_of(body)["code"] == -32601
