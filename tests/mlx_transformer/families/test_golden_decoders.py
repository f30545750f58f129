"""Decoders that `transformers` wrote, and what it computed with them (`make_golden_decoders.py`): the same logits and
tokens here, in MLX and in exported graphs, of either version's config.json, and the same files again.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from combined import SLOW, combined, one_of_each, slow
from safetensors.numpy import load_file
from small_models import random_weights

from export import OnnxTransformer, export_onnx
from export.targets.table import TARGETS
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.decoding.steps import banned_ids
from mlx_transformer.families.engine import config_of
from mlx_transformer.families.table import FAMILIES
from mlx_transformer.generation.settings import read_settings
from mlx_transformer.system.tensors import write_tensors

GOLDEN = Path(__file__).parent / "golden_decoders"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
BEAMS = dict(beam=4, early_stopping=True, length_penalty=1.0, penalty_form="length")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a name."""
    folder = tmp_path_factory.mktemp("golden")

    def checkpoint(name: str) -> Path:
        import_huggingface(GOLDEN / name, folder / name)
        return folder / name

    return cache(checkpoint)


@pytest.fixture(scope="module")
def exported(imported: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("exported")
    return cache(lambda name: export_onnx(imported(name), folder / name))


def answers(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / name / "answers.npz"))


def contents(name: str, file: str = "config.json") -> dict:
    return json.loads((GOLDEN / name / file).read_text(encoding="utf-8"))


def model_type(name: str) -> str:
    return contents(name)["model_type"]


def on_the_left(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    width = mask.shape[1]
    return np.stack([np.roll(row, width - n, axis=0) for row, n in zip(values, mask.sum(axis=1), strict=True)])


def in_parts(model: Transformer, ids: np.ndarray, mask: np.ndarray, at: int) -> np.ndarray:
    """Logits of rows padded on the left, read in two steps."""
    cache = model.start(prompt_mask=mx.array(mask))
    parts = (ids[:, :at], ids[:, at:])
    return np.concatenate([np.array(model.step(mx.array(part), cache)) for part in parts if part.size], axis=1)


def true_logits(config: TransformerConfig, weights: dict, ids: np.ndarray, mask: np.ndarray) -> Truth:
    of_64, of_32 = (Reference(config, weights, kind)(ids, ids, mask) for kind in (np.float64, np.float32))
    return Truth.of(of_64, of_32, mask)


def passes(logits: np.ndarray, truth: Truth) -> Measurement:
    pool = ErrorScale.pooled([truth.scale])
    return Measurement.of(Deviation.of(logits, truth), truth.scale, pool, budget_for("float32", "cpu"))


def searched(name: str) -> Any:
    """What a search of tokens depends on besides a family: the kind of positions, and windows."""
    values = contents(name)
    table = values.get("rope_parameters") or values.get("rope_scaling") or {}
    slides = values.get("sliding_window") and values.get("use_sliding_window", True)
    return "n_embd" in values, bool(slides), "no_rope_layers" in values, "longrope" in table.values()


CHOSEN = one_of_each(NAMES, model_type, lambda name: name.partition("-")[2])


@pytest.mark.parametrize(
    ("name", "eighth"),
    [
        *(pytest.param(*each.values, i % 8, marks=each.marks) for i, each in enumerate(CHOSEN)),
        *(pytest.param(name, None, marks=SLOW) for name in NAMES),
    ],
)
def test_logits_are_equal_by_the_rule(name: str, eighth: int | None, imported: Callable[[str], Path]) -> None:
    """Whichever side is padded, and wherever the rows are cut in two: at every eighth place, which are all places in
    any eight names."""
    given = answers(name)
    ids, mask = given["ids"], given["mask"]
    left_ids, left_mask = on_the_left(ids, mask), on_the_left(mask, mask)
    opened, model = open_checkpoint(imported(name)), Transformer.load(imported(name))
    weights = dict(opened.tensors())
    places = range(1, ids.shape[1] + 1) if eighth is None else range(1 + eighth, ids.shape[1] + 1, 8)
    right, left = (true_logits(opened.config, weights, *each) for each in ((ids, mask), (left_ids, left_mask)))
    computed = {
        "transformers": (given["logits"], right),
        "transformers, left": (given["left"], left),
        "mlx": (np.array(model(mx.array(ids), mx.array(mask))), right),
        "mlx, left": (np.array(model(mx.array(left_ids), mx.array(left_mask))), left),
        **{f"cut at {at}": (in_parts(model, left_ids, left_mask, at), left) for at in places},
    }
    for runtime, (logits, truth) in computed.items():
        measured = passes(logits, truth)
        assert measured.passed, f"{runtime}: {measured}"


@pytest.mark.parametrize("name", one_of_each(NAMES, searched))
def test_tokens_are_equal(name: str, imported: Callable[[str], Path], exported: Callable[[str], Path]) -> None:
    given, eos = answers(name), open_checkpoint(imported(name)).config.eos_id
    rows = [ids[real].tolist() for ids, real in zip(given["ids"], given["mask"], strict=True)]
    models = (Transformer.load(imported(name)), OnnxTransformer(exported(name), threads=1))
    for search, options in {"tokens": dict(beam=1), "beams": BEAMS}.items():
        expected = [row[: row.index(eos)] if eos in row else row for row in given[search].tolist()]
        for model in models:
            assert model.generate(rows, max_new_tokens=given["tokens"].shape[1], **options) == expected


@pytest.mark.parametrize("name", CHOSEN)
def test_both_versions_files_are_the_same_model_and_are_written_again(
    name: str, imported: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each tensor bit for bit, and each key that means anything; rotary positions in the words of both."""
    family, config = FAMILIES[model_type(name)], open_checkpoint(imported(name)).config
    assert config_of(family, contents(name, "config_5.json"), {}, Path(name)) == config
    written = to_huggingface(imported(name), tmp_path / "theirs", family.model_type)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, written))
    assert theirs.keys() == ours.keys()
    added = {names[0] for names, at in family.places(config).values() if at.offset}
    for key, array in theirs.items():  # of Gemma's norms, 1 + w
        plus = np.float32(key in added)
        assert np.array_equal(plus + ours[key], plus + array)
    after = json.loads((written / "config.json").read_text(encoding="utf-8"))
    for before in (contents(name), contents(name, "config_5.json")):
        rotary = {"rope_scaling", "rope_parameters", *(["rope_theta"] if name == "hunyuan-alpha" else [])}
        said = {key: before[key] for key in before.keys() & after.keys() - rotary if before[key] is not None}
        assert {key: after[key] for key in said} == said
    for version in ({"rope_parameters"}, {"rope_theta", "rope_scaling"}):
        half = {key: value for key, value in after.items() if key not in version}
        assert config_of(family, half, {}, Path(name)) == config


@pytest.mark.parametrize(("name", "target"), combined(NAMES, TARGETS, step=48))
def test_validate_finds_every_target_equal(
    name: str, target: Any, imported: Callable[[str], Path], exported: Callable[[str], Path], tmp_path: Path
) -> None:
    if target == "portable":
        folder = exported(name)
    else:
        folder = export_onnx(imported(name), tmp_path / "onnx", target=target)
    engines = ["mlx", "onnxruntime"] if target == "portable" else ["onnxruntime"]
    report = compare(imported(name), folder, engines, 3, threads=1, searches=target == "portable")
    assert report.equal, report.failures()


@slow
@pytest.mark.parametrize("name", ["gemma2", pytest.param("phi4-mini", marks=pytest.mark.slow)])
def test_lower_precisions_are_proven(name: str, imported: Callable[[str], Path], tmp_path: Path) -> None:
    """Of a model like it, but as wide as a block of int4."""
    config = dataclasses.replace(open_checkpoint(imported(name)).config, d_model=64, d_ff=96)
    save_checkpoint(tmp_path / "model", config, random_weights(config))
    lower: Any = ["float16", "bfloat16", "int8-weights", "int4"]
    export_onnx(tmp_path / "model", tmp_path / "onnx", precision=lower)
    runtimes = [f"onnxruntime:cpu:all:{precision}" for precision in lower]
    report = compare(tmp_path / "model", tmp_path / "onnx", runtimes, 3, threads=1, longest=12, searches=False)
    assert report.equal, report.failures()


LLAMA3 = {"kind": "llama3", "factor": 4.0, "low": 1.0, "high": 4.0, "length": 16}
WRONG: dict[str, tuple[str, dict]] = {
    "erf for tanh": ("gpt2", dict(activation="gelu")),
    "scores divided": ("gpt2-unscaled", dict(attention_scale=None)),
    "scores not divided by the layer's number": ("gpt2-numbered", dict(layer_pattern=[])),
    "epsilon": ("llama", dict(norm_epsilon=1e-5)),
    "base": ("nemo", dict(rotary_base=10000.0)),
    "no scaling": ("llama-linear", dict(rotary_scaling={})),
    "scaling of another length": ("llama3", dict(rotary_scaling={**LLAMA3, "length": 32})),
    "alpha left out": ("hunyuan-alpha", dict(rotary_base=10000.0)),
    "norms before the rotation": ("hunyuan", dict(query_key_norm_place="before")),
    "norms after the rotation": ("qwen3", dict(query_key_norm_place="after")),
    "a window of one key more": ("mistral-window", dict(window=6)),
    "a window of one key less": ("mistral-window", dict(window=4)),
    "windows in other layers": ("qwen2-window", dict(layer_pattern=[{"window": 4}])),
    "rotation in all layers": ("smollm3", dict(layer_pattern=[])),
    "all of a head turned": ("phi4-mini", dict(rotary_width=None)),
    "root of d_model left out": ("gemma", dict(scale_embeddings=False)),
    "scores by the width of heads": ("gemma3", dict(attention_scale=None)),
    "no bound of scores": ("gemma2", dict(score_cap=None)),
    "no bound of logits": ("gemma2", dict(logit_cap=None)),
    "one base": ("gemma3-linear", dict(layer_pattern=[{"window": 4}, {}, {"window": 4}])),
    "norms of each head": ("olmo2", dict(query_key_norm_place="before")),
    "no factor of sums": ("granite", dict(residual_scale=None)),
    "no norm of queries and keys": ("qwen3", dict(query_key_norm=False)),
    "no factor of embeddings": ("granite", dict(embedding_scale=None)),
    "granite's scores by the width of heads": ("granite", dict(attention_scale=None)),
    "no factor of logits": ("granite", dict(logit_scale=None)),
    "no second norm": ("gemma3", dict(norm_placement="pre")),
    "gemma's gate by erf": ("gemma", dict(activation="gelu")),
    "no window beside layers without positions": (
        "smollm3-window",
        dict(layer_pattern=[{}, {"positions": "none"}, {}]),
    ),
}
SCALED: dict[str, tuple[str, dict]] = {
    "no factor of cosines": ("qwen3-yarn", dict(attention_factor=1.0)),
    "another factor of yarn": ("qwen2", dict(factor=2.0)),
    "without mscale": ("qwen2-mscale", dict(attention_factor=1.0)),
    "another low bound": ("llama3", dict(low=2.0)),
    "texts taken for long ones": ("phi3-long", dict(length=8)),
    "another factor of long texts": ("phi3-long", dict(attention_factor=1.0)),
}
"""Numbers of rotary_scaling, as those of WRONG."""


@pytest.mark.parametrize("what", [*WRONG, *SCALED])
def test_a_wrong_option_is_caught(what: str, imported: Callable[[str], Path]) -> None:
    name, changes = (WRONG | SCALED)[what]
    given, opened = answers(name), open_checkpoint(imported(name))
    if what in SCALED:
        changes = dict(rotary_scaling={**opened.config.rotary_scaling, **changes})
    config = dataclasses.replace(opened.config, **changes)
    stored = {name: np.asarray(array) for name, array in opened.tensors()}
    shapes = parameter_shapes(config)
    weights = {name: np.resize(stored[name], shape) for name, shape in shapes.items()}
    truth = true_logits(config, weights, given["ids"], given["mask"])
    assert not passes(given["logits"], truth).passed


def test_norms_of_gemma_are_one_more_than_stored(imported: Callable[[str], Path]) -> None:
    given, opened = answers("gemma2"), open_checkpoint(imported("gemma2"))
    weights = {name: np.asarray(array) - name.endswith("norm.weight") for name, array in opened.tensors()}
    truth = true_logits(opened.config, weights, given["ids"], given["mask"])
    assert not passes(given["logits"], truth).passed


REFUSED: dict[str, tuple[str, dict]] = {
    "attn_logit_softcapping=50.0 is not read; final_logit_softcapping=30.0 is not read": (
        "gemma3",
        dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, num_experts=1),
    ),
    "num_experts=8 is not read; attention_multiplier=0.5 is not read": (
        "llama",
        dict(num_experts=8, attention_multiplier=0.5),
    ),
    "add_cross_attention is on": ("gpt2", dict(add_cross_attention=True)),
    "rope_type='dynamic' is not one of default, linear, llama3, yarn, longrope": (
        "llama",
        dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_family_lacks_is_refused_by_its_key(what: str, tmp_path: Path) -> None:
    name, changes = REFUSED[what]
    folder = shutil.copytree(GOLDEN / name, tmp_path / "theirs")
    (folder / "config.json").write_text(json.dumps(contents(name) | changes), encoding="utf-8")
    with pytest.raises(ValueError, match=what.replace("(", r"\(")):
        import_huggingface(folder, tmp_path / "out")


def test_a_start_that_ends_texts_can_be_generated(tmp_path: Path) -> None:
    """As in Qwen, whose padding is one of its ends too."""
    folder = shutil.copytree(GOLDEN / "qwen3", tmp_path / "theirs")
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[2, 1], pad_token_id=1)))
    (folder / "config.json").write_text(json.dumps(contents("qwen3") | dict(pad_token_id=1)))
    import_huggingface(folder, tmp_path / "out")
    config = open_checkpoint(tmp_path / "out").config
    assert (config.bos_id, config.eos_id, read_settings(tmp_path / "out", config)["end_ids"]) == (2, 2, (1,))
    assert banned_ids(config) == [config.pad_id] == [config.vocab_size - 1]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_folder_that_reads_images_the_text_is_taken(
    prefix: str, imported: Callable[[str], Path], tmp_path: Path
) -> None:
    """As published, and as version 5 saves it; what else there is, is told."""
    folder = shutil.copytree(GOLDEN / "gemma3", tmp_path / "theirs")
    weights, config = load_file(folder / "model.safetensors"), contents("gemma3")
    named = {prefix + name.removeprefix("model."): array for name, array in weights.items()}
    images = {f"{'model.' * (prefix[0] == 'm')}vision_tower.{i}.weight": np.ones((2, 2), np.float32) for i in range(3)}
    write_tensors(folder / "model.safetensors", named | images)
    outer = dict(model_type="gemma3", vision_config={}, mm_tokens_per_image=4, architectures=[""])
    outer |= {key: config.pop(key) for key in ("eos_token_id", "torch_dtype", "dtype") if key in config}
    (folder / "config.json").write_text(json.dumps(outer | dict(text_config=config)), encoding="utf-8")
    notes = import_huggingface(folder, tmp_path / "out")
    assert notes[0] == "3 tensors for images were not imported: vision_tower"
    assert not any("aren't read" in note for note in notes)
    ours, expected = (open_checkpoint(each) for each in (tmp_path / "out", imported("gemma3")))
    assert ours.config == expected.config
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(ours.tensors(), expected.tensors(), strict=True))
