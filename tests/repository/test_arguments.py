"""Editors and type checkers know the options of public functions, by TypedDicts with the names and types of the
dataclasses that check them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from imports import ROOT

from export import arguments as of_export
from export.settings import ExportSettings, JudgeSettings, ServeSettings, WebSettings
from mlx_transformer.decoding.options import Options
from mlx_transformer.generation import arguments as of_verbs
from mlx_transformer.generation.text_options import AnswerOptions, EmbedOptions
from mlx_transformer.training.arguments import TrainArguments
from mlx_transformer.training.options import recipe_keys
from mlx_transformer.training.recipe import PATHS

PAIRS = [
    (of_verbs.SearchArguments, Options),
    (of_verbs.EmbedderArguments, EmbedOptions),
    (of_verbs.AnswerArguments, AnswerOptions),
    (of_export.ExportArguments, ExportSettings),
    (of_export.JudgeArguments, JudgeSettings),
    (of_export.ServeArguments, ServeSettings),
    (of_export.WebArguments, WebSettings),
]
RIGHT = """
import mlx_transformer as mt

model, tokenizer = mt.load("run")
line: str = model.translate("x", beam=4, task_prefix="to German: ")
lines: list[str] = model.translate(["x"], overlong="split", max_new_tokens=3)
ids: list[list[int]] = model.generate([[1, 2]], beam=2, top_k=3, suppressed=[4])
vectors = model.embed(["x"], pooling="mean", dimensions=3)
mt.export("run", "onnx", target="cpu", precision="int8", force=True)
mt.export_onnx("run", "onnx", target="cpu", precision=["float32", "int8"])
onnx = mt.OnnxTransformer("onnx", precision="int8")
other: str = onnx.translate("x", beam=4)
report = mt.validate("run", "onnx", gradients=True)
result = mt.train("multi30k", out="run", steps=5, preset="tiny", source="a")
"""
WRONG = """
import mlx_transformer as mt

model, tokenizer = mt.load("run")
model.translate("x", beems=4)
model.generate([[1, 2]], beems=4)
model.n_best("x", beems=4)
model.stream("x", beems=4)
model.complete("x", beems=4)
model.embed(["x"], poolng="mean")
mt.export("run", "onnx", target="gpu")
mt.export_onnx("run", "onnx", target="gpu")
mt.export_search("run", "x.onnx", precison="int8")
mt.OnnxTransformer("onnx", precision="int7")
mt.OnnxTransformer("onnx").translate("x", beems=4)
mt.open_model("onnx", precision="int7")
mt.validate("run", "onnx", gradient=True)
mt.train("multi30k", out="run", stepz=5)
mt.train("multi30k", out="run", preset="huge")
mt.serve("onnx", prt=8)
"""


def plain(hint: Any) -> Any:
    """A field's type without its bounds; what is kept as a tuple may be given as any sequence."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return plain(parts[0])
    if origin is tuple:
        return Sequence[plain(parts[0])]
    if origin in (types.UnionType, Union):
        return reduce(or_, map(plain, parts))
    return origin[tuple(map(plain, parts))] if origin is Sequence else hint


@pytest.mark.parametrize(("arguments", "settings"), PAIRS, ids=lambda of: of.__name__)
def test_arguments_are_the_fields_of_the_settings(arguments, settings):
    hints = get_type_hints(settings, include_extras=True)
    expected = {field.name: plain(hints[field.name]) for field in dataclasses.fields(settings)}
    assert {name: plain(hint) for name, hint in get_type_hints(arguments).items()} == expected


def test_arguments_of_train_are_the_keys_of_recipes():
    given = get_type_hints(TrainArguments)
    keys = {name: get_type_hints(of, include_extras=True)[name] for _, name, of in recipe_keys()}
    assert given.keys() == keys.keys()
    for name, hint in keys.items():
        if name in ("corpora", "layer_pattern"):
            assert given[name] == Sequence[Mapping[str, Any]]
        elif name in ("head", "decoder", "rotary_scaling"):
            assert given[name] == Mapping[str, Any]
        elif name in (*PATHS, "start_from", "teacher"):
            assert given[name] == str | os.PathLike[str] | None
        else:
            assert given[name] == plain(hint), name


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_type_checkers_find_misspelt_options(checker, tmp_path):
    """In a user's file outside the clone; every line of the wrong one but the first two is an error."""
    pytest.importorskip(checker)
    for name, text in (("right.py", RIGHT), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text.lstrip(), encoding="utf-8")
    expected = {("wrong.py", number) for number, line in enumerate(WRONG.lstrip().splitlines(), 1) if number > 3}
    if checker == "pyright":
        (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}), encoding="utf-8")
        command = ["-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "right.py", "wrong.py"]
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        found = [
            (os.path.basename(each["file"]), each["range"]["start"]["line"] + 1)
            for each in json.loads(done.stdout)["generalDiagnostics"]
            if each["severity"] == "error"
        ]
    else:
        command = [
            "-m",
            "mypy",
            "--follow-imports=silent",
            "--no-error-summary",
            "--cache-dir",
            str(tmp_path / "cache"),
        ]
        environment = {**os.environ, "MYPYPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *command, "right.py", "wrong.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        lines = [line.split(":") for line in done.stdout.splitlines() if ": error:" in line]
        found = [(os.path.basename(file), int(number)) for file, number, *_ in lines]
    assert set(found) == expected, done.stdout
