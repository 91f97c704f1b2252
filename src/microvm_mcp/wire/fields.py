"""Strict reading of untrusted JSON objects: every field is taken once, checked, and nothing may be left over.

Raises only WireError, whose message names the field and never repeats its value.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

_E = TypeVar("_E", bound=Enum)

MAX_INTEGER = 2**63 - 1


class WireError(Exception):
    """The peer sent what the protocol does not allow."""


class LocalError(Exception):
    """We were about to send what the protocol does not allow; nothing was sent."""


def encode_json(document: object) -> bytes:
    try:
        return _ENCODER.encode(document).encode()
    except ValueError as error:
        raise LocalError("a value cannot be written as JSON in UTF-8") from error


def decode_json(raw: bytes) -> object:
    try:
        value: object = _DECODER.decode(raw.decode())
    except (ValueError, RecursionError) as error:
        raise WireError("control payload is not JSON") from error
    return value


def utf8_length(text: str) -> int:
    """Bytes of `text` as UTF-8; WireError for a lone surrogate, which JSON's escapes can smuggle in."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise WireError("text is not Unicode") from error


class Fields:
    def __init__(self, document: object) -> None:
        if not isinstance(document, dict):
            raise WireError("not a JSON object")
        self._rest: dict[str, object] = dict(document)

    def text(self, name: str, *, max_bytes: int, pattern: re.Pattern[str] | None = None) -> str:
        value = self.take(name)
        if not isinstance(value, str) or utf8_length(value) > max_bytes:
            raise WireError(f"{name}: not a text of at most {max_bytes} bytes")
        if pattern is not None and pattern.fullmatch(value) is None:
            raise WireError(f"{name}: malformed")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_INTEGER) -> int:
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            raise WireError(f"{name}: not an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int = 0, high: int = MAX_INTEGER) -> int | None:
        if self._rest.get(name, 0) is None:
            del self._rest[name]
            return None
        return self.integer(name, low, high)

    def number(self, name: str, low: float, high: float) -> float:
        value = self.take(name)
        if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
            raise WireError(f"{name}: not a number from {low} to {high}")
        return float(value)  # type: ignore[arg-type]

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        if self._rest.get(name, 0) is None:
            del self._rest[name]
            return None
        return self.number(name, low, high)

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise WireError(f"{name}: not a boolean")
        return value

    def choice(self, name: str, choices: Mapping[str, _E]) -> _E:
        value = self.take(name)
        if not isinstance(value, str) or value not in choices:
            raise WireError(f"{name}: not one of {', '.join(choices)}")
        return choices[value]

    def take(self, name: str) -> object:
        if name not in self._rest:
            raise WireError(f"{name}: missing")
        return self._rest.pop(name)

    def end(self) -> None:
        if self._rest:
            raise WireError(f"{len(self._rest)} unknown fields")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate key")
    return out


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


# Made once: under software emulation making them costs as much as a small document.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
