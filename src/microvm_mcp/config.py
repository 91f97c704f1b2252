"""The configuration file: TOML in, frozen settings out, or one error that names the key.

Every key is declared once, here, with its default and its line of explanation; `examples/service.toml` and
`docs/configuration.md` are compared with it by a test. A key that nothing reads yet does not exist. Reading it has
no effect on the host: whether the paths, users and sizes that it names are usable is checked where they are used.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from microvm_mcp.errors import InvalidArguments
from microvm_mcp.model import Limits

SLOTS = 16_384
"""Places for machines on one host, each with a user id of its own from `uid_base` on."""

_MAX_BYTES = 256 * 1024
_HOST = re.compile(r"(?:[a-z0-9-]{1,63}(?:\.[a-z0-9-]{1,63})*|\[[0-9a-f:]+\])(?::[0-9]{1,5})?", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INSTANCE = re.compile(r"[0-9a-f]{32}")
_PROGRAM = re.compile(r"/[^\0]+|[A-Za-z0-9._+-]+", re.ASCII)
_ORIGIN = re.compile(rf"https?://{_HOST.pattern}", re.ASCII)


def _path(value: object) -> object:
    if not isinstance(value, str):
        raise PydanticCustomError("path", "must be a string")
    path = Path(value)
    if not path.is_absolute() or ".." in path.parts or "\0" in value:
        raise PydanticCustomError("path", "must be an absolute path without '..'")
    return path


def _path_or_default(value: object) -> object:
    return None if value in ("", None) else _path(value)


def _digest(value: str) -> str:
    if value and not _DIGEST.fullmatch(value):
        raise PydanticCustomError("digest", "must be 64 hex digits in lower case, or empty")
    return value


def _instance(value: str) -> str:
    if value and not _INSTANCE.fullmatch(value):
        raise PydanticCustomError(
            "instance", "must be the 32 hex digits in the file `instance` of state_dir, or empty"
        )
    return value


def _program(value: str) -> str:
    if not _PROGRAM.fullmatch(value):
        raise PydanticCustomError("program", "must be an absolute path, or a name without blanks")
    return value


def _strings(value: object) -> object:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PydanticCustomError("list", "must be a list of strings")
    return tuple(value)


def _hosts(values: tuple[str, ...]) -> tuple[str, ...]:
    if not all(_HOST.fullmatch(value) for value in values):
        raise PydanticCustomError(
            "host", "must be Host header values in lower case: name or name:port, no wildcard"
        )
    return values


def _origins(values: tuple[str, ...]) -> tuple[str, ...]:
    if not all(_ORIGIN.fullmatch(value) for value in values):
        raise PydanticCustomError("origin", "must be origins in lower case: scheme://name or scheme://name:port")
    return values


def _address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise PydanticCustomError("address", "must be an IP address, not a name") from None


AbsolutePath = Annotated[Path, BeforeValidator(_path)]
PathOrDefault = Annotated[Path | None, BeforeValidator(_path_or_default)]
Digest = Annotated[str, AfterValidator(_digest)]
Program = Annotated[str, AfterValidator(_program)]
Names = Annotated[tuple[str, ...], BeforeValidator(_strings)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class Listen(_Table):
    host: Annotated[
        str,
        AfterValidator(_address),
        Field(description="address of the listener; other than loopback needs behind_tls_proxy and allowed_hosts"),
    ] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535, description="its TCP port")] = 8090
    behind_tls_proxy: Annotated[
        bool, Field(description="true: a proxy in front of this listener terminates TLS, and only it can reach it")
    ] = False


class WorkspaceDefaults(_Table):
    max_vms: Annotated[int, Field(ge=0, description="machines per workspace; 0: the host's limit only")] = 0
    max_memory_mib: Annotated[
        int, Field(ge=0, description="memory of all its machines, MiB; 0: the host's limit only")
    ] = 0
    max_storage_gib: Annotated[
        int, Field(ge=0, description="storage reserved for its machines, GiB; 0: the host's limit only")
    ] = 0

    def as_limits(self) -> Limits:
        return Limits(self.max_vms or None, self.max_memory_mib or None, self.max_storage_gib or None)


class RateLimit(_Table):
    calls_per_minute: Annotated[
        int, Field(ge=1, le=1_000_000, description="calls of one workspace in the long run, over all doors")
    ] = 1200
    burst: Annotated[int, Field(ge=1, le=1_000_000, description="calls that may come at once after a pause")] = 100


class Retention(_Table):
    receipt_hours: Annotated[
        int, Field(ge=24, le=8760, description="a request id is remembered for at least so long")
    ] = 24
    receipts_per_workspace: Annotated[
        int, Field(ge=16, le=1_000_000, description="above so many the oldest finished ones past that time go")
    ] = 4096
    destroyed_hours: Annotated[
        int, Field(ge=24, le=8760, description="a destroyed machine and its jobs stay visible for at least so long")
    ] = 24
    destroyed_per_workspace: Annotated[
        int, Field(ge=0, le=100_000, description="so many of them stay however old they are")
    ] = 100


class Settings(_Table):
    state_dir: Annotated[
        AbsolutePath, Field(description="instance id, database and disks of machines; root's, mode 0700")
    ] = Path("/var/lib/microvm-mcp")
    instance: Annotated[
        str,
        AfterValidator(_instance),
        Field(description="instance id that state_dir must hold, which an unmounted volume does not; empty: any"),
    ] = ""
    jail_dir: Annotated[
        PathOrDefault,
        Field(
            description="run-time directories of machines, on the file system of state_dir; empty: jail inside it"
        ),
    ] = None
    image_dir: Annotated[
        PathOrDefault,
        Field(
            description="what `build-image` wrote, on the file system of state_dir; empty: image inside it",
        ),
    ] = None
    kernel: Annotated[
        PathOrDefault, Field(description="kernel; empty: the one that the manifest in image_dir names")
    ] = None
    kernel_sha256: Annotated[
        Digest, Field(description="its SHA-256 in hex, without which `serve` does not start; empty: the manifest's")
    ] = ""
    initramfs: Annotated[PathOrDefault, Field(description="initramfs; empty: the one that the manifest names")] = (
        None
    )
    initramfs_sha256: Annotated[Digest, Field(description="its SHA-256; empty: the manifest's")] = ""
    image: Annotated[
        PathOrDefault, Field(description="root file system; empty: the one that the manifest names")
    ] = None
    image_sha256: Annotated[Digest, Field(description="its SHA-256; empty: the manifest's")] = ""
    vmm: Annotated[Literal["qemu"], Field(description="the VMM that runs machines")] = "qemu"
    qemu: Annotated[Program, Field(description="QEMU, as a path or as a name that is found by PATH")] = (
        "qemu-system-x86_64"
    )
    acceleration: Annotated[
        Literal["auto", "emulation", "kvm"],
        Field(
            description="auto: KVM if a probe guest really boots under it, else emulation; kvm: refuse without it"
        ),
    ] = "auto"
    uid_base: Annotated[
        int, Field(ge=1000, le=2**31 - SLOTS - 1, description=f"first of {SLOTS} unused user ids, one per machine")
    ] = 70_000
    max_vms: Annotated[int, Field(ge=1, le=SLOTS, description="machines on this host, asleep or not")] = 64
    max_memory_mib: Annotated[
        int, Field(ge=0, description="memory of all machines, MiB; 0: three quarters of the host's")
    ] = 0
    max_storage_gib: Annotated[
        int, Field(ge=0, description="storage reserved for all machines, GiB; 0: the file system's size")
    ] = 0
    disk_reserve: Annotated[
        float,
        Field(
            ge=0.05,
            le=1.0,
            description="share of each disk that is reserved; below 1.0 full disks may fill the host",
        ),
    ] = 1.0
    min_free_gib: Annotated[
        int, Field(ge=1, le=10_000, description="really free space that creating machines never touches, GiB")
    ] = 2
    max_job_seconds: Annotated[
        int, Field(ge=60, le=31_536_000, description="longest run of a job that was given no timeout, seconds")
    ] = 86_400
    tools: Annotated[
        Literal["core", "all"], Field(description="which tools MCP lists: the core twelve, or all there are")
    ] = "core"
    allowed_hosts: Annotated[
        Names,
        AfterValidator(_hosts),
        Field(description="Host header values to accept besides the loopback names of a loopback listener"),
    ] = ()
    allowed_origins: Annotated[
        Names,
        AfterValidator(_origins),
        Field(description="Origin header values to accept; a request without that header is no browser's"),
    ] = ()
    listen: Annotated[Listen, Field(description="where MCP and HTTP are served")] = Listen()
    workspace_defaults: Annotated[
        WorkspaceDefaults, Field(description="limits of workspaces whose token was issued without")
    ] = WorkspaceDefaults()
    rate_limit: Annotated[RateLimit, Field(description="calls per workspace")] = RateLimit()
    retention: Annotated[Retention, Field(description="how long finished things are remembered")] = Retention()

    @model_validator(mode="after")
    def _not_in_the_open(self) -> Settings:
        if not self.on_loopback and not (self.listen.behind_tls_proxy and self.allowed_hosts):
            raise PydanticCustomError(
                "listen",
                "listen.host: an address other than loopback needs listen.behind_tls_proxy = true and the names of "
                "the proxy in allowed_hosts, because tokens would travel in the clear",
            )
        return self

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.listen.host).is_loopback

    @property
    def host_names(self) -> frozenset[str]:
        """Exact Host header values, lower case. On loopback its usual names, which no other site can claim."""
        names = set(self.allowed_hosts)
        if self.on_loopback:
            host = f"[{self.listen.host}]" if ":" in self.listen.host else self.listen.host
            suffix = "" if self.listen.port == 80 else f":{self.listen.port}"
            names |= {f"{host}{suffix}", f"localhost{suffix}"}
        return frozenset(names)

    @property
    def effective_jail_dir(self) -> Path:
        return self.jail_dir or self.state_dir / "jail"

    @property
    def effective_image_dir(self) -> Path:
        return self.image_dir or self.state_dir / "image"

    def memory_limit_mib(self, host_total_mib: int) -> int:
        return self.max_memory_mib or host_total_mib * 3 // 4

    def storage_limit_gib(self, file_system_gib: int) -> int:
        return self.max_storage_gib or file_system_gib


def load_settings(path: Path) -> Settings:
    """Raises InvalidArguments with the first wrong key by name, never with a value."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArguments(f"The configuration {path} can't be read: {error.strerror}.") from error
    if len(raw) > _MAX_BYTES:
        raise InvalidArguments(f"The configuration {path} is larger than {_MAX_BYTES // 1024} KiB.")
    try:
        return parse_settings(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArguments(f"The configuration {path} is not UTF-8.") from error
    except InvalidArguments as error:
        raise InvalidArguments(f"{path}: {error.message}", details=error.details) from error


def parse_settings(text: str) -> Settings:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArguments(f"This is not TOML: {error}.") from error
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        problems = [
            _problem(".".join(str(part) for part in found["loc"]), found["type"], found["msg"])
            for found in error.errors(include_input=False, include_url=False, include_context=False)
        ]
        raise InvalidArguments(f"{'; '.join(problems[:5])}.", details={"problems": list(problems)}) from None


def _problem(key: str, kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return f"{key}: no such key{_hint(key)}"
    if kind == "model_type":
        message = "must be a table"
    message = (
        message.replace("Input should be", "must be").replace("a valid", "a").replace("a integer", "an integer")
    )
    return f"{key}: {message}" if key else message


def _hint(key: str) -> str:
    known = [name for name, _ in keys()]
    last = key.rpartition(".")[2]
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    near = same_name or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:
        by_last = {name.rpartition(".")[2]: name for name in known}
        near = [by_last[found] for found in difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)]
    return f"; the nearest is {near[0]}" if near else ""


def keys() -> Iterator[tuple[str, str]]:
    """Every key by its dotted name, with its explanation; tables by their name alone."""
    for name, field in Settings.model_fields.items():
        assert field.description is not None
        yield name, field.description
        table = field.annotation
        if isinstance(table, type) and issubclass(table, _Table):
            for inner, inner_field in table.model_fields.items():
                assert inner_field.description is not None
                yield f"{name}.{inner}", inner_field.description
