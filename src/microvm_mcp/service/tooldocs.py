"""`docs/tools.md`, made from the catalogue: `python -m microvm_mcp.service.tooldocs > docs/tools.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import cast

from microvm_mcp.errors import PUBLIC_ERRORS
from microvm_mcp.service.catalog import TOOLS, Tool
from microvm_mcp.service.jsonschema import Json, JsonObject

_HEAD = """\
# Tools

<!-- Made by `python -m microvm_mcp.service.tooldocs`; a test compares. Edit `service/catalog.py` instead. -->

One catalogue behind both doors: over MCP at `/mcp` under these names, over HTTP as `POST /v1/tools/NAME` with the
arguments as the JSON body. Validation, authorisation and results are the same.

* **Arguments** are strict: unknown ones are refused, an optional one is left out and never null, an integral float
  is an integer, text has no NUL. Sizes of text are counted in bytes of UTF-8.
* **`request_id`** makes a call safe to repeat. The same id with the same arguments is answered from what the first
  call did (and joins it while it goes on); with other arguments, or for another tool, it is a `conflict`. Defaults
  count as if written out; `wait_seconds` does not count. Ids are kept for at least 24 hours. After a refusal the id
  is free again.
* **Waiting**: no call takes longer than 45 seconds. What takes longer answers with the state reached and goes on.
* **Times** are RFC 3339 in UTC with milliseconds. Fields that do not apply are null. Later versions may add fields
  to results, and states.
* **Somebody else's id** and an unknown or malformed one are the same `not_found`.
"""


def render(tools: Sequence[Tool]) -> str:
    return "\n".join([_HEAD, *(line for tool in tools for line in _tool(tool)), *_errors()])


def _tool(tool: Tool) -> Iterator[str]:
    yield f"## {tool.name}\n"
    yield f"{tool.description}\n"
    yield "| argument | type | default | |"
    yield "|---|---|---|---|"
    properties = cast("dict[str, JsonObject]", tool.input_schema["properties"])
    required = cast("list[str]", tool.input_schema.get("required", []))
    for name, schema in properties.items():
        default = "required" if name in required else _code(schema["default"]) if "default" in schema else ""
        yield f"| `{name}` | {_type(schema)} | {default} | {schema['description']} |"
    for name, sentence in tool.reserved.items():
        yield f"| `{name}` | | | {sentence} |"
    yield f"\n```json\n{_pretty(tool.example.arguments)}\n```\n\nanswers\n"
    yield f"```json\n{_pretty(tool.example.result)}\n```\n"


def _type(schema: JsonObject) -> str:
    words = [str(schema["type"])]
    if "enum" in schema:
        words = [" or ".join(_code(value) for value in cast("list[Json]", schema["enum"]))]
    if "minimum" in schema:
        words.append(f"from {schema['minimum']}")
    if "maximum" in schema:
        words.append(f"to {schema['maximum']}")
    if "pattern" in schema:
        words.append(_code(schema["pattern"]))
    if isinstance(schema.get("properties"), dict):
        words.append("of " + ", ".join(_code(name) for name in cast("JsonObject", schema["properties"])))
    return " ".join(words)


def _errors() -> Iterator[str]:
    yield "## Errors\n"
    yield 'Over HTTP the status and `{"error": {"code", "message", "retryable", "details"?}}`; over MCP the same'
    yield "object as text with `isError`. A message is the fact, then the way out, without what was sent.\n"
    yield "| code | HTTP | `microvm-mcp vm` exits with | retryable |"
    yield "|---|---|---|---|"
    for error in PUBLIC_ERRORS:
        yield f"| `{error.code}` | {error.http_status} | {error.exit_status} | {'yes' if error.retryable else ''} |"
    yield ""


def _code(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{text}`"


def _pretty(value: JsonObject) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    sys.stdout.write(render(TOOLS))
