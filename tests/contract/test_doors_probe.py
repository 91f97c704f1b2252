"""The probe client against a listening service: its answers, its exit status, and what it is made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.listening import Listening, listening

PROBE = Path(__file__).parents[2] / "examples" / "probe_client.py"
FORBIDDEN = {"httpx2", "mcp", "pydantic", "microvm_mcp"}


async def probe(service: Listening, asked: object, **env: str) -> tuple[int, object]:
    code, out, _ = await service.run(sys.executable, "-I", str(PROBE), stdin=json.dumps(asked).encode(), env=env)
    return code, json.loads(out) if out else None


async def test_the_probe_prints_a_result_an_error_and_wrong_use(tmp_path: Path) -> None:
    async with listening(tmp_path) as service:
        code, created = await probe(service, {"tool": "vm_create", "args": {"request_id": "probe-1"}})
        assert isinstance(created, dict)
        assert (code, created["state"]) == (0, "running")
        code, failed = await probe(service, {"tool": "vm_status", "args": {"vm_id": "vm-nothing"}})
        assert isinstance(failed, dict)
        assert (code, failed["error"]["code"]) == (1, "not_found")
        code, failed = await probe(service, {"tool": "../../openapi.json"})
        assert isinstance(failed, dict)
        assert (code, failed["error"]["code"]) == (1, "not_found")
        wrong: object
        for wrong in ([], {}, {"tool": 1}, {"tool": "vm_list", "args": []}):
            assert await probe(service, wrong) == (2, None)
        assert await probe(service, {"tool": "vm_list"}, MICROVM_URL="http://vms.example") == (2, None)
        assert await probe(service, {"tool": "vm_list"}, MICROVM_TOKEN_FILE=str(tmp_path / "none")) == (2, None)
    assert await probe(service, {"tool": "vm_list"}) == (3, None)


def test_the_probe_needs_the_standard_library_only() -> None:
    text = PROBE.read_text(encoding="utf-8")
    for name in FORBIDDEN:
        assert f"import {name}" not in text
        assert f"from {name}" not in text
