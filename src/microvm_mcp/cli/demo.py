"""`demo-manifest`: the catalogue as a TOML fragment for a demo host that calls tools by HTTP on an agent's behalf.

Made from the catalogue, so that it never tells of other tools than the service has. It names the secret that the
host is to send, never a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from microvm_mcp.errors import Detail, InvalidArguments

if TYPE_CHECKING:
    from microvm_mcp.service.catalog import Tool

SECRET: Final = "microvm_workspace"  # noqa: S105 - the name of one
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

_HEAD = """\
# Tools of a microvm-mcp service, for a fast-agent demo. Made by `microvm-mcp demo-manifest`: make it again, do not
# edit it.
#
# The demo's private secrets file needs the token of the workspace that the demo acts as. Issue it on the service's
# host with `microvm-mcp issue-token`, keep the file at mode 0600, and name it there:
#
#   [secrets.{secret}]
#   file = "/path/to/the/token"
#
# The endpoint is {endpoint}
# A remote endpoint must be https, and its name must be in allowed_hosts of the service's configuration.
#
# Answers arrive wrapped, as status and body. Status 200: the body is the tool's result. Any other: the body is
# {{"error": {{"code", "message", "retryable"}}}}, and the message says what to do.
#
# All sessions of such a demo act as the same workspace and see each other's machines: run one demo instance per
# workspace. A session id that a caller sends authorises nothing.
#
# `class` is required by this format and does nothing in the service.
"""


def demo_manifest(
    endpoint: Annotated[str, typer.Option(metavar="URL", help="Address of the service as the demo reaches it.")],
    vm_class: Annotated[str, typer.Option(metavar="CLASS", help="Value of `class`, which the format requires.")],
) -> None:
    """Print a TOML fragment with one table per tool, for a fast-agent demo."""
    from microvm_mcp.cli.remote import check_endpoint
    from microvm_mcp.service.catalog import TOOLS

    check_endpoint(endpoint, "--endpoint")
    typer.echo(render_manifest(endpoint, vm_class, TOOLS), nl=False)


def render_manifest(endpoint: str, vm_class: str, tools: Sequence[Tool]) -> str:
    if not vm_class or not vm_class.isprintable():
        raise InvalidArguments("--vm-class must be a word.")
    base = endpoint.rstrip("/")
    return "\n".join(
        [_HEAD.format(secret=SECRET, endpoint=base), *(_table(base, vm_class, tool) for tool in tools)]
    )


def _table(base: str, vm_class: str, tool: Tool) -> str:
    entries: dict[str, Detail] = {
        "name": tool.name,
        "description": tool.description,
        "class": vm_class,
        "kind": "host_fetch",
        "method": "POST",
        "url": f"{base}/v1/tools/{tool.name}",
        "secret": SECRET,
    }
    lines = ["[[tools]]", *(f"{key} = {_value(value)}" for key, value in entries.items())]
    lines += _section(("tools", "input_schema"), tool.input_schema)
    return "\n".join(lines) + "\n"


def _section(path: tuple[str, ...], table: Mapping[str, Detail]) -> list[str]:
    """A table with its plain values first and the tables in it below: TOML's order, not JSON's."""
    lines = ["", f"[{'.'.join(_key(part) for part in path)}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _section((*path, key), value)
    return lines


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)


def _value(value: Detail) -> str:
    """TOML has no null, and none of our schemas needs one. JSON's strings are TOML's basic strings, DEL aside."""
    if value is None:
        raise ValueError("TOML has no null")
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
