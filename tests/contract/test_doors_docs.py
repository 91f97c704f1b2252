"""What `docs/clients.md` says of the errors is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from microvm_mcp.errors import PUBLIC_ERRORS

CLIENTS = Path(__file__).parents[2] / "docs" / "clients.md"


def test_the_table_of_errors_has_each_code_with_its_two_statuses() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (\d+) \| (\d+) \|", CLIENTS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {code: (int(http), int(exit_status)) for code, http, exit_status in rows}
    assert documented == {error.code: (error.http_status, error.exit_status) for error in PUBLIC_ERRORS}
