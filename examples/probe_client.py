#!/usr/bin/env python3
"""Call one tool: `{"tool": …, "args": {…}}` as JSON on stdin, the answer as JSON on stdout. For integration checks.

MICROVM_URL is the service's address, MICROVM_TOKEN_FILE the file with the token. Standard library only. Ends with
0 for a result, 1 for an error of the service (printed as `{"error": …}`), 2 for wrong use, 3 if nothing answered.

    echo '{"tool": "vm_list"}' | MICROVM_URL=… MICROVM_TOKEN_FILE=… python3 examples/probe_client.py
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import sys
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit

ANSWER_S = 60


def main() -> int:
    try:
        url, token = urlsplit(os.environ["MICROVM_URL"]), read_token(os.environ["MICROVM_TOKEN_FILE"])
        asked = json.load(sys.stdin)
        tool, arguments = asked["tool"], asked.get("args", {})
        if not isinstance(tool, str) or not isinstance(arguments, dict):
            raise ValueError('send {"tool": "name", "args": {…}}')
        connection = connect(url)
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        print(f"wrong use: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    try:
        status, body = post(connection, f"{url.path.rstrip('/')}/v1/tools/{quote(tool, safe='')}", arguments, token)
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer: {type(error).__name__}: {error}", file=sys.stderr)
        return 3
    sys.stdout.buffer.write(body.rstrip() + b"\n")
    return 0 if status == 200 else 1


def read_token(name: str) -> str:
    return Path(name).read_text(encoding="ascii").strip()


def connect(url: SplitResult) -> http.client.HTTPConnection:
    """https, or http where the token does not leave this machine."""
    if url.scheme == "https" and url.hostname:
        return http.client.HTTPSConnection(url.hostname, url.port, timeout=ANSWER_S)
    if url.scheme == "http" and url.hostname and is_loopback(url.hostname):
        return http.client.HTTPConnection(url.hostname, url.port, timeout=ANSWER_S)
    raise ValueError("MICROVM_URL must be https://name:port, or http on this machine")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def post(
    connection: http.client.HTTPConnection, path: str, arguments: dict[str, object], token: str
) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", path, body=json.dumps(arguments).encode(), headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
