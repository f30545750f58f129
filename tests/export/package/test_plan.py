"""What is exported is decided by one settings object, and checked before anything is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_models import write_model
from small_models import encoder_decoder

from export import export_onnx, export_search
from export.package.plan import Plan
from export.settings import ExportSettings
from mlx_transformer.system.errors import UserError

BOTH = [
    ({"target": "gpu"}, "target 'gpu': choose one of portable, cpu, web, cuda$"),
    ({"target": "coreml"}, "target 'coreml': choose one of portable, cpu, web, cuda$"),
    ({"precision": "int2"}, "precision 'int2' is unknown; choose from float32, float16"),
    ({"precision": ()}, "no precision given"),
    ({"activations": "x"}, "activations 'x' are unknown; choose from int8, float32"),
    ({"activations": "int8"}, "activations int8: precision float32 has no choice"),
    ({"attention_layer": 7}, "attention_layer=7: the decoder has layers 0 to"),
    ({"precision": "packed"}, "isn't quantised: run mlx-transformer quantize before packed"),
    (
        {"precision": "int8", "gate_reference": "x"},
        "has no tokenizer, and the quality gate compares texts",
    ),
]
FILE = [
    ({"target": "web"}, "search in the graph: target 'web' has none; choose one of portable, cpu"),
    ({"precision": ["float32", "int8"]}, "one file of one precision, not float32, int8$"),
    ({"inputs_embeds": True}, "one file that reads ids: leave out inputs_embeds"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_model(encoder_decoder("paper"), tmp_path_factory.mktemp("made"), seed=1)[0]


@pytest.mark.parametrize(("wrong", "said"), BOTH, ids=str)
def test_a_folder_that_cannot_be_is_refused(checkpoint, tmp_path, wrong, said):
    with pytest.raises(UserError, match=said):
        export_onnx(checkpoint, tmp_path / "out", **wrong)
    with pytest.raises(UserError, match=said):
        export_onnx(checkpoint, tmp_path / "out", ExportSettings(**wrong))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("wrong", "said"), BOTH + FILE, ids=str)
def test_a_file_that_cannot_be_is_refused(checkpoint, tmp_path, wrong, said):
    with pytest.raises(UserError, match=said):
        export_search(checkpoint, tmp_path / "out.onnx", **wrong)
    assert not list(tmp_path.iterdir())


def test_keywords_are_changes_of_the_settings(checkpoint, tmp_path):
    settings = ExportSettings(target="cpu", attention=True)
    export_onnx(checkpoint, tmp_path / "one", settings, attention=False)
    export_onnx(checkpoint, tmp_path / "two", target="cpu")
    ours, theirs = ({p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in ("one", "two"))
    assert ours == theirs
    with pytest.raises(TypeError, match="unexpected keyword argument 'tarjet'"):
        export_onnx(checkpoint, tmp_path / "three", tarjet="cpu")


def test_a_plan_knows_what_is_judged_and_with_what(checkpoint):
    plan = Plan.of(checkpoint, ExportSettings(target="cpu", precision=("int8", "float32"), attention=True))
    assert (plan.judged, plan.written.name, plan.activations) == (["int8"], "cpu", "int8")
    plain = plan.plain()
    assert (plain.target.name, plain.precisions) == ("portable", ("float32", "int8"))
    assert plain.request.attention_layer is None
    assert plan.request.attention_layer is not None
    assert replace(plan, precisions=("float32",)).judged == []
