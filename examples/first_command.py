"""One machine, one command, through both doors: plain HTTP and the MCP SDK's client.

Reads MICROVM_URL and MICROVM_TOKEN_FILE. The machine is named `quickstart` and is used again by the next run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

NAME = "quickstart"
COMMAND = 'echo "Hello from $(. /etc/os-release; echo "$PRETTY_NAME"), kernel $(uname -r), as $(id -un)"'


class ToolFailed(Exception):
    """The service refused; the message is its own."""


async def call(http: httpx2.AsyncClient, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await http.post(f"/v1/tools/{tool}", json=arguments)
    body: dict[str, Any] = answer.json()
    if answer.status_code != 200:
        raise ToolFailed(f"{tool}: {body['error']['code']}: {body['error']['message']}")
    return body


async def ensure_machine(http: httpx2.AsyncClient) -> str:
    """The id of a running machine named NAME; prints what it waits for."""
    for vm in (await call(http, "vm_list"))["vms"]:
        if vm.get("name") == NAME and vm["state"] == "running":
            print(f"    machine {vm['vm_id']} is running already")
            return str(vm["vm_id"])
        if vm.get("name") == NAME and vm["state"] in {"failed", "stopped"}:
            print(f"    machine {vm['vm_id']} is {vm['state']}: making a new one in its place")
            await call(http, "vm_destroy", vm_id=vm["vm_id"])
    print("    creating a machine (without KVM the first boot takes up to a minute)")
    started = time.monotonic()
    arguments = {"request_id": f"quickstart-{secrets.token_hex(6)}", "name": NAME}
    vm = await call(http, "vm_create", **arguments)
    while vm["state"] == "creating":
        vm = await call(http, "vm_create", **arguments)  # the same call joins what is going on
    if vm["state"] != "running":
        status = await call(http, "vm_status", vm_id=vm["vm_id"])
        raise ToolFailed(f"the machine is {vm['state']}: {status.get('failure')}")
    print(f"    machine {vm['vm_id']} runs after {time.monotonic() - started:.1f} s")
    return str(vm["vm_id"])


def arguments_of_exec(vm_id: str) -> dict[str, Any]:
    request_id = f"quickstart-{secrets.token_hex(6)}"
    return {"vm_id": vm_id, "request_id": request_id, "command": COMMAND, "wait_seconds": 45}


async def main(url: str, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        vm_id = await ensure_machine(http)
        answer = await call(http, "vm_exec", **arguments_of_exec(vm_id))
        print(f"    HTTP: {answer['stdout'].strip()}")
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
    ):
        result = await client.call_tool("vm_exec", arguments_of_exec(vm_id))
        if result.is_error or result.structured_content is None:
            raise ToolFailed(f"vm_exec over MCP: {result.content}")
        print(f"    MCP:  {result.structured_content['stdout'].strip()}")


if __name__ == "__main__":
    try:
        token_file = Path(os.environ["MICROVM_TOKEN_FILE"])
        asyncio.run(main(os.environ["MICROVM_URL"], token_file.read_text(encoding="ascii").strip()))
    except KeyError as missing:
        sys.exit(f"error: set {missing}; `. /var/lib/microvm-mcp/quickstart.env` does")
    except (ToolFailed, httpx2.HTTPError, OSError) as error:
        sys.exit(f"error: {error}")
