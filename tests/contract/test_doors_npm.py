"""The official TypeScript clients, from npm at pinned versions, against a listening service."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from microvm_mcp.service.catalog import INSTRUCTIONS, TOOLS
from tests.support.listening import listening

CLIENTS = Path(__file__).parent / "mcp_clients"


def node_path() -> str:
    """The environment's Node before the host's."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the lock file, installed without running anything of theirs."""
    directory = tmp_path_factory.mktemp("mcp-clients")
    for name in ("package.json", "package-lock.json", "client.mjs"):
        shutil.copy(CLIENTS / name, directory)
    argv = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(
        argv, cwd=directory, env={**os.environ, "PATH": node_path()}, check=True, capture_output=True, timeout=300
    )
    return directory


@pytest.mark.needs("npm")
@pytest.mark.timeout(360)
@pytest.mark.parametrize("mode", ["sdk", "legacy", "auto", "pinned"])
async def test_an_official_typescript_client_runs_a_command_and_reads_errors(
    clients: Path, tmp_path: Path, mode: str
) -> None:
    node = shutil.which("node", path=node_path())
    assert node is not None
    async with listening(tmp_path) as service:
        code, out, err = await service.run(node, str(clients / "client.mjs"), mode)
    assert code == 0, err.decode()
    seen = json.loads(out)
    failure = seen.pop("failure")
    assert seen == {
        "instructions": INSTRUCTIONS,
        "tools": [tool.name for tool in TOOLS],
        "stdout": "Grüße 🙂\n",
        "textIsTheSame": True,
        "status": "running",
        "listed": 1,
        "unknownTool": -32602,
        "destroyed": "destroyed",
    }
    assert (failure["isError"], failure["structured"], failure["error"]["code"]) == (True, None, "not_found")


def test_the_lock_file_pins_by_hash_and_names_no_address() -> None:
    lock = json.loads((CLIENTS / "package-lock.json").read_text(encoding="utf-8"))
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert {"node_modules/@modelcontextprotocol/client", "node_modules/@modelcontextprotocol/sdk"} <= set(packages)
    for name, entry in packages.items():
        assert entry["integrity"].startswith("sha512-"), name
        assert "resolved" not in entry or entry["resolved"].startswith("https://registry.npmjs.org/"), name
