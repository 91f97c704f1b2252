"""`vm`: one verb per tool, over HTTP. Reads MICROVM_URL and MICROVM_TOKEN_FILE.

Results go to stdout, in few words or with --json as the service gave them; progress, notes and errors go to stderr.
An error is one line `code: message` and the exit status of its code. `exec` ends with the status of the command, so
there a status alone does not tell the two apart; the line on stderr does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microvm_mcp.errors import Detail, InvalidArguments, MicrovmError

if TYPE_CHECKING:
    from microvm_mcp.cli.remote import Remote, Result

_INTERRUPTED = 130
_REMOTE_PATH = re.compile(r"(vm-[a-z0-9]+):(.+)", re.DOTALL)

app = typer.Typer(
    help="Machines of your workspace, over HTTP. Set MICROVM_URL and MICROVM_TOKEN_FILE (mode 0600) first.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

VmId = Annotated[str, typer.Argument(metavar="VM", help="Id of the machine.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as the service gave it.")]
RequestId = Annotated[
    str | None,
    typer.Option("--request-id", metavar="ID", help="The same one again retries safely; default: a new one."),
]


@app.command()
def create(
    memory: Annotated[int | None, typer.Option("--memory", metavar="MIB", help="RAM in MiB.")] = None,
    vcpus: Annotated[int | None, typer.Option("--cpus", metavar="N", help="Virtual CPUs.")] = None,
    disk: Annotated[int | None, typer.Option("--disk", metavar="GIB", help="Disk in GiB.")] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Label of the machine.")] = None,
    network: Annotated[str | None, typer.Option("--network", metavar="off|on", help="Outbound network.")] = None,
    request_id: RequestId = None,
    as_json: AsJson = False,
) -> None:
    """Create a machine, wait until it runs, print its id."""
    arguments = _given(memory_mib=memory, vcpus=vcpus, disk_gib=disk, name=name, network=network)
    arguments["request_id"] = request_id or _new_request_id()
    with _remote() as remote, _busy("creating the machine") as say:
        result = remote.call("vm_create", arguments)
        while result.get("state") == "creating":
            say(f"booting {result.get('vm_id')}")
            result = remote.call("vm_create", arguments)  # the same call joins what is going on
    _print(result, as_json, str(result.get("vm_id")))
    if result.get("state") not in {"running", "paused", "hibernated"}:
        print(f"failed: the machine is {result.get('state')}: {_reason(result)}", file=sys.stderr)
        raise typer.Exit(1)


@app.command("list")
def list_machines(as_json: AsJson = False) -> None:
    """List the machines of the workspace, oldest first."""
    machines: list[Detail] = []
    arguments: dict[str, Detail] = {}
    with _remote() as remote:
        while True:
            page = remote.call("vm_list", arguments)
            found, cursor = page.get("vms"), page.get("next_cursor")
            machines += found if isinstance(found, list) else []
            if not isinstance(cursor, str):
                break
            arguments = {"cursor": cursor}
    rows = [machine for machine in machines if isinstance(machine, dict)]
    columns = ("vm_id", "state", "memory_mib", "vcpus", "disk_gib", "active_jobs", "name")
    _print({"vms": machines, "next_cursor": None}, as_json, _table(rows, columns))


@app.command()
def status(vm_id: VmId, as_json: AsJson = False) -> None:
    """State of a machine and its jobs."""
    with _remote() as remote:
        result = remote.call("vm_status", {"vm_id": vm_id})
    jobs = result.get("jobs")
    rows = [job for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []
    lines = [f"{name}: {_word(value)}" for name, value in result.items() if name != "jobs"]
    if rows:
        lines += ["", _table(rows, ("job_id", "state", "exit_code", "started_at", "request_id"))]
    _print(result, as_json, "\n".join(lines))


@app.command("exec", context_settings={"allow_interspersed_args": False})
def execute(
    vm_id: VmId,
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="One word: a Bash script. More: words of a command.")
    ],
    cwd: Annotated[str | None, typer.Option("--cwd", metavar="DIR", help="Relative to /workspace.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="May be repeated.")] = None,
    timeout: Annotated[int | None, typer.Option("--timeout", metavar="S", help="Kill it after S seconds.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="A shell without profile files.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id and leave it running.")] = False,
    request_id: RequestId = None,
    as_json: AsJson = False,
) -> None:
    """Run a command, show its output until it is over, end with its exit status.

    Options come before VM; all that follows is the command. The status is 128 and the number of the signal that
    ended it, 124 after a timeout, 130 after a cancel; Ctrl-C leaves it running. With --json the answer to the start
    of the job is printed, and nothing is waited for.
    """
    from microvm_mcp.cli.follow import exit_status, follow

    arguments = _given(cwd=cwd, timeout_seconds=timeout, shell="plain" if plain else None)
    arguments |= {"vm_id": vm_id, "command": _script(command), "request_id": request_id or _new_request_id()}
    if env:
        arguments["env"] = _environment(env)
    with _remote() as remote:
        started = remote.call("vm_exec", arguments)
        job_id = str(started.get("job_id"))
        if as_json or detach:
            _print(started, as_json, job_id)
            return
        try:
            last = follow(remote, vm_id, job_id)
        except KeyboardInterrupt:
            print(f"\n{job_id} goes on; end it with: microvm-mcp vm cancel {vm_id} {job_id}", file=sys.stderr)
            raise typer.Exit(_INTERRUPTED) from None
        code = exit_status(remote, vm_id, job_id, last)
    raise typer.Exit(code)


@app.command()
def output(
    vm_id: VmId,
    job_id: JobId,
    wait: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Output of a job from its beginning."""
    from microvm_mcp.cli.follow import follow

    with _remote() as remote:
        if as_json:
            _print(remote.call("vm_job_output", {"vm_id": vm_id, "job_id": job_id}), as_json, "")
        else:
            follow(remote, vm_id, job_id, to_the_end=wait)


@app.command()
def cancel(vm_id: VmId, job_id: JobId, as_json: AsJson = False) -> None:
    """End a job with everything that it started."""
    with _remote() as remote:
        result = remote.call("vm_job_cancel", {"vm_id": vm_id, "job_id": job_id})
    _print(result, as_json, f"{job_id} {result.get('state')}")


@app.command()
def read(
    vm_id: VmId,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Relative to /workspace.")],
    offset: Annotated[int, typer.Option("--offset", metavar="N", help="First byte.")] = 0,
    length: Annotated[
        int | None, typer.Option("--length", metavar="N", help="Bytes at most, up to 128 KiB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One piece of a file to stdout, up to 128 KiB; `cp` copies whole files."""
    import base64

    with _remote() as remote:
        result = remote.call(
            "vm_read_file", {"vm_id": vm_id, "path": path, "offset": offset, **_given(length=length)}
        )
    if as_json:
        _print(result, as_json, "")
    else:
        sys.stdout.buffer.write(base64.b64decode(str(result.get("content_base64", ""))))
        if result.get("eof") is not True:
            print(f"[goes on at --offset {result.get('next_offset')}]", file=sys.stderr)


@app.command()
def write(
    vm_id: VmId,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Relative to /workspace.")],
    offset: Annotated[int | None, typer.Option("--offset", metavar="N", help="Extend a file of this size.")] = None,
    mode: Annotated[str | None, typer.Option("--mode", metavar="OCTAL", help="Permissions.")] = None,
    as_json: AsJson = False,
) -> None:
    """Stdin, up to 128 KiB, to a file; `cp` copies whole files."""
    import base64

    from microvm_mcp.cli.transfer import PIECE

    with _remote() as remote:
        content = sys.stdin.buffer.read(PIECE + 1)
        arguments = _given(offset=offset, mode=mode)
        arguments |= {"vm_id": vm_id, "path": path, "content_base64": base64.b64encode(content).decode("ascii")}
        result = remote.call("vm_write_file", arguments)
    _print(result, as_json, f"{path} {result.get('size')} bytes")


@app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A local file, or VM:PATH.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="VM:PATH, or a local file or directory.")],
) -> None:
    """Copy one file to or from a machine, of any size."""
    from microvm_mcp.cli.transfer import download, upload

    with _remote() as remote:
        up, down = _REMOTE_PATH.fullmatch(target), _REMOTE_PATH.fullmatch(source)
        if (up is None) == (down is None):
            raise InvalidArguments("Exactly one of SOURCE and TARGET must be VM:PATH, as in vm-abc123:notes.txt.")
        with _bytes_bar() as progress:
            if up is not None:
                path = up[2] + Path(source).name if up[2].endswith("/") else up[2]
                upload(remote, Path(source), up[1], path, progress)
            elif down is not None:
                download(remote, down[1], down[2], Path(target), progress)


@app.command()
def suspend(
    vm_id: VmId,
    mode: Annotated[str | None, typer.Option("--mode", metavar="hibernate|pause")] = None,
    force: Annotated[bool, typer.Option("--force", help="Although jobs run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put a machine to sleep."""
    arguments = _given(mode=mode, force=True if force else None)
    with _remote() as remote:
        result = remote.call("vm_suspend", {"vm_id": vm_id, **arguments})
    _print(result, as_json, f"{vm_id} {result.get('state')}")


@app.command()
def resume(
    vm_id: VmId,
    cold: Annotated[bool, typer.Option("--cold", help="Boot from the disk; memory and jobs are lost.")] = False,
    as_json: AsJson = False,
) -> None:
    """Wake a machine."""
    with _remote() as remote, _busy("waking the machine"):
        result = remote.call("vm_resume", {"vm_id": vm_id, **_given(cold=True if cold else None)})
    _print(result, as_json, f"{vm_id} {result.get('state')}")


@app.command()
def destroy(vm_id: VmId, as_json: AsJson = False) -> None:
    """Delete a machine with its disk, for good."""
    with _remote() as remote, _busy("destroying the machine"):
        result = remote.call("vm_destroy", {"vm_id": vm_id})
        while result.get("state") == "destroying":
            result = remote.call("vm_destroy", {"vm_id": vm_id})
    _print(result, as_json, f"{vm_id} {result.get('state')}")


@contextlib.contextmanager
def _remote() -> Iterator[Remote]:
    """A connection; what goes wrong in its block is one line on stderr and an exit status."""
    from microvm_mcp.cli.remote import Remote

    try:
        with Remote.from_environment(os.environ) as remote:
            yield remote
    except MicrovmError as error:
        print(f"{error.code}: {' '.join(error.message.split())}", file=sys.stderr)
        raise typer.Exit(error.exit_status) from error
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter must not complain about it at its end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


def _given(**arguments: str | int | bool | None) -> dict[str, Detail]:
    """Absent is left out, never null; defaults are the service's."""
    return {name: value for name, value in arguments.items() if value is not None}


def _new_request_id() -> str:
    return f"cli-{secrets.token_hex(8)}"


def _script(words: list[str]) -> str:
    import shlex

    words = words[1:] if words[0] == "--" and len(words) > 1 else words
    return words[0] if len(words) == 1 else shlex.join(words)


def _environment(pairs: list[str]) -> dict[str, Detail]:
    out: dict[str, Detail] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            print("invalid_arguments: --env takes NAME=VALUE.", file=sys.stderr)
            raise typer.Exit(InvalidArguments.exit_status)
        out[name] = value
    return out


def _print(result: Result, as_json: bool, text: str) -> None:
    print(json.dumps(result, ensure_ascii=False, indent=2) if as_json else text)


def _reason(result: Result) -> str:
    failure = result.get("failure")
    return str(failure.get("reason")) if isinstance(failure, dict) else "see vm status"


def _word(value: Detail) -> str:
    if value is None:
        return "-"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else str(value)


def _table(rows: list[dict[str, Detail]], columns: tuple[str, ...]) -> str:
    cells = [columns, *(tuple(_word(row.get(column)) for column in columns) for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    return "\n".join("  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


@contextlib.contextmanager
def _busy(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as spinner:
        yield spinner.update


@contextlib.contextmanager
def _bytes_bar() -> Iterator[Callable[[int, int], None]]:
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
