"""The one JSON parser of both doors: bytes to a value, or one clear refusal. Pure.

It accepts what every JSON implementation reads alike and refuses the rest: duplicate keys, NaN and Infinity
(written out or by overflow), a byte order mark, bytes that are no UTF-8, lone surrogates, integers beyond 64 bits,
nesting deeper than MAX_DEPTH. A peer behind us that parses the same bytes again therefore sees the same value.
Floats stay floats here; the schemas decide which of them are integers. Never puts anything of the body into a
message.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn, cast

from microvm_mcp.errors import InvalidArguments

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]

MAX_DEPTH = 64
_MAX_INT = 2**63 - 1
_MIN_INT = -(2**63)
_MAX_INT_CHARS = 20
"""`-9223372036854775808`; longer texts are refused before they are converted, which takes quadratic time."""

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """Raised inside the decoder's hooks; carries a message of ours."""


def parse_json(body: bytes) -> JsonValue:
    """The value, or InvalidArguments that says what is wrong and, for bad syntax, at which character."""
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise _invalid("it starts with a byte order mark; send UTF-8 without one")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from None
    try:
        value = cast(JsonValue, _DECODER.decode(text))
    except _Refused as error:
        raise _invalid(str(error)) from None
    except json.JSONDecodeError as error:
        raise _invalid(f"syntax error at character {error.pos}") from None
    except RecursionError:
        raise _invalid(_TOO_DEEP) from None
    # Brackets inside strings count here too: a cheap upper bound that spares nearly every body the walk.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE_ESCAPE.search(body):
        _check_surrogates(value)
    return value


_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def _invalid(problem: str) -> InvalidArguments:
    return InvalidArguments(f"The body is not acceptable JSON: {problem}.")


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _Refused("an object has the same key twice")
    return out


def _integer(text: str) -> int:
    value = int(text) if len(text) <= _MAX_INT_CHARS else _MAX_INT + 1
    if not _MIN_INT <= value <= _MAX_INT:
        raise _Refused("an integer does not fit into 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused("a number is too large")
    return value


def _constant(_name: str) -> NoReturn:
    raise _Refused("NaN and Infinity are not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_finite, parse_constant=_constant
)


def _check_depth(value: JsonValue) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node) if isinstance(child, list | dict)]
        if not level:
            return
    raise _invalid(_TOO_DEEP)


def _check_surrogates(value: JsonValue) -> None:
    waiting: list[JsonValue] = [value]
    while waiting:
        node = waiting.pop()
        waiting.extend(_children(node))
        if isinstance(node, dict):
            waiting.extend(node)
        if isinstance(node, str) and any("\ud800" <= character <= "\udfff" for character in node):
            raise _invalid("a string has half of a surrogate pair")


def _children(node: JsonValue) -> list[JsonValue]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
