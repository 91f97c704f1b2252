"""Administrative commands: tokens and workspaces, by hand, on the host.

They speak to the service of a state directory through its socket, and work on the database themselves where none
runs. A token is made here, written to its file here, and known to the service by its SHA-256 only: it is never
printed, logged or sent. Either the file and the row exist afterwards, or neither does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microvm_mcp.errors import Detail, FailedPrecondition, InvalidArguments, MicrovmError, PermissionDenied

if TYPE_CHECKING:
    from microvm_mcp.model import InstanceId, WorkspaceName
    from microvm_mcp.store.database import Database

ANSWER_S = 20.0
STOP_S = 150.0
"""Longer than the service itself waits for the death of its machines."""

StateDir = Annotated[
    Path, typer.Option("--state-dir", metavar="DIR", help="State directory of the service (state_dir).")
]
Name = Annotated[
    str, typer.Option("--workspace", metavar="NAME", help="1 to 63 lower-case letters, digits and hyphens.")
]
MaxVms = Annotated[int | None, typer.Option("--max-vms", metavar="N", help="Machines it may have.")]
MaxMemory = Annotated[int | None, typer.Option("--max-memory-mib", metavar="N", help="Memory of them all, MiB.")]
MaxStorage = Annotated[
    int | None, typer.Option("--max-storage-gib", metavar="N", help="Storage reserved for them all, GiB.")
]
DEFAULT_STATE_DIR = Path("/var/lib/microvm-mcp")


def issue_token(
    workspace: Name,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="Where the token goes (0600); must not exist.")
    ],
    ttl: Annotated[int, typer.Option("--ttl", metavar="SECONDS", help="60 to 34560000 (400 days).")],
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Its machines may have a network.")
    ] = False,
    max_vms: MaxVms = None,
    max_memory_mib: MaxMemory = None,
    max_storage_gib: MaxStorage = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Issue a token for a workspace and print its id. The first token for a name makes the workspace.

    The token is written to FILE and nowhere else. It belongs to the program that talks to the service: not into a
    prompt, a tool argument, a guest or an image. Limits that are left out are the configuration's.
    """
    from microvm_mcp.service.admin import digest_of, new_token

    token = new_token()
    params: dict[str, Detail] = {
        "workspace": workspace,
        "token_sha256": digest_of(token),
        "ttl_seconds": ttl,
        "allow_network": allow_network,
        **_given(max_vms=max_vms, max_memory_mib=max_memory_mib, max_storage_gib=max_storage_gib),
    }
    write_secret(output, token)
    try:
        answer = call(state_dir, "issue_token", params)
    except BaseException:
        # Not registered, or not known whether: a token that nobody has opens nothing.
        output.unlink(missing_ok=True)
        raise
    typer.echo(str(answer["token_id"]))
    typer.echo(f"token for workspace {workspace} until {_day(answer['expires_at'])} is in {output}", err=True)


def set_workspace(
    workspace: Name,
    allow_network: Annotated[
        bool | None, typer.Option("--allow-network/--no-allow-network", help="Whether machines may have a network.")
    ] = None,
    max_vms: MaxVms = None,
    max_memory_mib: MaxMemory = None,
    max_storage_gib: MaxStorage = None,
    reset: Annotated[
        list[str] | None,
        typer.Option("--reset", metavar="LIMIT", help="max-vms, max-memory-mib or max-storage-gib: as configured."),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Change a workspace's limits or network permission; what is left out stays. Prints the policy."""
    params: dict[str, Detail] = {
        "workspace": workspace,
        **_given(
            allow_network=allow_network,
            max_vms=max_vms,
            max_memory_mib=max_memory_mib,
            max_storage_gib=max_storage_gib,
        ),
    }
    if reset:
        params["reset"] = [limit.replace("-", "_") for limit in reset]
    policy = call(state_dir, "set_workspace", params)["policy"]
    assert isinstance(policy, dict)
    for key, value in policy.items():
        typer.echo(f"{key} = {_shown(value)}")


def revoke_token(
    token_id: Annotated[
        str, typer.Option("--id", metavar="ID", help="The id that was printed when the token was issued.")
    ],
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """End one token, from the next request on. Machines and other tokens of the workspace stay."""
    answer = call(state_dir, "revoke_token", {"token_id": token_id})
    typer.echo(f"revoked {answer['token_id']} of workspace {answer['workspace']}")


def revoke_workspace(
    workspace: Name,
    stop: Annotated[bool, typer.Option("--stop", help="End its machines, and wait until they are dead.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """End every token of a workspace, for good; no new one can be issued. Machines run on without --stop."""
    answer = call(
        state_dir,
        "revoke_workspace",
        {"workspace": workspace, "stop": stop},
        deadline_s=STOP_S if stop else ANSWER_S,
    )
    typer.echo(f"revoked workspace {answer['workspace']}")
    if stop:
        typer.echo(f"ended {answer['stopped']} machines; none of this workspace runs")


def write_secret(path: Path, secret: str) -> None:
    """A new file of mode 0600 with one line, durable when this returns; no trace of it if this raises."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InvalidArguments(f"{path} exists; name a file that does not exist yet.") from None
    except OSError as error:
        raise InvalidArguments(f"{path} can't be made: {error.strerror}.") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"{secret}\n".encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise FailedPrecondition(f"{path} can't be written: {error.strerror}.") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def call(
    state_dir: Path, method: str, params: Mapping[str, Detail], *, deadline_s: float = ANSWER_S
) -> dict[str, Detail]:
    """Through the service's socket, or on the database where no service listens."""
    from microvm_mcp.host.instance import InstanceRefused, check_state_dir, read_instance_id, tag_of
    from microvm_mcp.transport import local

    try:
        check_state_dir(state_dir)
        instance = read_instance_id(state_dir)
    except PermissionError:
        return local.call(_find_socket(state_dir), method, params, deadline_s=deadline_s)
    except InstanceRefused as refused:
        if os.geteuid() != 0 and state_dir.exists():
            return local.call(_find_socket(state_dir), method, params, deadline_s=deadline_s)
        raise FailedPrecondition(f"{refused}.") from refused
    if instance is not None:
        try:
            return local.call(socket_of(tag_of(instance)), method, params, deadline_s=deadline_s)
        except local.NotRunning:
            pass
    return asyncio.run(_directly(state_dir, instance, method, params))


def socket_of(tag: str) -> Path:
    from microvm_mcp.host.instance import RUN_DIR
    from microvm_mcp.transport.local import socket_path

    return socket_path(RUN_DIR, tag)


def _find_socket(state_dir: Path) -> Path:
    """For members of the group, who can't look into the state directory: ask the services that run."""
    from microvm_mcp.host.instance import RUN_DIR
    from microvm_mcp.transport import local

    for path in sorted(RUN_DIR.glob("*/service.sock")):
        try:
            about = local.call(path, "ping", {}, deadline_s=ANSWER_S)
        except (local.NotRunning, MicrovmError):
            continue
        if about.get("state_dir") == str(state_dir):
            return path
    raise PermissionDenied(
        f"No service that you may administer runs with the state directory {state_dir}; run the command as root."
    )


async def _directly(
    state_dir: Path, instance: InstanceId | None, method: str, params: Mapping[str, Detail]
) -> dict[str, Detail]:
    from microvm_mcp.service.admin import Administration
    from microvm_mcp.service.clock import SystemClock
    from microvm_mcp.store.database import Database

    async with await Database.open(state_dir / "service.db") as db:

        async def prove_stopped(workspace: WorkspaceName) -> int:
            return await _prove_stopped(db, instance, workspace)

        return await Administration(db, SystemClock(), stop=prove_stopped).call(method, dict(params))


async def _prove_stopped(db: Database, instance: InstanceId | None, workspace: WorkspaceName) -> int:
    """0 if no VMM of the workspace lives. Ending one is for the service, which knows what else belongs to it."""
    from microvm_mcp.host import cgroup
    from microvm_mcp.host.instance import tag_of
    from microvm_mcp.store import vms

    rows = [vm for vm in await db.read(vms.retained) if vm.workspace == workspace]
    mount = cgroup.find_mount()
    for vm in rows:
        in_cgroup = (
            instance is not None
            and mount is not None
            and vm.slot is not None
            and cgroup.is_populated(cgroup.parent(mount, tag_of(instance)) / str(vm.slot))
        )
        if in_cgroup or _is_alive(vm.vmm_pid, vm.vmm_started_ticks):
            raise FailedPrecondition(
                "The service does not run but machines of this workspace do: start it with `microvm-mcp serve`, "
                "then repeat this command."
            )
    return 0


def _is_alive(pid: int | None, started_ticks: int | None) -> bool:
    """Whether that very process is there; pids are reused, start times tell."""
    if pid is None or started_ticks is None:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The command name, second, may hold blanks and brackets; the start time is field 22.
    return int(stat.rpartition(")")[2].split()[19]) == started_ticks


def _given(**values: int | None) -> dict[str, Detail]:
    return {name: value for name, value in values.items() if value is not None}


def _shown(value: Detail) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "default" if value is None else str(value)


def _day(at: Detail) -> str:
    assert isinstance(at, int | float)
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
