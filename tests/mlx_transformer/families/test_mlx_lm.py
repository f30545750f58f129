"""Folders that mlx-lm wrote, and what it computed with them (`make_golden_mlx_lm.py`): the same integers and logits
here, and the same files again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from export import export_onnx
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer
from mlx_transformer.cli import main
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.families.mlx_lm import keys_of_mlx_lm, unlike_mlx_lm
from mlx_transformer.families.table import FAMILIES
from mlx_transformer.system.errors import UserError

GOLDEN = Path(__file__).parent / "golden_mlx_lm"
MODELS = [path.name for path in sorted(GOLDEN.iterdir()) if (path / "config.json").is_file()]
MODELS = [
    name for name in MODELS if json.loads((GOLDEN / name / "config.json").read_text("utf-8"))["model_type"] in FAMILIES
]


def assert_answers(opened: Checkpoint, folder: Path, *got: np.ndarray) -> None:
    """mlx-lm's logits and `got` are those of the checkpoint's weights in float64, within float32's noise."""
    answers, weights = dict(np.load(folder / "answers.npz")), dict(opened.tensors())
    exact, single = (Reference(opened.config, weights, kind)(answers["ids"]) for kind in (np.float64, np.float32))
    truth = Truth.of(exact, single, np.ones(answers["ids"].shape, bool))
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    for logits in (answers["logits"], *got):
        measured = Measurement.of(Deviation.of(logits, truth), truth.scale, pool, budget)
        assert measured.passed, measured


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_and_the_same_files_again(name, tmp_path):
    notes = import_huggingface(GOLDEN / name, tmp_path / "model")
    opened = open_checkpoint(tmp_path / "model")
    stored, ids = load_file(GOLDEN / name / "model.safetensors"), np.load(GOLDEN / name / "answers.npz")["ids"]
    integers = [array for array in stored.values() if array.dtype == np.uint32]
    assert len(opened.quantization) >= len(integers) > 0 or name == "llama"
    assert any("bits" in note for note in notes) == bool(integers)
    models = [Transformer.load(folder) for folder in (GOLDEN / name, tmp_path / "model")]
    got = [np.array(model(ids).astype(mx.float32)) for model in models]
    if name == "llama-half":
        assert [model.precision for model in models] == ["bfloat16"] * 2
        for logits in got:
            np.testing.assert_array_equal(logits, np.load(GOLDEN / name / "answers.npz")["logits"])
    else:
        assert_answers(opened, GOLDEN / name, *got)
    main(["to-huggingface", str(tmp_path / "model"), str(tmp_path / "theirs"), "--mlx-lm"])
    again = load_file(tmp_path / "theirs" / "model.safetensors")
    if name == "gpt2-5":  # positions are only added, and floats here
        packed = Scheme(32, 5).packed("model.wpe.weight", stored)
        stored = {key: array for key, array in stored.items() if ".wpe." not in key}
        stored |= {"model.wpe.weight": packed.dequantised()}
    if name == "gemma3-4":  # w is stored, 1 + w is computed with, and rounded once
        one = np.float32(1)
        stored |= {key: (one + array) - one for key, array in stored.items() if key.endswith("norm.weight")}
    for key in stored.keys() | again.keys():
        np.testing.assert_array_equal(again[key], stored[key], err_msg=key)
    ours, theirs = (json.loads((f / "config.json").read_text("utf-8")) for f in (tmp_path / "theirs", GOLDEN / name))
    assert [*ours] == sorted(ours)
    assert ours.get("quantization_config") == ours.get("quantization")
    assert named(ours, stored) == named(theirs, stored)
    with safe_open(tmp_path / "theirs" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "mlx"}
    indices = [
        json.loads((f / "model.safetensors.index.json").read_text()) for f in (tmp_path / "theirs", GOLDEN / name)
    ]
    assert indices[0]["weight_map"] == dict.fromkeys(sorted(stored), "model.safetensors")
    assert indices[0]["metadata"].keys() == indices[1]["metadata"].keys()
    assert indices[0]["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())


ADAPTERS = [path.name for path in sorted(GOLDEN.iterdir()) if (path / "adapter_config.json").is_file()]
OF_INTEGERS = [name for name in ADAPTERS if name.endswith("integers")]


def base_of(name: str) -> Path:
    return GOLDEN / name / json.loads((GOLDEN / name / "adapter_config.json").read_text("utf-8"))["model"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_imported_loaded_and_merged(name, tmp_path):
    [note, *_] = import_huggingface(GOLDEN / name, tmp_path / "model")
    assert ("of its own (model.layers.1.mlp.up_proj.weight)" if name == "full" else "RA of rank 3 of") in note
    opened, ids = open_checkpoint(tmp_path / "model"), np.load(GOLDEN / name / "answers.npz")["ids"]
    assert_answers(opened, GOLDEN / name, np.array(Transformer.load(GOLDEN / name)(ids)))
    import_huggingface(base_of(name), tmp_path / "base")
    main(["merge", str(tmp_path / "base"), str(GOLDEN / name), "--out", str(tmp_path / "merged")])
    merged = dict(open_checkpoint(tmp_path / "merged").tensors())
    for parameter, array in opened.tensors():
        np.testing.assert_array_equal(merged[parameter], array, err_msg=parameter)


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_adapters_stand_beside_integers_and_are_written_back(name, tmp_path, capsys):
    base, kept = tmp_path / "base", tmp_path / "kept"
    import_huggingface(base_of(name), base)
    main(["merge", str(base_of(name)), str(GOLDEN / name), "--out", str(kept), "--keep-adapter"])
    opened, ids = open_checkpoint(kept), np.load(GOLDEN / name / "answers.npz")["ids"]
    for parameter, matrix in open_checkpoint(base).matrices().items():
        np.testing.assert_array_equal(np.asarray(matrix.words), opened.matrices()[parameter].words)
    assert_answers(opened, GOLDEN / name, np.array(Transformer.load(kept)(ids)))
    main(["merge", str(base), str(GOLDEN / name), "--out", str(tmp_path / "rounded"), "--requantize"])
    assert "matrices rounded again: relative rms error" in capsys.readouterr().out
    written = ["to-peft", str(base), str(kept), str(tmp_path / "theirs"), "--base", str(base_of(name)), "--mlx-lm"]
    main(written)
    arrays, theirs = (load_file(folder / "adapters.safetensors") for folder in (tmp_path / "theirs", GOLDEN / name))
    assert arrays.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_array_equal(arrays[key], array, err_msg=key)
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text("utf-8"))
        for folder in (tmp_path / "theirs", GOLDEN / name)
    )
    assert ours == {**theirs, "model": str(base_of(name)), "num_layers": 2}
    main(["to-peft", str(base), str(kept), str(tmp_path / "peft"), "--base", str(base_of(name))])
    assert {path.name for path in (tmp_path / "peft").iterdir()} >= {"adapter_model.safetensors"}
    main(["merge", str(base), str(tmp_path / "peft"), "--out", str(tmp_path / "again"), "--keep-adapter"])
    again, ours = (load_file(folder / "adapter.safetensors") for folder in (tmp_path / "again", kept))
    assert again.keys() == ours.keys()
    assert_answers(open_checkpoint(tmp_path / "again"), GOLDEN / name)
    for array in ours:
        np.testing.assert_array_equal(again[array], ours[array], err_msg=array)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fine_tune_type": "ia3"}, "fine_tune_type 'ia3' is not lora, dora or full"),
        ({"lora_parameters": {"rank": 3, "alpha": 20}}, "must have rank and scale"),
        ({"fine_tune_type": "full"}, "model.layers.1.mlp.down_proj doesn't belong to fine_tune_type full"),
        ({"model": None}, "model names no base"),
        ({"model": "../qwen3-3"}, "model.layers.1.mlp.down_proj: .* don't fit the base's"),
    ],
)
def test_adapters_that_cannot_be_read(changes, said, tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "all")
    file = tmp_path / "all" / "lora" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes))
    with pytest.raises(UserError, match=said):
        import_huggingface(file.parent, tmp_path / "model")


UNLIKE = {
    "gpt2-unscaled": ["it has gelu_new for relu", "it scales attention and ties its classifier always"],
    "gpt2-wide": ["it has gelu_new for gelu", "it can't load an n_inner other than 4 n_embd"],
    "llama-wide": ["it has silu for gelu"],
    "phi3-long": ["its longrope has the long factors alone"],
    "qwen3-biased": ["it can't load attention_bias"],
    "qwen3-yarn": ["it ignores attention_factor and truncate of yarn"],
    **{name: ["it knows no sliding_window"] for name in ("mistral-window", "phi3", "qwen2-window", "qwen3-window")},
}
"""Of the folders of transformers, those whose logits in mlx-lm 0.32.2 were others, or that it couldn't load."""


def test_where_mlx_lm_computes_otherwise(tmp_path, capsys):
    known = (
        "gpt2 gpt2-unscaled gpt2-wide hunyuan hunyuan-alpha hunyuan-wide llama llama-biased llama-linear llama-wide "
        "llama3 mistral mistral-tied mistral-window nemo phi3 phi3-long phi4-mini qwen2 qwen2-tied qwen2-wide "
        "qwen2-window qwen3 qwen3-biased qwen3-tied qwen3-window qwen3-yarn smollm3 smollm3-fourth smollm3-window"
    )
    folders = {name: GOLDEN.with_name("golden_decoders") / name for name in known.split()}
    configs = {name: json.loads((folder / "config.json").read_text("utf-8")) for name, folder in folders.items()}
    reasons = {name: unlike_mlx_lm(config) for name, config in configs.items()}
    assert {name: why for name, why in reasons.items() if why} == UNLIKE
    gemma = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64}
    near, far = "sliding_attention", "full_attention"
    for layers, pattern, why in (
        ([near, near, far] * 2, {"sliding_window_pattern": 3}, []),
        ([near, far, far], {"sliding_window_pattern": 2}, ["its windows follow a period"]),
        ([near, near], {}, ["it can't load layers that all have windows"]),
    ):
        config = {**gemma, "layer_types": layers, "sliding_window": 4}
        assert (keys_of_mlx_lm(config), unlike_mlx_lm(config)) == (pattern, why)
    import_huggingface(folders["mistral-window"], tmp_path / "model")
    main(["to-huggingface", str(tmp_path / "model"), str(tmp_path / "theirs"), "--mlx-lm"])
    assert "mlx-lm will give other logits: it knows no sliding_window" in capsys.readouterr().out


def named(config: dict, stored: dict) -> dict[str, dict]:
    """{path of a quantised matrix: its scheme}, whichever of them the entry has as its default."""
    values = dict(config.get("quantization", {}))
    usual = {key: values.pop(key) for key in ("group_size", "bits", "mode") if key in values}
    paths = [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]
    return {path: {"mode": "affine", **values.get(path, usual)} for path in paths}


def test_exported_and_proven(tmp_path):
    """2, 6 and 8 bits, integers and short floats side by side."""
    import_huggingface(GOLDEN / "llama-mixed", tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "onnx", precision=["float32", "packed"])
    report = compare(tmp_path / "model", tmp_path / "onnx", seed=3, longest=12, searches=False)
    assert report.equal, report
