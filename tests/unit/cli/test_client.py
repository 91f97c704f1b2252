"""The client verbs against the real doors on loopback, with the real service on the fake engine behind them."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from microvm_mcp.cli import transfer
from microvm_mcp.cli.client import app
from microvm_mcp.cli.remote import Remote, check_endpoint
from microvm_mcp.errors import Conflict, Detail, InvalidArguments, Unavailable
from microvm_mcp.transport.application import build_app
from microvm_mcp.transport.doors import DoorSettings
from microvm_mcp.transport.server import listen, serve_http
from tests.support.door_rig import ALICE, BOB, rig
from tests.support.fake_engine import FakeEngine

TOKEN_MARK = ALICE


@dataclass
class Shell:
    """A command line with the service's address and a token in its environment."""

    url: str
    token_file: Path
    engine: FakeEngine

    def __call__(
        self, *words: str, stdin: bytes = b"", status: int = 0, env: dict[str, str] | None = None
    ) -> Result:
        names = {"MICROVM_URL": self.url, "MICROVM_TOKEN_FILE": str(self.token_file), **(env or {})}
        result = CliRunner().invoke(app, list(words), input=stdin, env=names)
        assert TOKEN_MARK not in result.output
        assert result.exit_code == status, result.output
        return result

    def vm(self) -> str:
        return self("create").stdout.strip()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """The service runs in a thread with a loop of its own: the client verbs are synchronous programs."""
    token_file = tmp_path / "token"
    token_file.write_text(ALICE + "\n", encoding="ascii")
    token_file.chmod(0o600)
    ready = threading.Event()
    made: list[Shell] = []
    ends: list[Callable[[], object]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        directory = tmp_path / "state"
        directory.mkdir()
        async with rig(directory) as behind:
            listener = listen("127.0.0.1", 0)
            host = f"127.0.0.1:{listener.getsockname()[1]}"
            doors = build_app(behind.service, DoorSettings(hosts=frozenset({host})))
            made.append(Shell(f"http://{host}", token_file, behind.engine))
            ready.set()
            await serve_http(doors, listener, stop)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        yield made[0]
    finally:
        ends[0]()
        thread.join(30)
        assert not thread.is_alive()


def test_create_prints_the_id_alone_and_the_verbs_go_on_with_it(shell: Shell) -> None:
    vm_id = shell("create", "--memory", "512", "--cpus", "1", "--name", "mine").stdout.strip()
    assert vm_id.startswith("vm-")
    listed = shell("list").stdout
    assert vm_id in listed
    assert "mine" in listed
    assert f"vm_id: {vm_id}" in shell("status", vm_id).stdout
    assert shell("destroy", vm_id).stdout == f"{vm_id} destroyed\n"
    assert vm_id not in shell("list").stdout


def test_create_waits_through_a_boot_that_outlasts_one_call(shell: Shell) -> None:
    shell.engine.boot_s = 0.3
    assert json.loads(shell("create", "--json").stdout)["state"] == "running"


def test_json_prints_what_the_service_gave(shell: Shell) -> None:
    vm_id = shell.vm()
    assert json.loads(shell("status", vm_id, "--json").stdout)["memory_mib"] == 1024
    assert json.loads(shell("list", "--json").stdout)["vms"][0]["vm_id"] == vm_id
    started = json.loads(shell("exec", "--json", vm_id, "echo x").stdout)
    assert json.loads(shell("output", "--json", vm_id, started["job_id"]).stdout)["stdout"] == "x\n"
    assert json.loads(shell("cancel", "--json", vm_id, started["job_id"]).stdout)["job_id"] == started["job_id"]
    assert json.loads(shell("destroy", "--json", vm_id).stdout)["state"] == "destroyed"


def test_exec_gives_both_streams_byte_for_byte_and_the_commands_status(shell: Shell) -> None:
    vm_id = shell.vm()
    assert shell("exec", vm_id, "echo out").stdout == "out\n"
    assert shell("exec", vm_id, "err wrong").stderr == "wrong\n"
    assert shell("exec", vm_id, "bytes 00ff80").stdout_bytes == b"\x00\xff\x80"
    shell("exec", vm_id, "exit 3", status=3)


def test_exec_takes_one_word_as_a_script_and_several_as_a_command(shell: Shell) -> None:
    vm_id = shell.vm()
    shell("exec", vm_id, "echo a | b")
    shell("exec", vm_id, "echo", "a b", "--cwd", "-la")
    shell("exec", vm_id, "--", "echo", "c")
    assert shell.engine.commands == ["echo a | b", "echo 'a b' --cwd -la", "echo c"]


def test_exec_follows_a_job_that_takes_its_time_and_says_what_was_left_out(shell: Shell) -> None:
    vm_id = shell.vm()
    assert shell("exec", vm_id, "drip 0.3").stdout_bytes.decode()
    flooded = shell("exec", vm_id, "flood 300000")
    kept = len(flooded.stdout_bytes)
    assert kept < 300_000
    assert f"[{300_000 - kept} bytes of stdout left out; all of it is in /" in flooded.stderr


def test_a_timeout_is_124_and_a_detached_job_is_named_and_cancelled(shell: Shell) -> None:
    vm_id = shell.vm()
    job_id = shell("exec", "--detach", vm_id, "sleep 60").stdout.strip()
    assert job_id in shell("status", vm_id).stdout
    assert shell("cancel", vm_id, job_id).stdout == f"{job_id} cancelled\n"
    shell("output", vm_id, job_id)


def test_files_go_up_and_come_down_in_pieces_with_their_mode(shell: Shell, tmp_path: Path) -> None:
    vm_id = shell.vm()
    for size in (0, 1, transfer.PIECE, transfer.PIECE + 1, 3 * transfer.PIECE):
        up, down = tmp_path / f"up-{size}", tmp_path / f"down-{size}"
        up.write_bytes(os.urandom(size))
        up.chmod(0o750)
        shell("cp", str(up), f"{vm_id}:dir/{size}")
        shell("cp", f"{vm_id}:dir/{size}", str(down))
        assert down.read_bytes() == up.read_bytes()
        assert down.stat().st_mode & 0o777 == 0o750
    shell("cp", f"{vm_id}:dir/1", str(tmp_path))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "up-1").read_bytes()
    shell("cp", str(tmp_path / "up-1"), f"{vm_id}:dir2/")
    assert shell("read", vm_id, "dir2/up-1").stdout_bytes == (tmp_path / "up-1").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_failed_download_leaves_the_target_and_nothing_beside_it(shell: Shell, tmp_path: Path) -> None:
    vm_id = shell.vm()
    target = tmp_path / "kept"
    target.write_text("before")
    shell("cp", f"{vm_id}:missing", str(target), status=5)
    assert target.read_text() == "before"
    assert not list(tmp_path.glob(".*"))


def test_copying_needs_exactly_one_machine_and_a_regular_file(shell: Shell, tmp_path: Path) -> None:
    vm_id = shell.vm()
    shell("cp", "a", "b", status=2)
    shell("cp", f"{vm_id}:a", f"{vm_id}:b", status=2)
    shell("cp", str(tmp_path), f"{vm_id}:a", status=2)
    shell("cp", str(tmp_path / "missing"), f"{vm_id}:a", status=2)


def test_pieces_are_written_from_stdin_and_read_to_stdout(shell: Shell) -> None:
    vm_id = shell.vm()
    shell("write", vm_id, "f", "--mode", "0600", stdin=b"abc")
    shell("write", vm_id, "f", "--offset", "3", stdin=b"def")
    assert shell("read", vm_id, "f").stdout_bytes == b"abcdef"
    part = shell("read", vm_id, "f", "--offset", "1", "--length", "2")
    assert (part.stdout_bytes, part.stderr) == (b"bc", "[goes on at --offset 3]\n")
    refused = shell("write", vm_id, "f", "--offset", "9", stdin=b"x", status=6)
    assert refused.stderr.startswith("conflict: ")
    shell("write", vm_id, "f", stdin=b"x" * (transfer.PIECE + 1), status=2)


def test_errors_are_one_line_with_code_and_the_codes_exit_status(shell: Shell) -> None:
    missing = shell("status", "vm-nothing", status=5)
    assert missing.stderr.startswith("not_found: ")
    assert missing.stderr.count("\n") == 1
    assert shell("suspend", shell.vm(), status=7).stderr.startswith("failed_precondition: ")
    assert shell("resume", "vm-nothing", status=5).stdout == ""
    assert shell("create", "--memory", "1", status=2).stderr.startswith("invalid_arguments: ")
    assert shell("exec", "--env", "broken", "vm-x", "true", status=2).stderr.startswith("invalid_arguments: ")


def test_an_unknown_token_and_somebody_elses_machine_are_told_apart(shell: Shell) -> None:
    vm_id = shell.vm()
    shell.token_file.write_text(BOB)
    assert shell("status", vm_id, status=5).stderr.startswith("not_found: ")
    shell.token_file.write_text("nobody")
    assert shell("list", status=3).stderr.startswith("unauthenticated: ")


def test_a_readable_token_file_is_warned_about_and_a_missing_one_is_explained(shell: Shell, tmp_path: Path) -> None:
    shell.token_file.chmod(0o644)
    assert "others can read the token" in shell("list").stderr
    assert "MICROVM_TOKEN_FILE" in shell("list", env={"MICROVM_TOKEN_FILE": str(tmp_path / "no")}, status=7).stderr
    assert "MICROVM_URL" in shell("list", env={"MICROVM_URL": ""}, status=7).stderr


def test_a_service_that_is_not_there_is_unavailable(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microvm_mcp.cli.remote._PAUSE_S", 0.01)
    closed = listen("127.0.0.1", 0)
    port = closed.getsockname()[1]
    closed.close()
    refused = shell("list", env={"MICROVM_URL": f"http://127.0.0.1:{port}"}, status=11)
    assert refused.stderr.startswith("unavailable: ")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8090", "http://[::1]:1", "http://localhost", "https://vm.example"]
)
def test_endpoints_that_keep_the_token_private_are_taken(url: str) -> None:
    check_endpoint(url, "MICROVM_URL")


@pytest.mark.parametrize(
    "url",
    [
        "http://vm.example",
        "http://10.0.0.1:8090",
        "http://127.0.0.1.evil",
        "ftp://a",
        "vm.example",
        "",
        "https://",
        "https://u:p@a",
        "https://a?b",
        "https://a\nb",
        "https://a b",
    ],
)
def test_endpoints_that_would_send_it_in_the_clear_or_make_no_sense_are_refused(url: str) -> None:
    with pytest.raises(InvalidArguments):
        Remote(url, "t")


class Lossy:
    """Takes effect, loses the answer, and says conflict when the piece comes again."""

    def __init__(self) -> None:
        self.content = b""
        self.lost = 0

    def call(self, tool: str, arguments: dict[str, Detail], /) -> dict[str, Detail]:
        import base64

        if tool == "vm_read_file":
            offset = arguments["offset"]
            assert isinstance(offset, int)
            piece = self.content[offset : offset + transfer.PIECE]
            encoded = base64.b64encode(piece).decode()
            return {"content_base64": encoded, "size": len(self.content), "eof": True, "mode": "0644"}
        data = base64.b64decode(str(arguments["content_base64"]))
        offset = arguments.get("offset", 0)
        assert isinstance(offset, int)
        self.content = self.content[:offset] + data
        if offset and not self.lost:
            self.lost += 1
            raise Conflict("the first attempt, whose answer was lost, has extended the file")
        return {"size": len(self.content)}


def test_a_piece_whose_answer_was_lost_is_recognised(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * transfer.PIECE + 5))
    lossy = Lossy()
    transfer.upload(lossy, source, "vm-x", "f", lambda _done, _total: None)
    assert lossy.lost == 1
    assert lossy.content == source.read_bytes()


def test_an_answer_that_makes_no_sense_is_unavailable(tmp_path: Path) -> None:
    class Odd:
        def call(self, _tool: str, _arguments: dict[str, Detail], /) -> dict[str, Detail]:
            return {"content_base64": "!", "size": 1, "eof": True, "mode": "0644"}

    with pytest.raises(Unavailable):
        transfer.download(Odd(), "vm-x", "f", tmp_path / "t", lambda _done, _total: None)
