"""Target web: WebGPU has a kernel for every operator, by the list that onnxruntime-web brings along."""

import json
from pathlib import Path

import pytest
from combined import combined
from small_models import CHOICES, alone, encoder_decoder, random_weights

from export.interface import Request
from export.package import export_onnx
from export.precision.passes import lower
from export.targets.table import target_of
from mlx_transformer.core.checkpoint import save_checkpoint

HERE = Path(__file__).parent
KERNELS = json.loads((HERE / "webgpu_kernels.json").read_text(encoding="utf-8"))
# Positions (64-bit integers) and the mask of a decoder alone, once a run; ONNX Runtime removes Identity; a recurrence
# loops over several tokens at once, of which a search has one.
ON_HOST = {"Max", "And", "Identity", "Loop"}
# 8-bit activations: for wasm, as target web says.
WASM_ONLY = {"int8": {"QuantizeLinear", "MatMulInteger"}}


@pytest.mark.parametrize(("name", "precision"), combined(CHOICES, ["float32", "float16", "int8", "int4"], step=2))
def test_operators(name, precision):
    web = target_of("web")
    known = {domain: set(names.split()) for domain, names in KERNELS["operators"].items()}
    missing = set()
    for config in (encoder_decoder(name), alone(name, "encoder"), alone(name, "decoder")):
        for graph in web.graph_names(config):
            model = web.build(graph, Request(config=config))
            lower(model, precision, web.lowering)
            missing |= {n.op_type for n in model.graph.all_nodes() if n.op_type not in known.get(n.domain, ())}
    assert missing <= ON_HOST | WASM_ONLY.get(precision, set())
    assert WASM_ONLY.get(precision, set()) <= missing


def test_the_list_is_of_the_version_that_is_tested():
    package = json.loads((HERE.parents[1] / "consumers" / "node" / "package.json").read_text(encoding="utf-8"))
    assert package["dependencies"]["onnxruntime-web"] in KERNELS["source"]


def test_the_folder_holds_what_a_browser_fetches(tmp_path):
    config = encoder_decoder("paper")
    save_checkpoint(tmp_path / "model", config, random_weights(config))
    files = {file.name for file in (export_onnx(tmp_path / "model", tmp_path / "web", target="web") / "onnx").iterdir()}
    graphs = {"encoder_model.onnx", "decoder_model_merged.onnx"}
    assert files == {*graphs, *(f"{name}_data" for name in graphs), "manifest.json"}
    served = json.loads((tmp_path / "web" / "config.json").read_text(encoding="utf-8"))["transformers.js_config"]
    assert set(served["use_external_data_format"]) == graphs
