"""The local socket, for real: who may speak, what a broken or hostile peer gets, and that others notice nothing."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from microvm_mcp.errors import (
    Conflict,
    Detail,
    FailedPrecondition,
    Internal,
    InvalidArguments,
    MicrovmError,
    OutcomeUnknown,
    PermissionDenied,
    TooLarge,
    Unavailable,
)
from microvm_mcp.transport import local
from microvm_mcp.transport.local import LocalSocket, NotRunning, call, socket_path

NOBODY = 65_534
SOME_GROUP = grp.getgrgid(60).gr_name if any(group.gr_gid == 60 for group in grp.getgrall()) else "daemon"


async def echo(method: str, params: object) -> dict[str, Detail]:
    if method == "conflict":
        raise Conflict("It is taken.", details={"by": 3})
    if method == "bug":
        raise KeyError("secret detail")
    return {"method": method, "params": json.dumps(params)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return socket_path(tmp_path / "run", "0123abcd")


@asynccontextmanager
async def serving(
    path: Path,
    answer: Callable[[str, object], Awaitable[dict[str, Detail]]] = echo,
    group: str = "no-such-group",
) -> AsyncIterator[LocalSocket]:
    server = LocalSocket(path, answer, group=group)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def ask(
    path: Path, method: str, params: dict[str, Detail] | None = None, *, deadline_s: float = 10
) -> object:
    return await asyncio.to_thread(call, path, method, params or {}, deadline_s=deadline_s)


async def exchange(path: Path, sent: bytes, *, eof: bool = False) -> dict[str, dict[str, object]]:
    """Raw bytes in, the answer out."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(sent)
        if eof:
            writer.write_eof()
        async with asyncio.timeout(10):
            answer: dict[str, dict[str, object]] = json.loads(await reader.readline())
        return answer
    finally:
        writer.close()


async def test_a_request_gets_its_answer(path: Path) -> None:
    async with serving(path):
        assert await ask(path, "hello", {"a": [1, "ü"]}) == {"method": "hello", "params": '{"a": [1, "\\u00fc"]}'}
        assert await exchange(path, b'{"method": "hello"}\n') == {"result": {"method": "hello", "params": "{}"}}


async def test_an_error_arrives_as_its_class_with_details_and_exit_status(path: Path) -> None:
    async with serving(path):
        with pytest.raises(Conflict, match="It is taken") as caught:
            await ask(path, "conflict")
    assert (caught.value.details, caught.value.exit_status) == ({"by": 3}, 6)


async def test_a_bug_is_answered_without_its_details(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(path):
        with pytest.raises(Internal) as caught:
            await ask(path, "bug")
    assert "secret detail" not in caught.value.message
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"hello\n", "invalid_arguments"),
        (b"[]\n", "invalid_arguments"),
        (b'{"method": 3}\n', "invalid_arguments"),
        (b'{"params": {}}\n', "invalid_arguments"),
        (b'{"method": "x", "method": "y"}\n', "invalid_arguments"),
        (b'{"method": "x", "more": 1}\n', "invalid_arguments"),
        (b'{"method": "\xff"}\n', "invalid_arguments"),
        (b"[" * 2000 + b"]" * 2000 + b"\n", "invalid_arguments"),
        (b'{"method": "' + b"x" * local.MAX_LINE_BYTES + b'"}\n', "too_large"),
    ],
)
async def test_a_bad_request_is_refused_and_the_next_is_served(path: Path, sent: bytes, code: str) -> None:
    async with serving(path):
        assert (await exchange(path, sent))["error"]["code"] == code
        await ask(path, "hello")


async def test_a_request_without_an_end_is_refused(path: Path) -> None:
    async with serving(path):
        assert (await exchange(path, b'{"method": "x"}', eof=True))["error"]["code"] == "invalid_arguments"


async def test_a_silent_peer_loses_its_connection_and_holds_up_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "REQUEST_S", 0.2)
    async with serving(path):
        silent = asyncio.create_task(exchange(path, b""))
        await asyncio.sleep(0)
        await ask(path, "hello")
        assert (await silent)["error"]["code"] == "unavailable"


async def test_peers_that_hang_up_at_any_point_cost_nothing(path: Path) -> None:
    async with serving(path) as server:
        for sent in (b"", b'{"meth', b'{"method": "hello"}\n'):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(path))
                peer.sendall(sent)
        await ask(path, "hello")
        async with asyncio.timeout(5):
            while server._connections:
                await asyncio.sleep(0.01)


async def test_beyond_the_limit_of_connections_a_request_is_told_to_come_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_CONNECTIONS", 2)
    release = asyncio.Event()
    begun = asyncio.Semaphore(0)

    async def wait(method: str, params: object) -> dict[str, Detail]:
        begun.release()
        await release.wait()
        return {}

    async with serving(path, wait):
        held = [asyncio.create_task(exchange(path, b'{"method": "x"}\n')) for _ in range(2)]
        async with asyncio.timeout(5):
            for _ in held:
                await begun.acquire()
            with pytest.raises(Unavailable, match="Too many"):
                await ask(path, "x", deadline_s=5)
        release.set()
        assert await asyncio.gather(*held) == [{"result": {}}, {"result": {}}]


async def test_closing_lets_a_request_in_progress_end_and_removes_the_socket(path: Path) -> None:
    begun = asyncio.Event()

    async def slow(method: str, params: object) -> dict[str, Detail]:
        begun.set()
        await asyncio.sleep(0.1)
        return {"done": True}

    async with serving(path, slow) as server:
        asked = asyncio.create_task(ask(path, "x"))
        await begun.wait()
        await server.close()
        assert await asked == {"done": True}
        assert not path.exists()
        with pytest.raises(NotRunning):
            await ask(path, "x")
        await server.close()


async def test_closing_does_not_wait_for_ever(path: Path) -> None:
    begun = asyncio.Event()

    async def stuck(method: str, params: object) -> dict[str, Detail]:
        begun.set()
        await asyncio.Event().wait()
        return {}

    async with serving(path, stuck) as server:
        asked = asyncio.create_task(ask(path, "x"))
        await begun.wait()
        await server.close(deadline_s=0.05)
        with pytest.raises(OutcomeUnknown):
            await asked


async def test_a_socket_that_a_dead_service_left_is_no_service_and_is_taken_over(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunning):
        await ask(path, "x")
    async with serving(path):
        await ask(path, "hello")


async def test_a_foreign_directory_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    path.parent.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedPrecondition, match="not this service's own"):
        await LocalSocket(path, echo).start()
    assert not (tmp_path / "elsewhere" / "service.sock").exists()


async def test_without_the_group_only_the_owner_gets_to_the_socket(path: Path) -> None:
    async with serving(path):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def answering(path: Path, reply: bytes) -> socket.socket:
    path.parent.mkdir(parents=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(10)
    return listener


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"", OutcomeUnknown),
        (b"nonsense\n", OutcomeUnknown),
        (b'{"result": ', OutcomeUnknown),
        (b"x" * (2 * local.MAX_LINE_BYTES), OutcomeUnknown),
        (b"[]\n", Internal),
        (b'{"error": {"code": "odd", "message": "m"}}\n', Internal),
        (b'{"error": {"code": "too_large", "message": "m", "details": 3}}\n', TooLarge),
        (b'{"error": {"code": "rate_limited", "message": "m"}}\n', MicrovmError),
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error_and_no_crash(
    path: Path, reply: bytes, kind: type[MicrovmError]
) -> None:
    with answering(path, reply) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(reply)

        serving_once = asyncio.create_task(asyncio.to_thread(serve))
        with pytest.raises(kind):
            await ask(path, "x")
        try:
            await serving_once
        except BrokenPipeError:
            assert len(reply) > local.MAX_LINE_BYTES


async def test_a_service_that_never_answers_is_left_at_the_deadline(path: Path) -> None:
    with answering(path, b""):
        begun = time.monotonic()
        with pytest.raises(OutcomeUnknown, match="no answer"):
            await ask(path, "x", deadline_s=0.2)
        assert time.monotonic() - begun < 5


AS_USER = """
import json, os, sys
from pathlib import Path
from microvm_mcp.errors import MicrovmError
from microvm_mcp.transport.local import call
path, uid, gid, groups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
os.setgroups(groups); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
try:
    print(json.dumps(call(Path(path), "hello", {}, deadline_s=10)))
except MicrovmError as error:
    print(json.dumps({"code": error.code}))
"""


@pytest.fixture
def open_run_dir() -> Iterator[Path]:
    """Reachable for any user, unlike pytest's own directories."""
    run_dir = Path(f"/tmp/microvm-local-{secrets.token_hex(4)}")
    yield run_dir
    for sub in run_dir.glob("*"):
        for file in sub.iterdir():
            file.unlink()
        sub.rmdir()
    run_dir.rmdir()


async def as_user(path: Path, *, gid: int, groups: list[int]) -> dict[str, object]:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", AS_USER, str(path), str(NOBODY), str(gid), json.dumps(groups)],
        capture_output=True,
        timeout=30,
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.needs("root")
async def test_members_of_the_group_are_served_by_primary_and_by_supplementary_group(open_run_dir: Path) -> None:
    path, gid = socket_path(open_run_dir, "tag"), grp.getgrnam(SOME_GROUP).gr_gid
    async with serving(path, group=SOME_GROUP):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert (path.stat().st_uid, path.stat().st_gid) == (os.geteuid(), gid)
        assert (await as_user(path, gid=gid, groups=[]))["method"] == "hello"
        assert (await as_user(path, gid=NOBODY, groups=[5, gid, 7]))["method"] == "hello"
        assert await as_user(path, gid=NOBODY, groups=[5, 7]) == {"code": PermissionDenied.code}


@pytest.mark.needs("root")
async def test_a_stranger_is_refused_by_its_credentials_even_where_the_modes_are_wide(open_run_dir: Path) -> None:
    path, gid = socket_path(open_run_dir, "tag"), grp.getgrnam(SOME_GROUP).gr_gid
    asked: list[str] = []

    async def note(method: str, params: object) -> dict[str, Detail]:
        asked.append(method)
        return {"method": method}

    for group in (SOME_GROUP, "no-such-group"):
        async with serving(path, note, group=group):
            path.parent.chmod(0o755)
            path.chmod(0o666)
            assert await as_user(path, gid=NOBODY, groups=[5, 7]) == {"code": PermissionDenied.code}
            assert asked == []
            if group == SOME_GROUP:
                assert (await as_user(path, gid=NOBODY, groups=[gid]))["method"] == "hello"
                asked.clear()


async def test_unusable_parameters_never_reach_the_socket_as_something_else(path: Path) -> None:
    async with serving(path):
        with pytest.raises(InvalidArguments):
            await ask(path, "x", {"a": float("nan")})
