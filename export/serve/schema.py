"""The requests that the server takes, as OpenAPI describes them, and the same as a page: the settings are those of the
dataclass that checks requests, with its types, bounds and help."""

from __future__ import annotations

import dataclasses
import json
import math
from html import escape
from typing import Any, get_args

from export.settings import ServeSettings
from mlx_transformer.generation.options import ID_FIELDS, Options
from mlx_transformer.generation.text_options import EmbedOptions, Overlong, RerankOptions
from mlx_transformer.page import card, data_table, page
from mlx_transformer.system.fields import FieldType, field_docs, field_types
from mlx_transformer.system.version import __version__

from . import libretranslate, openai_forms
from .bodies import FORM, PARTS
from .label_forms import FLAGS, PREDICT_EXAMPLE, RERANK_EXAMPLE
from .openai_embeddings import EMBEDDINGS_EXAMPLE, FORMATS, OPTIONS
from .requests import EXAMPLE, LANGUAGES, LIMITS, SETTINGS

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
STREAM_EXAMPLE = '{"text": "Good morning."}'
OWN_CODE = "A language of a model that has several, by the model's own code."
TEXT = {"type": "string"}
TEXTS = {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}
ID_LIST = {"type": "array", "items": {"type": "integer"}}
TEXTS_OR_IDS = {"oneOf": [*TEXTS["oneOf"], ID_LIST, {"type": "array", "items": ID_LIST}]}
IDS, SEQUENCES = {**ID_LIST, "default": ()}, {"type": "array", "items": ID_LIST, "default": ()}
FLAG = {"type": "boolean"}
NUMBER_OF = {"type": "integer", "minimum": 1}


def openapi(settings: ServeSettings) -> dict[str, Any]:
    """Return the description, OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for path, method, summary, body, example in _operations():
        answers = {"200": {"description": "the answer"}, "4XX": _error(path), "5XX": _error(path)}
        operation: dict[str, Any] = {"summary": summary, "responses": answers}
        if "{" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
        if body is not None:
            content = {"schema": body, "example": json.loads(example)}
            forms = ("application/json", FORM, PARTS)
            operation["requestBody"] = {"required": True, "content": dict.fromkeys(forms, content)}
        paths[path] = {method: operation}
    document = {"openapi": "3.1.0", "info": {"title": "mlx-transformer", "version": __version__}, "paths": paths}
    if settings.api_key_file is not None:
        document["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"key": []}]
    return document


def _operations() -> list[tuple[str, str, str, dict[str, Any] | None, str]]:
    """Return (path, method, what it does, the schema of its body, an example of it)."""
    search = schemas_of(Options, SETTINGS)
    codes = {"source": {**TEXT, "description": "Code of the text's language, or auto."}, "target": TEXT}
    codes |= {name: {**TEXT, "description": OWN_CODE} for name in LANGUAGES[2:]}
    overlong = {
        "overlong": _schema(
            FieldType(str, get_args(Overlong)), "What becomes of a line longer than the model takes.", "error"
        )
    }
    several = {"text": TEXTS, **search, **overlong, **codes}
    one = {name: schema for name, schema in several.items() if name not in ("beam", "n_best")} | {"text": TEXT}
    alignment = {"alignment": {"type": "boolean", "default": False, "description": "Links of source and target words."}}
    libre = {
        "q": TEXTS,
        **codes,
        "format": {"enum": list(libretranslate.FORMATS), "default": "text"},
        "api_key": TEXT,
        "alternatives": {"type": "integer", "minimum": 0, "maximum": libretranslate.MOST, "default": 0},
        **{name: schema for name, schema in search.items() if name != "n_best"},
    }
    translate = {"oneOf": [_object({**several, **alignment}, ["text"]), _object(libre, ["q", "source", "target"])]}
    completion = _object(_completion(search), ["model", "prompt"])
    embeddings = _object(_embeddings(), ["model", "input"])
    rerank, predict = _object(_rerank(), ["query"]), _object(_predict(), ["inputs"])
    detect = _object({"q": TEXT, "api_key": TEXT}, ["q"])
    return [
        ("/translate", "post", "Translate texts; with q, as LibreTranslate does.", translate, EXAMPLE),
        (
            "/translate/stream",
            "post",
            "Translate one line, as server-sent events.",
            _object(one, ["text"]),
            STREAM_EXAMPLE,
        ),
        ("/languages", "get", "The languages, each with those it is translated to.", None, ""),
        ("/detect", "post", "The only source language; nothing is detected.", detect, '{"q": "Good morning."}'),
        ("/v1/models", "get", "The models, as OpenAI lists them.", None, ""),
        ("/v1/models/{name}", "get", "One model.", None, ""),
        ("/v1/completions", "post", "What a decoder alone writes after prompts.", completion, openai_forms.EXAMPLE),
        ("/v1/embeddings", "post", "Vectors of texts, by an encoder alone.", embeddings, EMBEDDINGS_EXAMPLE),
        ("/rerank", "post", "Documents by their relevance to a query.", rerank, RERANK_EXAMPLE),
        ("/v1/rerank", "post", "The same.", rerank, RERANK_EXAMPLE),
        ("/predict", "post", "The classes of texts.", predict, PREDICT_EXAMPLE),
        ("/health", "get", "200 once the models are loaded, 503 before.", None, ""),
        ("/ready", "get", "The same.", None, ""),
        ("/metrics", "get", "Counts and times, for Prometheus.", None, ""),
        ("/version", "get", "The version of this server.", None, ""),
        ("/openapi.json", "get", "This description.", None, ""),
        ("/docs", "get", "This description as a page.", None, ""),
    ]


def _completion(search: dict[str, Any]) -> dict[str, Any]:
    temperature = {
        **search["temperature"],
        "minimum": 0,
        "description": "0 takes the likeliest tokens; else they are drawn.",
    }
    return {
        "model": TEXT,
        "prompt": TEXTS_OR_IDS,
        "stop": TEXTS,
        "max_tokens": {**NUMBER_OF, "default": openai_forms.MAX_TOKENS, "description": "Most new tokens."},
        "n": {**NUMBER_OF, "maximum": openai_forms.LARGEST_N, "default": 1, "description": "Outputs of each prompt."},
        "temperature": temperature,
        **{name: search[name] for name in ("top_p", "top_k")},
        "seed": {name: value for name, value in search["seed"].items() if name != "default"},
        "stream": {"type": "boolean", "default": False, "description": "Send pieces as server-sent events."},
        "stream_options": _object({"include_usage": {"type": "boolean"}}, []),
        "user": TEXT,
    }


def _embeddings() -> dict[str, Any]:
    kinds, meanings = field_types(EmbedOptions), field_docs(EmbedOptions)
    fields = {name: _schema(kinds[name], meanings[name], None) for name in OPTIONS}
    forms = {"type": "string", "enum": list(FORMATS), "default": FORMATS[0]}
    return {"model": TEXT, "input": TEXTS_OR_IDS, "encoding_format": forms, **fields, "user": TEXT}


def _rerank() -> dict[str, Any]:
    top = _schema(field_types(RerankOptions)["top_n"], field_docs(RerankOptions)["top_n"], None)
    return {
        "model": TEXT,
        "query": TEXT,
        "documents": TEXTS,
        "texts": TEXTS,
        "top_n": top,
        **dict.fromkeys(FLAGS, FLAG),
    }


def _predict() -> dict[str, Any]:
    return {"model": TEXT, "inputs": TEXTS, **dict.fromkeys(("raw_scores", "truncate"), FLAG)}


def schemas_of(of: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the JSON schema of each of these fields of a dataclass, within this server's `LIMITS`."""
    defaults = {field.name: field.default for field in dataclasses.fields(of)}
    kinds, meanings = field_types(of), field_docs(of)
    schemas = {name: _schema(kinds[name], meanings[name], defaults[name]) for name in names if name in kinds}
    lists = {name: IDS if name in ID_FIELDS else SEQUENCES for name in names if name not in kinds}
    schemas |= {name: {**schema, "description": meanings[name]} for name, schema in lists.items()}
    for name, (least, most) in LIMITS.items():
        schemas[name] |= {"minimum": least, "maximum": most}
    return schemas


def _schema(kind: FieldType, meaning: str, default: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": [TYPES[kind.type], "null"] if kind.optional else TYPES[kind.type]}
    if kind.choices and kind.type is str:
        schema["enum"] = list(kind.choices)
    words = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}
    bounds = {words[name]: value for name, value in kind.bounds._asdict().items() if math.isfinite(value)}
    return {**schema, **bounds, "default": default, "description": meaning}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _error(path: str) -> dict[str, Any]:
    inside = _object({"message": TEXT}, ["message"]) | {"additionalProperties": True}
    error = inside if path.startswith("/v1/") else TEXT
    return {
        "description": "what was wrong",
        "content": {"application/json": {"schema": _object({"error": error}, ["error"])}},
    }


def docs_page(description: dict[str, Any]) -> str:
    """Return the page of what `openapi` describes, which loads nothing."""
    parts = [f"<h1>mlx-transformer {escape(description['info']['version'])}</h1>"]
    parts += [
        '<p class="note">What this server takes; <a href="openapi.json">openapi.json</a> has it for programs.</p>'
    ]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f'<p class="note">{escape(operation["summary"])}</p>')
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                command = f"curl -d '{json.dumps(content['example'])}' localhost:8000{path}"
                parts.append(card(f"<pre>{escape(command)}</pre>"))
                parts += [card(_fields(form)) for form in content["schema"].get("oneOf", [content["schema"]])]
    return page("mlx-transformer", "".join(parts))


def _fields(form: dict[str, Any]) -> str:
    rows = []
    for name, schema in form["properties"].items():
        needed = "needed" if name in form["required"] else json.dumps(schema["default"]) if "default" in schema else ""
        rows.append(
            [f"<code>{name}</code>", escape(_values(schema)), escape(needed), escape(schema.get("description", ""))]
        )
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
