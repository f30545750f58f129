"""JSON schemas of request bodies, and /openapi.json and /docs made of the table of routes.

Settings come from the dataclasses of options, with their types, bounds and help.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from mlx_transformer.decoding.options import ID_FIELDS, Options
from mlx_transformer.page import card, data_table, page
from mlx_transformer.system.fields import FieldType, field_docs, field_types
from mlx_transformer.system.machine import __version__

from .requests import FORM, LIMITS, OPENAI, PARTS, SETTINGS

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
TEXT = {"type": "string"}
TEXTS = {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}
ID_LIST = {"type": "array", "items": {"type": "integer"}}
TEXTS_OR_IDS = {"oneOf": [*TEXTS["oneOf"], ID_LIST, {"type": "array", "items": ID_LIST}]}
IDS, SEQUENCES = {**ID_LIST, "default": ()}, {"type": "array", "items": ID_LIST, "default": ()}
FLAG = {"type": "boolean"}


@dataclass(frozen=True)
class Form:
    """The form of a request's body. fields: JSON schema by name; example: a body, as JSON; other: a second form of
    the same path.

    >>> Form({"text": TEXT}, ["text"], '{"text": "x"}').schema.get("required")
    ['text']
    """

    fields: dict[str, Any]
    needed: list[str]
    example: str
    other: Form | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the body: these fields and no others."""
        return _object(self.fields, self.needed)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def number(default: int, meaning: str, least: int = 1, most: int | None = None) -> dict[str, Any]:
    """The schema of an integer field."""
    bound = {} if most is None else {"maximum": most}
    return {"type": "integer", "minimum": least, **bound, "default": default, "description": meaning}


def fields_of(of: type, names: Iterable[str]) -> dict[str, Any]:
    """The schemas of some fields of a dataclass of options."""
    defaults = {field.name: field.default for field in dataclasses.fields(of)}
    kinds, meanings = field_types(of), field_docs(of)
    return {name: field_schema(kinds[name], meanings[name], defaults[name]) for name in names if name in kinds}


def field_schema(kind: FieldType, meaning: str, default: Any) -> dict[str, Any]:
    """The schema of a field: type, choices, bounds, default, help."""
    schema: dict[str, Any] = {"type": [TYPES[kind.type], "null"] if kind.optional else TYPES[kind.type]}
    if kind.choices and kind.type is str:
        schema["enum"] = list(kind.choices)
    words = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}
    bounds = {words[name]: value for name, value in kind.bounds._asdict().items() if math.isfinite(value)}
    return {**schema, **bounds, "default": default, "description": meaning}


def search_fields() -> dict[str, Any]:
    """The schemas of the settings of a search, within this server's limits."""
    schemas, meanings = fields_of(Options, SETTINGS), field_docs(Options)
    for name in SETTINGS:
        if name not in schemas:  # lists of token ids
            schemas[name] = {**(IDS if name in ID_FIELDS else SEQUENCES), "description": meanings[name]}
    for name, (least, most) in LIMITS.items():
        schemas[name] |= {"minimum": least, "maximum": most}
    return schemas


def openapi(routes: Iterable[Any], needs_key: bool) -> dict[str, Any]:
    """Describe the routes (`calls.Route`) in OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for route in routes:
        summary = (route.answer.__doc__ or "").partition("\n")[0]
        answers = {"200": {"description": route.gives}, "4XX": _error(route.path), "5XX": _error(route.path)}
        operation: dict[str, Any] = {"summary": summary, "tags": [route.kind.label], "responses": answers}
        if "{" in route.path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
        if (form := route.takes) is not None:
            schema = {"oneOf": [form.schema, form.other.schema]} if form.other else form.schema
            content = {"schema": schema, "example": json.loads(form.example)}
            kinds = ("application/json", FORM, PARTS)
            operation["requestBody"] = {"required": True, "content": dict.fromkeys(kinds, content)}
        paths[route.path.replace(":path}", "}")] = {route.method.lower(): operation}
    document = {"openapi": "3.1.0", "info": {"title": "mlx-transformer", "version": __version__}, "paths": paths}
    if needs_key:
        document["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"key": []}]
    return document


def _error(path: str) -> dict[str, Any]:
    inside = _object({"message": TEXT}, ["message"]) | {"additionalProperties": True}
    error = inside if path.startswith(OPENAI) else TEXT
    content = {"application/json": {"schema": _object({"error": error}, ["error"])}}
    return {"description": "what was wrong", "content": content}


def docs_page(description: dict[str, Any]) -> str:
    """Show `openapi`'s description as a page without further files."""
    parts = [
        f"<h1>mlx-transformer {escape(description['info']['version'])}</h1>",
        '<p class="note">What this server takes; <a href="openapi.json">openapi.json</a> has it for programs.</p>',
    ]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f'<p class="note">{escape(operation["summary"])}</p>')
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                command = f"curl -d '{json.dumps(content['example'])}' localhost:8000{path}"
                gives = operation["responses"]["200"]["description"]
                parts.append(card(f"<pre>{escape(command)}\n{escape(gives)}</pre>"))
                parts += [card(_table(form)) for form in content["schema"].get("oneOf", [content["schema"]])]
    return page("serve", "mlx-transformer", "".join(parts))


def _table(form: dict[str, Any]) -> str:
    rows = []
    for name, schema in form["properties"].items():
        needed = "needed" if name in form["required"] else json.dumps(schema["default"]) if "default" in schema else ""
        cells = [escape(text) for text in (_values(schema), needed, schema.get("description", ""))]
        rows.append([f"<code>{name}</code>", *cells])
    return data_table(["field", "takes", "default", "meaning"], rows, named=True)


def _values(schema: dict[str, Any]) -> str:
    if "oneOf" in schema:
        return "text or a list" if schema is TEXTS else "text, ids, or a list"
    if "enum" in schema:
        return ", ".join(schema["enum"])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:,}" for name, sign in words.items() if name in schema]
    return " ".join([{"string": "text"}.get(kind, kind), *bounds])
