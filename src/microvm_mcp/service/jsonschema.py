"""JSON schemas as they go out: plain, inlined, without titles and without null.

`input_schema` gives what every bridge to a model accepts: no $ref, no unions, no nullable types. `output_schema` is
kept minimal (names and types) and open, so that a field added later breaks no client that cached a schema.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, cast

from pydantic import BaseModel

from microvm_mcp.errors import Detail

Json = Detail
JsonObject = dict[str, Json]


def input_schema(model: type[BaseModel], *, hidden: Collection[str] = ()) -> JsonObject:
    """`hidden`: fields that are validated but not advertised yet."""
    schema = _plain(model, "validation")
    properties = _object(schema["properties"])
    for name in hidden:
        properties.pop(name, None)
    return schema


def output_schema(model: type[BaseModel]) -> JsonObject:
    """Defaults are left out: in a result they only mean that a field may be missing."""
    schema = _plain(model, "serialization")
    properties: JsonObject = {}
    for name, node in _object(schema["properties"]).items():
        properties[name] = {key: value for key, value in _object(node).items() if key != "default"}
    return {"type": "object", "properties": properties, "required": schema["required"]}


def _plain(model: type[BaseModel], mode: Literal["validation", "serialization"]) -> JsonObject:
    schema = cast("JsonObject", model.model_json_schema(mode=mode))
    definitions = _object(schema.pop("$defs", {}))
    schema.pop("description", None)
    return _object(_walk(schema, definitions, is_names=False))


def _object(node: Json) -> JsonObject:
    if not isinstance(node, dict):
        raise TypeError("a schema node that must be an object is none")
    return node


def _walk(node: Json, definitions: JsonObject, *, is_names: bool) -> Json:
    """`is_names`: the keys of this object are property names, not keywords of the schema language."""
    if isinstance(node, list):
        return [_walk(item, definitions, is_names=False) for item in node]
    if not isinstance(node, dict):
        return node
    if not is_names:
        node = _without_null(_inlined(node, definitions))
    return {
        key: _walk(value, definitions, is_names=key == "properties" and not is_names)
        for key, value in node.items()
        if is_names or key != "title"
    }


def _inlined(node: JsonObject, definitions: JsonObject) -> JsonObject:
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return node
    target = dict(_object(definitions[reference.rsplit("/", 1)[1]]))
    target.pop("description", None)  # the docstring of a nested model; the field that uses it has its own words
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def _without_null(node: JsonObject) -> JsonObject:
    """`T | null` is how an omittable field looks to pydantic; to a caller it is a T that may be left out."""
    options = node.get("anyOf")
    if not isinstance(options, list):
        return node
    kept = [option for option in options if option != {"type": "null"}]
    if len(kept) == 1:
        rest = {key: value for key, value in node.items() if key != "anyOf" and (key, value) != ("default", None)}
        return {**_object(kept[0]), **rest}
    return node
