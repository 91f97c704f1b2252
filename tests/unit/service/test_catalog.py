"""What the catalogue advertises: plain schemas, words within limits, a list cheap to carry, docs in step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import jsonschema  # type: ignore[import-untyped]
import pytest

from microvm_mcp.service import catalog, vms
from microvm_mcp.service.jsonschema import Json, JsonObject
from microvm_mcp.service.openapi import openapi
from microvm_mcp.service.tooldocs import render

CORE = [
    "vm_create",
    "vm_list",
    "vm_status",
    "vm_exec",
    "vm_job_status",
    "vm_job_output",
    "vm_job_cancel",
    "vm_read_file",
    "vm_write_file",
    "vm_suspend",
    "vm_resume",
    "vm_destroy",
]

MAX_LIST_CHARS = 14_000
"""Under 4,000 tokens with room: o200k counts 3,280 for 13,162 characters of this list, cl100k 3,149."""

LATER = {"network", "template", "idle_seconds", "idle_mode", "mode", "force", "cold"}

every_tool = pytest.mark.parametrize("tool", catalog.TOOLS, ids=lambda tool: tool.name)


def nodes(schema: Json, path: str = "") -> Iterator[tuple[str, JsonObject]]:
    """Every schema node, with the path of property names that leads to it."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    properties = schema.get("properties")
    if isinstance(properties, dict):
        for name, below in properties.items():
            yield from nodes(below, f"{path}.{name}")
    yield from nodes(schema.get("items"), f"{path}[]")
    yield from nodes(schema.get("additionalProperties"), f"{path}{{}}")


def test_the_core_twelve_are_listed_in_a_stable_order() -> None:
    assert [tool.name for tool in catalog.listed("core")] == CORE
    assert [tool.name for tool in catalog.listed("all")] == CORE


@every_tool
def test_input_schemas_are_plain(tool: catalog.Tool) -> None:
    text = json.dumps(tool.input_schema)
    for word in ("$ref", "$defs", "anyOf", "oneOf", "allOf", "null", '"format"', '"title"', '"ge"', '"le"'):
        assert word not in text
    for path, node in nodes(tool.input_schema):
        assert isinstance(node["type"], str), path
        if "properties" in node:
            assert node["additionalProperties"] is False, path


@every_tool
def test_every_parameter_is_described_with_its_default(tool: catalog.Tool) -> None:
    required = cast("list[str]", tool.input_schema.get("required", []))
    for path, node in nodes(tool.input_schema):
        if not path or path.endswith("{}"):
            continue
        description = node["description"]
        assert isinstance(description, str)
        assert 0 < len(description) <= 120, path
        name = path.lstrip(".")
        assert name in required or "default" in node or "default" in description, path


@every_tool
def test_no_parameter_names_an_owner_or_a_secret(tool: catalog.Tool) -> None:
    for path, _ in nodes(tool.input_schema):
        assert not any(word in path for word in ("workspace", "owner", "token", "user", "session"))


@every_tool
def test_what_arrives_later_is_not_advertised(tool: catalog.Tool) -> None:
    advertised = set(cast("JsonObject", tool.input_schema["properties"]))
    assert not advertised & (LATER if tool.name != "vm_write_file" else LATER - {"mode"})


@every_tool
def test_output_schemas_are_open_objects_without_references(tool: catalog.Tool) -> None:
    text = json.dumps(tool.output_schema)
    assert tool.output_schema["type"] == "object"
    assert "additionalProperties" not in text
    assert "$ref" not in text
    assert "default" not in text


@every_tool
def test_words_are_short_enough_for_clients(tool: catalog.Tool) -> None:
    assert 20 < len(tool.description) <= 600
    assert len(tool.title) <= 24


def test_instructions_fit_what_clients_keep() -> None:
    assert len(catalog.INSTRUCTIONS.encode()) < 2048
    for name in ("vm_create", "vm_exec", "vm_job_output", "vm_destroy", "request_id"):
        assert name in catalog.INSTRUCTIONS


def test_the_whole_list_stays_under_its_budget() -> None:
    whole = json.dumps({"tools": [tool.listing() for tool in catalog.TOOLS]}, separators=(",", ":"))
    assert len(whole) <= MAX_LIST_CHARS


@every_tool
def test_examples_are_valid_both_ways(tool: catalog.Tool) -> None:
    tool.prepare(dict(tool.example.arguments))
    jsonschema.validate(tool.example.arguments, tool.input_schema)
    jsonschema.validate(tool.example.result, tool.output_schema)
    tool.result.model_validate(tool.example.result)


def test_tools_that_run_or_make_something_need_a_request_id() -> None:
    assert {tool.name for tool in catalog.TOOLS if tool.needs_request_id} == {"vm_create", "vm_exec"}


@every_tool
def test_hints_say_what_the_tool_does(tool: catalog.Tool) -> None:
    looks = {"vm_list", "vm_status", "vm_job_status", "vm_job_output", "vm_read_file"}
    destroys = {"vm_exec", "vm_write_file", "vm_job_cancel", "vm_destroy"}
    hints = tool.hints.as_json()
    assert hints["readOnlyHint"] is (tool.name in looks)
    if tool.name in looks:
        assert "destructiveHint" not in hints
    else:
        assert hints["destructiveHint"] is (tool.name in destroys)
        assert hints["idempotentHint"] is True


def test_the_openapi_document_has_every_tool_and_the_token() -> None:
    document = openapi(catalog.TOOLS, version="1.2.3")
    paths = cast("JsonObject", document["paths"])
    assert set(paths) == {f"/v1/tools/{name}" for name in CORE}
    assert document["security"] == [{"workspaceToken": []}]
    assert cast("JsonObject", document["info"])["version"] == "1.2.3"
    json.dumps(document, allow_nan=False)


def test_the_page_on_tools_is_what_the_catalogue_says() -> None:
    page = Path(__file__).parents[3] / "docs" / "tools.md"
    assert page.read_text() == render(catalog.TOOLS), "run `python -m microvm_mcp.service.tooldocs > docs/tools.md`"


def test_words_on_what_arrives_later_say_the_way_out() -> None:
    sentences = {sentence for tool in catalog.TOOLS for sentence in tool.reserved.values()}
    for sentence in (*sentences, vms.NETWORK_LATER, vms.SUSPEND_LATER, vms.RESUME_LATER):
        assert "later version" in sentence
        assert "leave" in sentence or ";" in sentence
