"""The parser of both doors: what it accepts, what it refuses, and that it never repeats what it was sent."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm_mcp.errors import InvalidArguments
from microvm_mcp.transport.json_body import MAX_DEPTH, JsonValue, parse_json

REFUSED: dict[str, bytes] = {
    "empty": b"",
    "garbage": b"SECRET",
    "trailing data": b'{"a":1} SECRET',
    "single quotes": b"{'SECRET':1}",
    "trailing comma": b'{"a":1,}',
    "control character in a string": b'"SECRET\x01"',
    "duplicate key": b'{"SECRET":1,"SECRET":1}',
    "duplicate key by escape": b'{"a":1,"\\u0061":2}',
    "duplicate key deep inside": b'{"a":[{"b":1,"b":2}]}',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":Infinity}',
    "minus Infinity": b'{"a":-Infinity}',
    "float overflow": b'{"a":1e999}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "bad UTF-8": b'{"a":"\xff"}',
    "a surrogate encoded as UTF-8": b'{"a":"\xed\xa0\x80"}',
    "lone high surrogate": b'{"a":"\\ud800"}',
    "lone low surrogate": b'{"a":"\\uDFFFx"}',
    "swapped pair": b'{"a":"\\udc00\\ud800"}',
    "lone surrogate as a key": b'{"\\ud800":1}',
    "integer of 65 bits": b'{"a":9223372036854775808}',
    "integer of a million digits": b"9" * 400_000,
    "negative integer of 65 bits": b"-9223372036854775809",
    "deep arrays": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "deeper than any stack": b"[" * 200_000 + b"]" * 200_000,
    "never closed": b"[" * 200_000,
    "deep objects": b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    "leading zero": b"01",
    "hexadecimal": b"0x10",
    "NUL byte between tokens": b"{\x00}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_parsers_read_differently_is_refused_without_echo(name: str) -> None:
    with pytest.raises(InvalidArguments) as refusal:
        parse_json(REFUSED[name])
    assert "SECRET" not in refusal.value.message
    assert refusal.value.__cause__ is None


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"{}", {}),
        (b' {"a" : [1, -2, 3.5, true, null, "x"]}\r\n', {"a": [1, -2, 3.5, True, None, "x"]}),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'"\\\\ud800"', "\\ud800"),
        ('"\u00e9\u20ac"'.encode(), "\u00e9\u20ac"),
        (b"9223372036854775807", 2**63 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b'"' + b"[" * 1000 + b'"', "[" * 1000),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)),
        (b"[" + b"[]," * 500 + b"[]]", [[]] * 501),
    ],
)
def test_ordinary_json_is_read_as_it_stands(body: bytes, value: JsonValue) -> None:
    assert parse_json(body) == value


def test_an_integral_float_stays_a_float_for_the_schemas_to_judge() -> None:
    parsed = parse_json(b"[1024.0, 1e3]")
    assert isinstance(parsed, list)
    assert [type(item) for item in parsed] == [float, float]


_scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=30,
)


@given(_values, st.booleans())
def test_whatever_json_writes_is_read_back_equal(value: JsonValue, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_a_value_or_the_one_refusal(body: bytes) -> None:
    with contextlib.suppress(InvalidArguments):
        json.dumps(parse_json(body), allow_nan=False).encode()
