"""The kinds of values that arguments are made of: each checks itself and says what is wrong, never what came.

Python-mode pydantic takes care of exact types (a boolean is no integer, "5" is no number). Added here is what JSON
callers need besides: null is never a value, text has no NUL and no lone surrogate, and sizes are counted in bytes
of UTF-8. No message ever contains the value that was refused.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_COMMAND_BYTES = 64 * 1024
MAX_PATH_BYTES = 4096
MAX_ENV_ENTRIES = 64
MAX_ENV_BYTES = 32 * 1024
MAX_FILE_BYTES = 128 * 1024
MAX_WAIT_S = 45
MAX_TIMEOUT_S = 7 * 86_400
"""For any host; `max_job_seconds` of the configuration is usually less."""
MAX_OFFSET = 2**53 - 1
"""The largest integer that every JSON peer reads back unchanged."""

TOO_LARGE = "too_large"
"""The error type that becomes the public code of that name; every other type is `invalid_arguments`."""

_ENV_NAME_HEAD = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_")
_ENV_NAME_REST = _ENV_NAME_HEAD | frozenset("0123456789")


def _not_null(value: object) -> object:
    if value is None:
        raise PydanticCustomError("null", "must not be null; leave it out instead")
    return value


def _text(value: str) -> str:
    utf8_length(value)
    if "\0" in value:
        raise PydanticCustomError("nul", "must not contain NUL")
    return value


def _offset(value: int) -> int:
    if value > MAX_OFFSET:
        raise PydanticCustomError("offset", "must be at most 9007199254740991")
    return value


def utf8_length(value: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogate", "must be valid Unicode, without lone surrogates") from None


def _command(value: str) -> str:
    if utf8_length(value) > MAX_COMMAND_BYTES:
        raise PydanticCustomError(
            TOO_LARGE, "is over 64 KiB; put the script into a file with vm_write_file and run that"
        )
    return value


def _path(value: str) -> str:
    if utf8_length(value) > MAX_PATH_BYTES:
        raise PydanticCustomError("path", "must be at most 4096 bytes")
    return value


def _file_path(value: str) -> str:
    if ".." in value.split("/"):
        raise PydanticCustomError("path", "must not contain '..'")
    return value


def _env(value: dict[str, str]) -> dict[str, str]:
    if len(value) > MAX_ENV_ENTRIES:
        raise PydanticCustomError("env", "must have at most 64 entries")
    total = 0
    for name, content in value.items():
        if not name or name[0] not in _ENV_NAME_HEAD or not _ENV_NAME_REST.issuperset(name):
            raise PydanticCustomError("env", "names must match [A-Za-z_][A-Za-z0-9_]*")
        total += len(name) + 1 + utf8_length(_text(content))
    if total > MAX_ENV_BYTES:
        raise PydanticCustomError("env", "must be at most 32 KiB in all")
    return value


def _base64(value: object) -> bytes:
    """Standard alphabet, padded, canonical: one spelling per content, so nothing is silently dropped."""
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "must be a string of standard base64")
    if len(value) > (MAX_FILE_BYTES + 2) // 3 * 4:
        raise PydanticCustomError(TOO_LARGE, "is over 128 KiB of content; send further parts with offset")
    try:
        data = binascii.a2b_base64(value, strict_mode=True)
        canonical = base64.b64encode(data).decode() == value
    except ValueError:
        canonical = False
    if not canonical:
        raise PydanticCustomError("base64", "must be standard base64 with padding and without line breaks")
    if len(data) > MAX_FILE_BYTES:
        raise PydanticCustomError(TOO_LARGE, "is over 128 KiB of content; send further parts with offset")
    return data


T = TypeVar("T")
Omittable = Annotated[T | None, BeforeValidator(_not_null)]
"""Absent is None inside; null from outside is refused."""

Offset = Annotated[int, Field(ge=0), AfterValidator(_offset)]
Text = Annotated[str, AfterValidator(_text)]
Command = Annotated[str, Field(min_length=1), AfterValidator(_text), AfterValidator(_command)]
Path = Annotated[str, Field(min_length=1), AfterValidator(_text), AfterValidator(_path)]
FilePath = Annotated[Path, AfterValidator(_file_path)]
Env = Annotated[
    dict[str, str],
    AfterValidator(_env),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]
Base64 = Annotated[bytes, BeforeValidator(_base64), WithJsonSchema({"type": "string"})]
