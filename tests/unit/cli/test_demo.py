"""The demo's fragment: valid TOML, one table per tool, equal to the golden file, and no token anywhere."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from microvm_mcp.cli import demo
from microvm_mcp.errors import Detail, InvalidArguments
from microvm_mcp.service.catalog import TOOLS

GOLDEN = Path(__file__).parent / "demo-manifest.golden.toml"
ENDPOINT = "https://vms.example:8443"

app = Typer(pretty_exceptions_enable=False)
app.command()(demo.demo_manifest)


def manifest(endpoint: str = ENDPOINT, vm_class: str = "standard") -> str:
    result = CliRunner().invoke(app, ["--endpoint", endpoint, "--vm-class", vm_class], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_fragment_is_the_golden_one() -> None:
    """UPDATE_GOLDEN=1 writes it anew; look at the difference before committing it."""
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(manifest(), encoding="utf-8")
    assert manifest() == GOLDEN.read_text(encoding="utf-8")


def test_it_is_toml_with_one_table_per_tool_and_the_catalogues_schemas() -> None:
    tables = tomllib.loads(manifest())["tools"]
    assert [table["name"] for table in tables] == [tool.name for tool in TOOLS]
    for table, tool in zip(tables, TOOLS, strict=True):
        assert table == {
            "name": tool.name,
            "description": tool.description,
            "class": "standard",
            "kind": "host_fetch",
            "method": "POST",
            "url": f"{ENDPOINT}/v1/tools/{tool.name}",
            "secret": "microvm_workspace",
            "input_schema": tool.input_schema,
        }


def test_the_head_says_what_an_operator_of_the_demo_must_know() -> None:
    head = "\n".join(line for line in manifest().splitlines() if line.startswith("#"))
    for words in ("[secrets.microvm_workspace]", "file = ", "https", "allowed_hosts", "status and body"):
        assert words in head
    assert "one demo instance per" in head
    assert "authorises nothing" in head


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:8090", "http://127.0.0.1:8090/", "http://[::1]:8090"])
def test_a_loopback_endpoint_may_be_http(endpoint: str) -> None:
    assert f'url = "{endpoint.rstrip("/")}/v1/tools/vm_create"' in manifest(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["http://vms.example", "vms.example", "https://", "https://u:p@vms.example", ""]
)
def test_an_endpoint_that_would_expose_the_token_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArguments, match="--endpoint"):
        manifest(endpoint)


def test_a_class_is_quoted_and_needed() -> None:
    assert tomllib.loads(manifest(vm_class='a"b\\c'))["tools"][0]["class"] == 'a"b\\c'
    with pytest.raises(InvalidArguments):
        manifest(vm_class="")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_as_a_toml_string(text: str) -> None:
    value: Detail = {text: [text, {text: 1}]}
    assert tomllib.loads(f"a = {demo._value(value)}") == {"a": json.loads(json.dumps(value))}
