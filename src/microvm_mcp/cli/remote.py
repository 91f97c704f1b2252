"""The command line's side of the HTTP door: where the service is, the token, one call, and its errors as ours.

The token is read from a file, goes into the one header it belongs in, and is never printed. It is sent in the clear
to this machine only: any other address must be https. Every call is safe to repeat (a request id, or an effect that
is the same twice), so a broken connection is tried again before it is reported.
"""

from __future__ import annotations

import ipaddress
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, cast
from urllib.parse import urlsplit

import httpx2

from microvm_mcp.errors import (
    PUBLIC_ERRORS,
    Detail,
    FailedPrecondition,
    InvalidArguments,
    MicrovmError,
    RateLimited,
    Unavailable,
)

Result = dict[str, Detail]

ANSWER_S: Final = 60.0
"""No call of the service blocks longer than 45 s."""
_ATTEMPTS: Final = 3
_PAUSE_S: Final = 0.5
_LONGEST_RETRY_AFTER_S: Final = 30


class Remote:
    def __init__(self, url: str, token: str) -> None:
        check_endpoint(url, "MICROVM_URL")
        self._http = httpx2.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(ANSWER_S, connect=10.0),
            # A proxy of the environment must not see what stays on this machine.
            trust_env=not on_loopback(url),
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Remote:
        url, file = environ.get("MICROVM_URL", ""), environ.get("MICROVM_TOKEN_FILE", "")
        if not url or not file:
            raise FailedPrecondition(
                "Set MICROVM_URL to the service's address and MICROVM_TOKEN_FILE to the file with the token."
            )
        return cls(url, _read_token(Path(file)))

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def call(self, tool: str, arguments: Mapping[str, Detail]) -> Result:
        """The tool's result, or the service's error as the class it has here."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return _result(self._http.post(f"/v1/tools/{tool}", json=dict(arguments)))
            except RateLimited as limited:
                if attempt == _ATTEMPTS:
                    raise
                time.sleep(min(limited.retry_after_s, _LONGEST_RETRY_AFTER_S))
            except httpx2.TransportError as broken:
                if attempt == _ATTEMPTS:
                    raise Unavailable(
                        f"The service did not answer ({type(broken).__name__}); check MICROVM_URL and that it runs."
                    ) from broken
                time.sleep(_PAUSE_S * attempt)
        raise AssertionError("the last attempt returns or raises")


def check_endpoint(url: str, what: str) -> None:
    """An absolute http or https address without credentials; http only where it does not leave this machine."""
    parts = urlsplit(url)
    odd = not url.isascii() or not url.isprintable() or " " in url or parts.query or parts.fragment
    if odd or parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidArguments(f"{what} must look like https://name:port.")
    if parts.username is not None or parts.password is not None:
        raise InvalidArguments(f"{what} must not carry a user or a password; the token has a file of its own.")
    if parts.scheme == "http" and not on_loopback(url):
        raise InvalidArguments(
            f"{what} must be https for another machine, or the token would travel in the clear; "
            "put a TLS proxy in front of the service."
        )


def on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_token(file: Path) -> str:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPrecondition(f"The file that MICROVM_TOKEN_FILE names cannot be read ({error}).") from None
    if mode & 0o077:
        print(f"warning: others can read the token in {file}; chmod 600 it", file=sys.stderr)
    if not token or not token.isprintable() or " " in token:
        raise FailedPrecondition("The file that MICROVM_TOKEN_FILE names holds no token.")
    return token


def _result(answer: httpx2.Response) -> Result:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Unavailable(
            f"What answered at MICROVM_URL is not the service (status {answer.status_code}); check the address."
        )
    if answer.is_success:
        return cast(Result, body)
    error = body.get("error")
    if not isinstance(error, dict):
        raise Unavailable(f"The service answered with status {answer.status_code} and no reason; try again.")
    raise _as_error(cast(Result, error))


_BY_CODE: dict[str, type[MicrovmError]] = {kind.code: kind for kind in PUBLIC_ERRORS}


def _as_error(body: Result) -> MicrovmError:
    code, message, details = body.get("code"), str(body.get("message", "")), body.get("details")
    kind = _BY_CODE.get(str(code), MicrovmError)
    if kind is RateLimited:
        seconds = details.get("retry_after_s") if isinstance(details, dict) else None
        return RateLimited(message, retry_after_s=seconds if isinstance(seconds, int) else 1)
    error = MicrovmError.__new__(kind)
    MicrovmError.__init__(error, message, details=details if isinstance(details, dict) else None)
    return error
