"""The order of things and what a failure leaves; a whole build is proven by the machines that boot from it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import microvm_mcp
from microvm_mcp.imaging import build
from microvm_mcp.imaging import manifest as m
from microvm_mcp.imaging.errors import ImageError
from microvm_mcp.imaging.inputs import inputs_digest
from microvm_mcp.imaging.progress import Silent
from microvm_mcp.imaging.recipe import load_recipe, recipe_directory
from microvm_mcp.imaging.supervisor import build_supervisor
from tests.unit.imaging.test_manifest import manifest

INTERRUPTED = 130
CLOSED = "http://127.0.0.1:9/debian"
"""The discard port, where nobody listens: refused at once."""


def present(output: Path, digest: str) -> m.Manifest:
    output.mkdir(parents=True)
    for name in m.FILES:
        (output / name).write_bytes(b"abc")
    fields = {name: getattr(manifest(), name) for name in m.Manifest.__slots__}
    made = m.Manifest(**{**fields, "inputs_digest": digest})
    (output / m.MANIFEST).write_bytes(m.render_manifest(made))
    return made


def tiny_digest() -> str:
    package = Path(microvm_mcp.__file__).parent
    recipe = load_recipe(recipe_directory(), "tiny")
    return inputs_digest(recipe, build_supervisor(package).sha256, build.builder_digest())


async def test_image_of_the_same_inputs_is_not_built_again(tmp_path: Path) -> None:
    there = present(tmp_path / "out", tiny_digest())
    request = build.Request(tmp_path / "out", "tiny", cache=tmp_path / "cache")
    built = await build.build_image(request, Silent())
    assert built.up_to_date
    assert built.manifest == there
    assert not (tmp_path / "cache").exists()


@pytest.mark.needs("root")
@pytest.mark.parametrize("why", ["other inputs", "a file is shorter", "refresh"])
async def test_failed_build_keeps_the_image_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    output = tmp_path / "out"
    there = present(output, tiny_digest() if why != "other inputs" else "0" * 64)
    if why == "a file is shorter":
        (output / m.ROOT_DISK).write_bytes(b"ab")
    monkeypatch.setattr(build, "fetch_tree", _no_packages)
    request = build.Request(output, "tiny", cache=tmp_path / "cache", refresh=why == "refresh")
    with pytest.raises(ImageError, match="no packages today"):
        await build.build_image(request, Silent())
    assert m.read_manifest(output) == there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out"]


async def _no_packages(*_: object, **__: object) -> Path:
    raise ImageError("There are no packages today; try tomorrow.")


@pytest.mark.needs("root")
async def test_unreachable_mirror_is_an_error_that_names_the_program_and_leaves_nothing(tmp_path: Path) -> None:
    request = build.Request(tmp_path / "out", "tiny", mirror=CLOSED, cache=tmp_path / "cache")
    with pytest.raises(ImageError, match="mmdebstrap failed"):
        await build.build_image(request, Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


@pytest.mark.needs("root")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_build_ends_its_programs_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    server = await asyncio.start_server(_never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    script = "import typer; from microvm_mcp.cli.image import build_image_command as run; typer.run(run)"
    argv = [sys.executable, "-c", script, "--output", str(tmp_path / "out"), "--variant", "tiny"]
    argv += ["--mirror", f"http://127.0.0.1:{port}/debian", "--cache", str(tmp_path / "cache")]
    async with server:
        process = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            assert process.stderr is not None
            async with asyncio.timeout(40):
                while b"apt-get update" not in await process.stderr.readline():
                    pass
                os.kill(process.pid, number)
                rest = await process.stderr.read()
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == INTERRUPTED
    assert b"nothing was published" in rest
    assert b"Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]
    assert str(tmp_path).encode() not in b"".join(_command_lines())


async def _never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def _command_lines() -> list[bytes]:
    lines: list[bytes] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return lines
