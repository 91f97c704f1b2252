"""From whatever a door delivers to a checked argument model, or to an error that names fields and never values.

Two kinds of arguments get special words: those that are known but arrive with a later version (`reserved`), and
names nobody knows, which are shown only when they look like names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from microvm_mcp.errors import Detail, FailedPrecondition, InvalidArguments, TooLarge
from microvm_mcp.service.fields import TOO_LARGE
from microvm_mcp.service.schemas import Arguments

A = TypeVar("A", bound=Arguments)

_SHOWN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_MAX_FIELDS = 20
_MAX_FIELDS_IN_MESSAGE = 5

_WORDS = {
    "missing": "is required",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode, without lone surrogates",
    "int_type": "must be an integer",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "invalid_key": "names must be strings of valid Unicode",
}


def parse(model: type[A], raw: object, reserved: Mapping[str, str]) -> A:
    """`reserved`: argument name -> sentence on when it arrives; refused after all else has been found in order."""
    if not isinstance(raw, dict):
        raise InvalidArguments("Invalid arguments: send one JSON object with the tool's arguments.")
    known = {name: value for name, value in raw.items() if name not in reserved} if reserved else raw
    try:
        arguments = model.model_validate(known)
    except ValidationError as error:
        raise _public(model, error) from None
    for name, sentence in reserved.items():
        if name in raw:
            raise FailedPrecondition(sentence, details={"argument": name})
    return arguments


def _public(model: type[Arguments], error: ValidationError) -> InvalidArguments | TooLarge:
    rows: list[tuple[str, str]] = []
    types: set[str] = set()
    for found in error.errors(include_input=False, include_url=False, include_context=False):
        types.add(found["type"])
        field = _field(model, found["loc"])
        if found["type"] == "extra_forbidden":
            problem = "is no argument of this tool; it takes " + ", ".join(model.model_fields)
        else:
            problem = _WORDS.get(found["type"], found["msg"])
        if (field, problem) not in rows:
            rows.append((field, problem))
    text = "; ".join(f"{field}: {problem}" for field, problem in rows[:_MAX_FIELDS_IN_MESSAGE])
    fields: list[Detail] = [{"field": field, "problem": problem} for field, problem in rows[:_MAX_FIELDS]]
    if types == {TOO_LARGE}:
        return TooLarge(f"Too large: {text}", details={"fields": fields})
    return InvalidArguments(f"Invalid arguments: {text}", details={"fields": fields})


def _field(model: type[Arguments], loc: tuple[int | str, ...]) -> str:
    """Dotted name of the field. Keys inside a free map (environment names) are the caller's and not shown."""
    if not loc:
        return "(arguments)"
    head, rest = str(loc[0]), loc[1:]
    if not _SHOWN_NAME.fullmatch(head):
        return "(unknown)"
    field = model.model_fields.get(head)
    nested = field.annotation if field is not None else None
    if rest and isinstance(nested, type) and issubclass(nested, Arguments):
        return f"{head}.{_field(nested, rest)}"
    return head
