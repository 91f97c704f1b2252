"""What is accepted, what is refused by name, and that example and page say what the code does."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from microvm_mcp.config import Settings, keys, load_settings, parse_settings
from microvm_mcp.errors import InvalidArguments
from microvm_mcp.model import Limits

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "service.toml"
PAGE = ROOT / "docs" / "configuration.md"


def as_toml(value: object) -> str:
    """A default as the example writes it."""
    if value is None:
        return '""'
    if isinstance(value, Path):
        return json.dumps(str(value))
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def defaults() -> Iterator[tuple[str, str, str]]:
    """Dotted key, default as TOML, explanation; of tables only their keys."""
    explanations = dict(keys())

    def walk(table: BaseModel, prefix: str) -> Iterator[tuple[str, str, str]]:
        for name in type(table).model_fields:
            value = getattr(table, name)
            if isinstance(value, BaseModel):
                yield from walk(value, f"{name}.")
            else:
                yield f"{prefix}{name}", as_toml(value), explanations[f"{prefix}{name}"]

    return walk(Settings(), "")


def example_with_every_line_active() -> str:
    lines = EXAMPLE.read_text().splitlines()
    return "\n".join(line.removeprefix("#") if line[:2] != "# " else line for line in lines)


def test_an_empty_file_is_the_defaults() -> None:
    assert parse_settings("") == Settings()
    assert Settings().effective_jail_dir == Path("/var/lib/microvm-mcp/jail")
    assert Settings().effective_image_dir == Path("/var/lib/microvm-mcp/image")


def test_the_example_as_it_is_and_with_every_line_active_is_the_defaults() -> None:
    assert parse_settings(EXAMPLE.read_text()) == Settings()
    active = example_with_every_line_active()
    assert parse_settings(active) == Settings()
    flat = {
        f"{name}.{inner}" if isinstance(value, dict) else name
        for name, value in tomllib.loads(active).items()
        for inner in (value if isinstance(value, dict) else [name])
    }
    assert flat == {key for key, _, _ in defaults()}


@pytest.mark.parametrize(("key", "default", "explanation"), list(defaults()), ids=lambda value: str(value)[:40])
def test_example_and_page_show_every_key_with_default_and_explanation(
    key: str, default: str, explanation: str
) -> None:
    table, _, name = key.rpartition(".")
    text = EXAMPLE.read_text()
    section = text.split(f"\n[{table}]\n")[1] if table else text
    section = section.split("\n[")[0]
    assert f"# {explanation}\n#{name} = {default}\n" in section
    assert f"| `{key}` | `{default}` | {explanation} |\n" in PAGE.read_text()


def test_the_page_shows_no_key_that_does_not_exist() -> None:
    shown = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert shown == [key for key, _, _ in defaults()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_vm = 3", "max_vm: no such key; the nearest is max_vms."),
        ("port = 1", "port: no such key; the nearest is listen.port."),
        ("[listen]\nprot = 1", "listen.prot: no such key; the nearest is listen.port."),
        ("[rate_limits]\nburst = 1", "rate_limits: no such key; the nearest is rate_limit."),
        ('uplink = "eth0"', "uplink: no such key."),
        ('max_vms = "3"', "max_vms: must be an integer."),
        ("max_vms = true", "max_vms: must be an integer."),
        ("max_vms = 1.5", "max_vms: must be an integer."),
        ("max_vms = 0", "max_vms: must be greater than or equal to 1."),
        ("uid_base = 0", "uid_base: must be greater than or equal to 1000."),
        ("uid_base = 2147483647", "uid_base: must be less than or equal to 2147467263."),
        ("disk_reserve = 1.5", "disk_reserve: must be less than or equal to 1."),
        ("disk_reserve = nan", "disk_reserve: must be less than or equal to 1."),
        ('vmm = "firecracker"', "vmm: must be 'qemu'."),
        ('state_dir = "state"', "state_dir: must be an absolute path without '..'."),
        ('state_dir = ""', "state_dir: must be an absolute path without '..'."),
        ('jail_dir = "/a/../b"', "jail_dir: must be an absolute path without '..'."),
        ('state_dir = "/a\\u0000b"', "state_dir: must be an absolute path without '..'."),
        ('kernel_sha256 = "ABCD"', "kernel_sha256: must be 64 hex digits in lower case, or empty."),
        ('qemu = "qemu -x"', "qemu: must be an absolute path, or a name without blanks."),
        ('listen = "127.0.0.1"', "listen: must be a table."),
        ('[listen]\nhost = "localhost"', "listen.host: must be an IP address, not a name."),
        ("[listen]\nport = 0", "listen.port: must be greater than or equal to 1."),
        (
            'allowed_hosts = ["*.example.org"]',
            "allowed_hosts: must be Host header values in lower case: name or name:port, no wildcard.",
        ),
        ('allowed_hosts = "vm"', "allowed_hosts: must be a list of strings."),
        (
            'allowed_origins = ["https://example.org/"]',
            "allowed_origins: must be origins in lower case: scheme://name or scheme://name:port.",
        ),
        ("[retention]\nreceipt_hours = 1", "retention.receipt_hours: must be greater than or equal to 24."),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidArguments) as caught:
        parse_settings(text)
    assert caught.value.message == message


def test_several_problems_are_named_at_once() -> None:
    with pytest.raises(InvalidArguments, match=r"^max_vms: .*; colour: no such key"):
        parse_settings("max_vms = 0\ncolour = 1")


def test_a_refused_value_is_not_repeated() -> None:
    with pytest.raises(InvalidArguments) as caught:
        parse_settings('max_vms = "hunter2"\nstate_dir = "hunter2"\ntools = "hunter2"')
    assert "hunter2" not in caught.value.message
    assert "hunter2" not in str(caught.value.details)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_beyond_loopback_needs_a_tls_proxy_and_host_names(host: str) -> None:
    listen = f'[listen]\nhost = "{host}"\n'
    names = 'allowed_hosts = ["vm.example.org"]\n'
    for text in (listen, names + listen, f"{listen}behind_tls_proxy = true"):
        with pytest.raises(InvalidArguments, match=r"listen\.host: .*behind_tls_proxy.*allowed_hosts"):
            parse_settings(text)
    settings = parse_settings(f"{names}{listen}behind_tls_proxy = true")
    assert settings.host_names == {"vm.example.org"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", {"127.0.0.1:8090", "localhost:8090"}),
        ("[listen]\nport = 80", {"127.0.0.1", "localhost"}),
        ('[listen]\nhost = "::1"', {"[::1]:8090", "localhost:8090"}),
        ('allowed_hosts = ["vm:8443"]', {"127.0.0.1:8090", "localhost:8090", "vm:8443"}),
    ],
)
def test_on_loopback_its_own_names_are_accepted(text: str, names: set[str]) -> None:
    assert parse_settings(text).host_names == names


def test_zero_means_no_limit_of_its_own() -> None:
    assert Settings().workspace_defaults.as_limits() == Limits()
    settings = parse_settings("[workspace_defaults]\nmax_vms = 3")
    assert settings.workspace_defaults.as_limits() == Limits(max_vms=3)
    assert (Settings().memory_limit_mib(4000), Settings().storage_limit_gib(100)) == (3000, 100)
    assert parse_settings("max_memory_mib = 9000").memory_limit_mib(4000) == 9000


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().max_vms = 3


def test_a_file_that_is_missing_broken_huge_or_not_text_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    with pytest.raises(InvalidArguments, match=r"service\.toml can't be read: No such file"):
        load_settings(path)
    path.write_text("max_vms = \n")
    with pytest.raises(InvalidArguments, match=r"service\.toml: This is not TOML: .*line 1"):
        load_settings(path)
    path.write_text("max_vms = 3\nmax_vms = 4\n")
    with pytest.raises(InvalidArguments, match="not TOML"):
        load_settings(path)
    path.write_bytes(b"tools = '\xff'\n")
    with pytest.raises(InvalidArguments, match="not UTF-8"):
        load_settings(path)
    path.write_bytes(b"#" * 300_000)
    with pytest.raises(InvalidArguments, match="larger than 256 KiB"):
        load_settings(path)
    path.write_text("max_vms = 3\n")
    assert load_settings(path).max_vms == 3


def test_instance_is_an_id_or_nothing() -> None:
    assert parse_settings(f'instance = "{"0a" * 16}"').instance == "0a" * 16
    with pytest.raises(InvalidArguments, match="instance: must be the 32 hex digits"):
        parse_settings('instance = "../x"')
