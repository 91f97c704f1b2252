"""The gate and the routes behind it, in process: who gets in, who does not, and in which words."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping

import httpx2
import pytest
from starlette.types import Message, Scope

from microvm_mcp.transport.application import ROUTES, Application
from tests.support.doors import HOST, ORIGIN, SmallService, in_process, small_app

PATHS = [path.replace("{tool_name}", "echo") for path in ROUTES] + [
    "/",
    "/unknown",
    "/v1/tools/",
    "/v1/tools/a/b",
    "//mcp",
]
OPEN = {"/healthz"}
BAD_CREDENTIALS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "unknown": [("Authorization", "Bearer nobody")],
    "basic": [("Authorization", "Basic token-alice")],
    "no scheme": [("Authorization", "token-alice")],
    "empty": [("Authorization", "Bearer ")],
    "two": [("Authorization", "Bearer token-alice"), ("Authorization", "Bearer token-alice")],
    "two in one": [("Authorization", "Bearer token-alice, Bearer token-alice")],
    "long": [("Authorization", "Bearer " + "a" * 600)],
    "cookie": [("Cookie", "token=token-alice")],
    "api key": [("X-Api-Key", "token-alice")],
}


def error_of(response: httpx2.Response) -> Mapping[str, object]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: Mapping[str, object] = body["error"]
    assert {"code", "message", "retryable"} <= set(error) <= {"code", "message", "retryable", "details"}
    return error


@pytest.mark.parametrize("credential", BAD_CREDENTIALS)
async def test_without_the_one_valid_credential_every_path_is_401(credential: str) -> None:
    service = SmallService()
    async with in_process(small_app(service), token=None) as client:
        for path in PATHS:
            for method in ("GET", "POST", "DELETE", "OPTIONS", "PUT"):
                response = await client.request(method, path, headers=BAD_CREDENTIALS[credential], json={})
                if path in OPEN:
                    assert response.status_code in {200, 405}
                    continue
                assert (response.status_code, error_of(response)["code"]) == (401, "unauthenticated"), path
                challenge = response.headers["www-authenticate"]
                assert challenge.startswith("Bearer ")
                assert "resource_metadata" not in challenge


async def test_a_token_in_the_query_opens_nothing() -> None:
    async with in_process(small_app(SmallService()), token=None) as client:
        response = await client.post("/v1/tools/echo?access_token=token-alice&token=token-alice", json={})
    assert response.status_code == 401


async def test_scheme_and_surrounding_blanks_do_not_matter() -> None:
    async with in_process(small_app(SmallService()), token=None) as client:
        response = await client.post("/v1/tools/echo", json={}, headers={"Authorization": "bEaReR  token-bob \t"})
    assert response.json()["workspace"] == "bob"


@pytest.mark.parametrize(
    "host", ["evil.test", "service.test", "service.test:8091", "", f"{HOST}.evil.test", f"{HOST},evil"]
)
async def test_another_host_is_refused_on_every_path(host: str) -> None:
    async with in_process(small_app(SmallService())) as client:
        for path in PATHS:
            response = await client.post(path, headers={"Host": host}, json={})
            assert (response.status_code, error_of(response)["code"]) == (421, "host_not_allowed")
            assert "evil" not in response.text


async def test_two_host_headers_are_refused() -> None:
    scope_headers = [(b"host", HOST.encode()), (b"host", HOST.encode())]
    status, _ = await ask(
        small_app(SmallService()), {"path": "/healthz", "method": "GET", "headers": scope_headers}
    )
    assert status == 421


async def test_host_is_compared_without_case_and_blanks_also_by_the_sdk_behind() -> None:
    async with in_process(small_app(SmallService())) as client:
        message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        for origin in ({}, {"Origin": ORIGIN.upper()}):
            response = await client.post("/mcp", headers={"Host": f" {HOST.upper()} ", **origin}, json=message)
            assert response.json() == {"jsonrpc": "2.0", "id": 1, "result": {}}


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.test", f"{ORIGIN}.evil.test", "https://service.test:8090", ""]
)
async def test_another_origin_is_refused_on_both_doors(origin: str) -> None:
    async with in_process(small_app(SmallService())) as client:
        for path in PATHS:
            response = await client.post(path, headers={"Origin": origin}, json={})
            assert (response.status_code, error_of(response)["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize("token", [None, "token-alice"])
async def test_there_is_no_oauth_discovery_with_or_without_token(token: str | None) -> None:
    async with in_process(small_app(SmallService()), token=token) as client:
        for path in ("oauth-protected-resource", "oauth-authorization-server/mcp", "openid-configuration"):
            response = await client.get(f"/.well-known/{path}")
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


async def test_unknown_paths_and_methods_are_json_errors() -> None:
    async with in_process(small_app(SmallService())) as client:
        for path in ("/", "/unknown", "/v1/tools/", "/v1/tools/a/b", "/v1", "/MCP", "/docs", "/metrics"):
            response = await client.post(path, json={})
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found"), path
        for path, method in ROUTES.items():
            for other in {"GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"} - {method}:
                response = await client.request(other, path.replace("{tool_name}", "echo"))
                assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
                assert method in response.headers["allow"]


async def test_health_is_open_and_says_nothing_of_the_service() -> None:
    async with in_process(small_app(SmallService()), token=None) as client:
        response = await client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_openapi_needs_a_credential_and_is_the_catalogues() -> None:
    async with in_process(small_app(SmallService())) as client:
        assert (await client.get("/openapi.json")).json()["openapi"] == "3.1.0"


async def test_long_headers_are_431() -> None:
    async with in_process(small_app(SmallService())) as client:
        response = await client.post("/v1/tools/echo", headers={"X-Long": "a" * 16_384}, json={})
        assert (response.status_code, error_of(response)["code"]) == (431, "too_large")


@pytest.mark.parametrize("path", ["/mcp", "/v1/tools/echo"])
async def test_a_body_over_the_limit_is_413_declared_or_streamed(path: str) -> None:
    async with in_process(small_app(SmallService())) as client:
        declared = await client.post(
            path, content=b" " * (512 * 1024 + 1), headers={"Content-Type": "application/json"}
        )
        assert (declared.status_code, error_of(declared)["code"]) == (413, "too_large")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(9):
                yield b" " * 65_536

        streamed = await client.post(path, content=chunks(), headers={"Content-Type": "application/json"})
        assert (streamed.status_code, error_of(streamed)["code"]) == (413, "too_large")


@pytest.mark.parametrize("path", ["/mcp", "/v1/tools/echo"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {},
    ],
)
async def test_another_kind_of_body_is_415(path: str, headers: dict[str, str]) -> None:
    async with in_process(small_app(SmallService())) as client:
        response = await client.post(path, content=b"{}", headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")


async def test_json_with_the_usual_charset_is_taken_and_no_body_means_no_arguments() -> None:
    async with in_process(small_app(SmallService())) as client:
        kind = {"Content-Type": 'Application/JSON; charset="UTF-8"'}
        assert (await client.post("/v1/tools/echo", content=b'{"value":"x"}', headers=kind)).json()["value"] == "x"
        assert (await client.post("/v1/tools/echo")).json()["value"] is None


@pytest.mark.parametrize(
    "body", [b"[]", b"null", b"1", b'"x"', b"{", b'{"value":"\\ud800"}', b'{"value":1,"value":2}']
)
async def test_a_body_that_is_no_plain_json_object_is_400(body: bytes) -> None:
    async with in_process(small_app(SmallService())) as client:
        response = await client.post("/v1/tools/echo", content=body, headers={"Content-Type": "application/json"})
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_arguments")


async def test_rate_limit_carries_retry_after() -> None:
    async with in_process(small_app(SmallService())) as client:
        response = await client.post("/v1/tools/fail", json={"code": "rate_limited"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")


async def test_a_bug_is_a_plain_500_and_its_detail_is_in_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    async with in_process(small_app(SmallService())) as client:
        response = await client.post("/v1/tools/crash", json={})
    assert (response.status_code, error_of(response)["code"]) == (500, "internal")
    assert "INNERMOST" not in response.text
    assert "INNERMOST-DETAIL" in caplog.text


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer nobody")]])
async def test_a_websocket_without_token_is_refused_before_its_handshake(
    headers: list[tuple[bytes, bytes]],
) -> None:
    scope = {"type": "websocket", "path": "/mcp", "headers": [(b"host", HOST.encode()), *headers]}
    status, body = await ask(small_app(SmallService()), {**scope, "extensions": {"websocket.http.response": {}}})
    assert (status, json.loads(body)["error"]["code"]) == (401, "unauthenticated")
    assert await ask(small_app(SmallService()), scope) == (1008, b"")


async def test_a_websocket_with_a_token_finds_nothing_and_with_a_foreign_host_not_even_that() -> None:
    headers = [(b"host", HOST.encode()), (b"authorization", b"Bearer token-alice")]
    scope = {"type": "websocket", "path": "/mcp", "headers": headers, "extensions": {"websocket.http.response": {}}}
    assert (await ask(small_app(SmallService()), scope))[0] == 404
    assert (await ask(small_app(SmallService()), {**scope, "headers": [(b"host", b"evil")]}))[0] == 421


async def test_no_token_and_no_rejected_value_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    mark = "LEAKMARK"
    app = small_app(SmallService())
    async with in_process(app, token=None) as client:
        for token in (f"{mark}-unknown", "token-alice"):
            for path in ("/mcp", "/v1/tools/echo", f"/{mark}", f"/.well-known/{mark}"):
                for headers in (
                    {},
                    {"Host": mark},
                    {"Origin": mark},
                    {"Content-Type": mark},
                    {"Mcp-Protocol-Version": mark},
                    {"Accept": mark},
                ):
                    for body in (mark, f'{{"{mark}":1}}', f'{{"jsonrpc":"2.0","id":1,"method":"{mark}"}}'):
                        kind = {"Content-Type": "application/json", "Authorization": f"Bearer {token}", **headers}
                        await client.post(path, headers=kind, content=body.encode())
    mine = [record for record in caplog.records if not record.name.startswith(("httpx2", "httpcore2"))]
    for record in mine:
        assert mark not in record.getMessage()
        assert "token-alice" not in record.getMessage()


async def ask(app: Application, scope: Scope) -> tuple[int, bytes]:
    """Status (or close code) and body of one raw ASGI exchange without request body."""
    sent: list[Message] = []

    async def receive() -> Message:
        kind = "websocket.connect" if scope.get("type") == "websocket" else "http.request"
        return {"type": kind, "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "http", "query_string": b"", "raw_path": b"", **scope}, receive, send)
    if sent[0]["type"] == "websocket.close":
        return sent[0]["code"], b""
    assert all("accept" not in message["type"] for message in sent)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
