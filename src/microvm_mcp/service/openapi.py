"""The HTTP door as an OpenAPI 3.1 document, made from the catalogue. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from microvm_mcp.errors import PUBLIC_ERRORS
from microvm_mcp.service.catalog import INSTRUCTIONS, Tool
from microvm_mcp.service.jsonschema import Json, JsonObject

_CODES: list[Json] = [error.code for error in PUBLIC_ERRORS]
_ERROR: JsonObject = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "retryable"],
            "properties": {
                "code": {"type": "string", "enum": _CODES},
                "message": {"type": "string", "description": "The fact, then the way out"},
                "retryable": {"type": "boolean", "description": "The same call may succeed later, unchanged"},
                "details": {"type": "object"},
            },
        }
    },
}


def openapi(tools: Sequence[Tool], *, version: str) -> JsonObject:
    paths: JsonObject = {f"/v1/tools/{tool.name}": {"post": _operation(tool)} for tool in tools}
    return {
        "openapi": "3.1.0",
        "info": {"title": "microvm-mcp", "version": version, "description": INSTRUCTIONS},
        "security": [{"workspaceToken": []}],
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "workspaceToken": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Issued on the host with `microvm-mcp issue-token`; opens one workspace.",
                }
            },
        },
    }


def _operation(tool: Tool) -> JsonObject:
    return {
        "operationId": tool.name,
        "summary": tool.title,
        "description": tool.description,
        "requestBody": {"required": True, "content": _json(tool.input_schema, tool.example.arguments)},
        "responses": {
            "200": {"description": "The result", "content": _json(tool.output_schema, tool.example.result)},
            "default": {"description": "An error", "content": _json({"$ref": "#/components/schemas/Error"}, None)},
        },
    }


def _json(schema: JsonObject, example: JsonObject | None) -> JsonObject:
    media: JsonObject = {"schema": schema}
    if example is not None:
        media["example"] = example
    return {"application/json": media}
