"""The command line as a process: what there is, how errors look, what it costs to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from microvm_mcp import __version__
from microvm_mcp.cli import main as command_line
from microvm_mcp.errors import PUBLIC_ERRORS, MicrovmError, RateLimited
from tests.unit.cli.inline import run


def process(*argv: str, debug: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from microvm_mcp.cli.main import main; main()", *argv],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "MICROVM_DEBUG": "1" if debug else "0"},
        check=False,
    )


def test_help_names_every_command() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in command_line.COMMANDS:
        assert name in done.stdout
    assert run("-h").stdout == done.stdout


def test_version_is_the_packages() -> None:
    assert run("--version").stdout == f"microvm-mcp {__version__}\n"


@pytest.mark.parametrize("name", list(command_line.COMMANDS))
def test_every_command_has_its_own_help_with_and_without_the_others(name: str) -> None:
    alone = run(name, "--help")
    assert alone.returncode == 0
    assert f"microvm-mcp {name}" in alone.stdout


@pytest.mark.parametrize("argv", [["bogus"], ["issue-token"], ["serve", "--bogus"], ["revoke-token", "--id"]])
def test_wrong_usage_exits_with_2_and_no_traceback(argv: list[str]) -> None:
    done = run(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_an_error_is_one_line_and_the_status_of_its_class(tmp_path: Path) -> None:
    argv = ("serve", "--config", str(tmp_path / "missing.toml"))
    done = process(*argv, debug=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"microvm-mcp: The configuration {tmp_path / 'missing.toml'} can't be read: No such file or directory."
    ]
    assert "Traceback" in process(*argv, debug=True).stderr


def all_errors() -> list[MicrovmError]:
    """RateLimited's own argument aside, they are all made alike."""
    return [RateLimited("m", retry_after_s=3) if kind is RateLimited else kind("m") for kind in PUBLIC_ERRORS]


@pytest.mark.parametrize("error", [*all_errors(), KeyError("secret")], ids=lambda error: type(error).__name__)
def test_every_error_class_has_its_status(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(only: str | None = None) -> typer.Typer:
        raise error

    monkeypatch.setattr(command_line, "build", fail)
    monkeypatch.setenv("MICROVM_DEBUG", "0")
    with pytest.raises(SystemExit) as exit_:
        command_line.main()
    shown = capsys.readouterr()
    assert (exit_.value.code, shown.out) == (error.exit_status if isinstance(error, MicrovmError) else 1, "")
    assert len(shown.err.splitlines()) == 1
    assert "secret" not in shown.err


SLOW = ("mcp", "starlette", "uvicorn", "httpx2", "qemu")


def test_one_command_imports_neither_the_others_nor_what_is_slow() -> None:
    script = (
        "import sys; sys.argv = ['microvm-mcp', 'revoke-token', '--help']\n"
        "from microvm_mcp.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    loaded = done.stdout.split("LOADED ")[1].split()
    assert "microvm_mcp.cli.admin" in loaded
    assert not [name for name in loaded if name.split(".")[0] in SLOW]
    assert not [name for name in loaded if name.startswith("microvm_mcp.imaging")]
