"""The server's description of itself says what it takes, and its page needs nobody else."""

from __future__ import annotations

import json
import re

import pytest
from serving import client, pairs

from export.serve.app import ROUTES
from export.serve.requests import LIMITS, SETTINGS, openapi
from export.serve.translating import TranslationModel
from mlx_transformer.system.machine import __version__


@pytest.fixture(scope="module")
def shared(text_model):
    with client(pairs(en_de=text_model)) as (http_, app):
        yield http_, app


def test_every_path_is_described(shared):
    http_, app = shared
    described = http_.get("/openapi.json").json()
    paths = {route.path.replace(":path", ""): set(route.methods) - {"HEAD"} for route in app.asgi.routes}
    found = {path: {method.upper() for method in methods} for path, methods in described["paths"].items()}
    assert found == paths
    assert described["info"]["version"] == __version__ == http_.get("/version").json()["version"]


def body_of(description, path):
    content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return content["example"], content["schema"].get("oneOf", [content["schema"]])


@pytest.mark.parametrize("route", [route for route in ROUTES if route.takes], ids=lambda route: route.path)
def test_examples_are_answered(shared, route):
    """By the right kind of model; any other is named as wrong, not a field of the example. A field of no form is
    refused by every route."""
    http_, _ = shared
    example = json.loads(route.takes.example)
    answer = http_.post(route.path, json=example)
    if route.kind is TranslationModel:
        assert answer.status_code == 200
    else:
        assert answer.status_code in (400, 404)
        assert "model" in str(answer.json()["error"])
        assert "no such setting" not in answer.text
    answer = http_.post(route.path, json={**example, "nobody": 1})
    assert (answer.status_code, "nobody" in answer.text or route.path == "/detect") == (400, True)


def test_bounds_are_those_of_requests(shared):
    """What lies just beyond a bound is refused, and what lies on it is no error of that field."""
    http_, _ = shared
    _, [ours, libre] = body_of(http_.get("/openapi.json").json(), "/translate")
    assert set(SETTINGS) < set(ours["properties"])
    assert set(libre["properties"]) >= {"q", "source", "target", "format", "alternatives"}
    for name, schema in ours["properties"].items():
        if "minimum" not in schema and "maximum" not in schema:
            continue
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound not in schema:
                continue
            beyond = {"text": "x", "sample": name in ("temperature", "top_p", "top_k"), name: schema[bound] + step}
            answer = http_.post("/translate", json=beyond)
            assert (answer.status_code, name in answer.json()["error"]) == (400, True), (name, answer.text)
    assert LIMITS["beam"] == (ours["properties"]["beam"]["minimum"], ours["properties"]["beam"]["maximum"])
    unknown = http_.post("/translate", json={"text": "x", "nothing": 1})
    listed = unknown.json()["error"].partition("there are ")[2].split(", ")
    assert set(listed) | {"text"} == set(ours["properties"])


def test_the_page_shows_all_and_loads_nothing(shared):
    http_, _ = shared
    answer = http_.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    for path in http_.get("/openapi.json").json()["paths"]:
        assert f" {path}</code></h2>" in answer.text
    assert "Hypotheses kept per sentence" in answer.text
    assert re.findall(r'(?:src|href)="([^"]*)"', answer.text) == ["openapi.json"]
    assert "//" not in re.sub(r"</?\w[^>]*>", "", answer.text.partition("<main>")[2])


def test_keys_are_described(tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    assert openapi(ROUTES, True)["security"] == [{"key": []}]
    assert "security" not in openapi(ROUTES, False)
    json.dumps(openapi(ROUTES, False), allow_nan=False)


def test_ready_is_what_health_is_and_no_series_is_doubled(shared):
    http_, _ = shared
    assert http_.get("/ready").json()["status"] == "ready"
    assert "_created" not in http_.get("/metrics").text
