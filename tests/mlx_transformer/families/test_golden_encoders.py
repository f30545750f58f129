"""Encoders that `transformers` wrote, and what it computed with them (`make_golden_encoders.py`): the same hidden
states, vectors and logits here, in MLX and in exported graphs, and the same files again."""

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
import onnxruntime
import pytest
from combined import combined, one_of_each, thinned
from safetensors.numpy import load_file, save_file

from export import OnnxTransformer, export_onnx
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.families.table import FAMILIES
from mlx_transformer.system.errors import UserError

HERE = Path(__file__).parent
FOUR, FIVE = HERE / "golden_encoders", HERE / "golden_encoders_5"
NAMES = sorted(path.name for path in FOUR.iterdir())
Arrays = dict[str, np.ndarray]
LABELS = ("bad", "fair", "good")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, by the names."""
    folder = tmp_path_factory.mktemp("golden")
    for name in NAMES:
        assert import_huggingface(FOUR / name, folder / name) == [f"no tokenizer ({FOUR / name} has no tokenizer.json)"]
    return folder


@pytest.fixture(scope="module")
def exported(imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The portable export of a name's checkpoint, made when it is first asked for; nobody changes it."""
    folder = tmp_path_factory.mktemp("exported")
    return cache(lambda name: export_onnx(imported / name, folder / name))


def answers(name: str) -> Arrays:
    return dict(np.load(FOUR / name / "answers.npz"))


def contents(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


CHOSEN = one_of_each(NAMES, lambda name: contents(FOUR / name)["model_type"], lambda name: name.partition("-")[2])
"""Of each family one, and of each kind of head and table."""


def given_to(config: TransformerConfig, given: Arrays) -> dict[str, Any]:
    """What the model reads besides ids and mask."""
    return {"token_types": given["types"]} if config.token_types else {}


def outputs_of(config: TransformerConfig, given: Arrays) -> np.ndarray:
    """What the head gave, in the form of ours."""
    if config.head.kind == "spans":
        return np.stack([given["start_logits"], given["end_logits"]], axis=-1)
    names = {"hidden": "last_hidden_state", "pooled": "pooler_output"}
    return given[names.get(config.head.kind, "logits")]


def truths(config: TransformerConfig, weights: Arrays, given: Arrays) -> tuple[Truth, Truth]:
    """Of the last layer and of what the head gives."""
    mask, others = given["mask"].astype(bool), given_to(config, given)
    references = [Reference(config, weights, kind) for kind in (np.float64, np.float32)]
    hidden, single_hidden = (reference.encode(given["ids"], mask, **others) for reference in references)
    head, single_head = (reference(given["ids"], mask=mask, **others) for reference in references)
    valid = np.ones(len(mask), bool) if config.head.per_row else mask
    return Truth.of(hidden, single_hidden, mask), Truth.of(head, single_head, valid)


def passes(array: np.ndarray, truth: Truth) -> bool:
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    return Measurement.of(Deviation.of(array, truth), truth.scale, pool, budget).passed


def on_the_other_side(given: Arrays) -> Arrays:
    """The same rows, each with its padding moved from one side to the other."""
    mask = given["mask"].astype(bool)
    places = np.argsort(np.where(mask[:, :1], mask, ~mask), axis=1, kind="stable")
    return {name: np.take_along_axis(given[name], places, axis=1) for name in ("ids", "mask", "types")}


def placed_as(array: np.ndarray, mask: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Values of tokens at other places; of rows as they are."""
    if array.ndim == 2:
        return array
    moved = np.zeros_like(array)
    moved[before.astype(bool)] = array[mask.astype(bool)]
    return moved


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_equal_by_the_rule(name: str, imported: Path) -> None:
    given, opened = answers(name), open_checkpoint(imported / name)
    config = opened.config
    hidden, head = truths(config, dict(opened.tensors()), given)
    model = Transformer.load(imported / name)
    assert "last_hidden_state" not in given or passes(given["last_hidden_state"], hidden)
    assert passes(outputs_of(config, given), head)
    for side in (given, on_the_other_side(given)):
        inputs = mx.array(side["ids"]), mx.array(side["mask"].astype(bool))
        others = given_to(config, side)
        for computed, truth in ((model.encode(*inputs, **others), hidden), (model(*inputs, **others), head)):
            assert passes(placed_as(np.array(computed), side["mask"], given["mask"]), truth)


@pytest.mark.parametrize("name", thinned(NAMES, 4))
def test_both_versions_files_are_the_same_model(name: str, imported: Path, tmp_path: Path) -> None:
    import_huggingface(FIVE / name, tmp_path / "five")
    four, five = open_checkpoint(imported / name), open_checkpoint(tmp_path / "five")
    assert five.config == four.config
    before, after = dict(four.tensors()), dict(five.tensors())
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    new = dict(np.load(FIVE / name / "answers.npz"))
    truth = truths(four.config, before, new)[1]
    assert passes(outputs_of(four.config, new), truth)


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_written_again(name: str, imported: Path, tmp_path: Path) -> None:
    """Each tensor bit for bit that is read at all, and each key that means anything."""
    written = to_huggingface(imported / name, tmp_path / "theirs", contents(FOUR / name)["model_type"])
    assert {path.name for path in written.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (FOUR / name, written))
    family = FAMILIES[contents(FOUR / name)["model_type"]]
    unread = {key for key in theirs if "position_embeddings" in key} if family.counts_tokens else set()
    left = {key for key in theirs.keys() - ours.keys() if "pooler" not in key and "seq_relationship" not in key}
    assert not left
    twice = {key for key in ours if key.endswith("decoder.bias") and name.endswith("untied")}
    assert ours.keys() - twice <= theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours.keys() - unread - twice)
    before, after = contents(FOUR / name), contents(written)
    alike = {"architectures"} if before["architectures"] == ["BertForPreTraining"] else set()
    alike |= {"hidden_act"} if before.get("hidden_act") == "gelu_new" else set()  # which has two names
    alike |= {"global_attn_every_n_layers"} if before.get("num_hidden_layers") == 1 else set()
    alike |= {key for key in ("label2id", "sep_token_id", "cls_token_id") if before.get(key) is None}
    differing = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    assert differing <= alike


@pytest.mark.parametrize("name", ["bert-untied", "roberta-untied"])
def test_an_untied_classifier_has_a_bias_of_its_own(name: str, tmp_path: Path) -> None:
    """Version 5 saves two that may differ, computes with the classifier's, and draws it where a file has the other
    alone."""
    shutil.copytree(FIVE / name, tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    [shared] = (key for key in tensors if key in ("cls.predictions.bias", "lm_head.bias"))
    own = shared.replace("bias", "decoder.bias")
    tensors[own] = np.flip(tensors[shared]).copy()
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    assert np.array_equal(dict(open_checkpoint(tmp_path / "ours").tensors())["output_proj.bias"], tensors[own])
    family = contents(FIVE / name)["model_type"]
    written = load_file(to_huggingface(tmp_path / "ours", tmp_path / "again", family) / "model.safetensors")
    assert all(np.array_equal(written[key], tensors[own]) for key in (shared, own))


@pytest.mark.parametrize(("name", "target"), combined(NAMES, ["portable", "cpu", "web"], step=8))
def test_validate_finds_every_target_equal(
    name: str, target: str, imported: Path, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    if target == "portable":
        folder = exported(name)
    else:
        folder = export_onnx(imported / name, tmp_path / "onnx", target=target)
    engines = ["mlx", "onnxruntime"] if target == "portable" else ["onnxruntime"]
    report = compare(imported / name, folder, engines, 3, threads=1)
    assert report.equal, report.failures()


@pytest.mark.parametrize("name", CHOSEN)
def test_graphs_give_what_transformers_does_by_its_names(
    name: str, imported: Path, exported: Callable[[str], Path]
) -> None:
    given, opened = answers(name), open_checkpoint(imported / name)
    hidden, head = truths(opened.config, dict(opened.tensors()), given)
    folder = exported(name)
    session = onnxruntime.InferenceSession(next(folder.rglob("model.onnx")))
    inputs = {"input_ids": given["ids"], "attention_mask": given["mask"], "token_type_ids": given["types"]}
    inputs = {entry.name: inputs[entry.name] for entry in session.get_inputs()}
    names = [entry.name for entry in session.get_outputs()]
    found = {name: np.asarray(array) for name, array in zip(names, session.run(names, inputs), strict=True)}
    assert set(names) == {"last_hidden_state", *(given.keys() - {"ids", "mask", "types"})}
    assert passes(found["last_hidden_state"], hidden)
    assert passes(
        found["last_hidden_state"] if opened.config.head.kind == "hidden" else outputs_of(opened.config, found), head
    )


@pytest.mark.parametrize("name", [p for p in CHOSEN if p.values[0] not in ("bert-hidden", "xlm-r")])
def test_optimums_folder_opens(name: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    """Its graph has the names of ours, and its config.json is the published model's, which doesn't tell of those two
    that they have no pooler."""
    folder = shutil.copytree(exported(name), tmp_path / "onnx")
    ours = OnnxTransformer(folder, threads=1)
    for file in ("mlx_transformer.json", "manifest.json"):
        (folder / file).unlink()
    shutil.copyfile(FOUR / name / "config.json", folder / "config.json")
    theirs, ids = OnnxTransformer(folder, threads=1), [[5, 6, 7, 8], [9, 4, 4, 7]]
    assert theirs.config == ours.config
    assert np.array_equal(theirs.logits(ids), ours.logits(ids))


def rolled(weights: Arrays, end: str) -> Arrays:
    return {n: np.roll(array, 1, axis=0) if n.endswith(end) else array for n, array in weights.items()}


NEAR = {"window": 3, "rotary_base": 100.0}
WRONG: dict[str, tuple[str, dict, str]] = {
    "epsilon 1e-12 for 1e-5": ("bert-words", dict(norm_epsilon=1e-12), ""),
    "tanh for erf": ("bert", dict(activation="gelu_tanh"), ""),
    "another head's activation": (
        "bert-classes",
        dict(head=Head(kind="classes", activation="relu", labels=LABELS)),
        "",
    ),
    "the mean for the first": (
        "bert-classes",
        dict(head=Head(kind="classes", activation="tanh", labels=LABELS, pooling="mean")),
        "",
    ),
    "square root": ("bert", dict(scale_embeddings=True), ""),
    "positions off by one": ("bert-tokens", {}, ".positions.weight"),
    "kinds of tokens off by one": ("bert", {}, "token_type_embedding.weight"),
    "a window of one more": ("modernbert", dict(layer_pattern=[{}, {**NEAR, "window": 4}, {**NEAR, "window": 4}]), ""),
    "a window of one less": ("modernbert", dict(layer_pattern=[{}, {**NEAR, "window": 2}, {**NEAR, "window": 2}]), ""),
    "no window": ("modernbert", dict(layer_pattern=[{}, {"rotary_base": 100.0}, {"rotary_base": 100.0}]), ""),
    "the base of the other layers": ("modernbert", dict(layer_pattern=[{}, {"window": 3}, {"window": 3}]), ""),
    "both bases exchanged": (
        "modernbert-words",
        dict(rotary_base=100.0, layer_pattern=[{}, {"window": 3, "rotary_base": 160000.0}]),
        "",
    ),
    "window first": ("modernbert-words", dict(layer_pattern=[NEAR, {}]), ""),
    "the first token for the mean": (
        "modernbert-mean",
        dict(head=Head(kind="classes", activation="gelu", norm=True, labels=LABELS)),
        "",
    ),
    "rows of the gate off by one": ("modernbert", {}, "gate_proj.weight"),
    "norms that don't centre": ("modernbert", dict(norm="rmsnorm", norm_bias=True), ""),
    "positions from pad_id": ("roberta-words", {}, ".positions.weight"),
    "tanh for ReLU": ("distilbert-classes", dict(head=Head(kind="classes", activation="tanh", labels=LABELS)), ""),
    "the model's activation for erf": ("roberta-words", dict(head=Head(activation="relu", norm=True)), ""),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_option_is_caught(what: str, imported: Path) -> None:
    name, changes, end = WRONG[what]
    given, opened = answers(name), open_checkpoint(imported / name)
    config, weights = dataclasses.replace(opened.config, **changes), dict(opened.tensors())
    truth = truths(config, rolled(weights, end) if end else weights, given)[1]
    assert not passes(outputs_of(config, given), truth)


@pytest.mark.parametrize(
    ("problem", "field"),
    [("multi_label_classification", "several"), ("regression", "scores"), ("single_label_classification", None)],
)
def test_what_the_numbers_of_classes_mean_is_kept(problem: str, field: str | None, tmp_path: Path) -> None:
    shutil.copytree(FOUR / "bert-classes", tmp_path / "theirs")
    values = contents(tmp_path / "theirs") | dict(problem_type=problem)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    head = open_checkpoint(tmp_path / "ours").config.head
    assert (head.several, head.scores) == (field == "several", field == "scores")
    to_huggingface(tmp_path / "ours", tmp_path / "again")
    assert contents(tmp_path / "again").get("problem_type") == (problem if field else None)


def test_all_that_is_wrong_with_a_folder_is_told_at_once(tmp_path: Path) -> None:
    shutil.copytree(FOUR / "bert-classes", tmp_path / "wrong")
    values = contents(tmp_path / "wrong")
    values |= dict(hidden_act="swoosh", is_decoder=True, id2label={"0": "a", "2": "b"}, position_embedding_type="x")
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError) as error:
        import_huggingface(tmp_path / "wrong", tmp_path / "out")
    for part in (
        "hidden_act='swoosh'",
        "position_embedding_type='x'",
        "is_decoder is on",
        "id2label={'0': 'a', '2': 'b'}",
    ):
        assert part in str(error.value)


def test_all_that_is_wrong_with_modernberts_layers_and_heads_is_told_at_once(tmp_path: Path) -> None:
    shutil.copytree(FOUR / "modernbert-classes", tmp_path / "wrong")
    values = contents(tmp_path / "wrong")
    values |= dict(global_attn_every_n_layers=0, local_attention=1, rope_scaling={"type": "linear"}, layer_types=["a"])
    values |= dict(classifier_pooling="max", classifier_activation="swoosh", norm_bias="no")
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError) as error:
        import_huggingface(tmp_path / "wrong", tmp_path / "out")
    for part in (
        "norm_bias='no' must be true or false",
        "rope_scaling={'type': 'linear'} is not read",
        "global_attn_every_n_layers=0 must be at least 1",
        "local_attention=1 must be at least 2",
        "layer_types=['a'] must name full_attention or sliding_attention for each of 4 layers",
        "classifier_pooling='max' is not one of cls, mean",
        "classifier_activation='swoosh' is not one of relu",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("layers", "told"), [(10**9, "encoder_layers=1000000000"), (1.5, "num_hidden_layers=1.5 must")]
)
def test_numbers_of_layers_that_there_cannot_be(layers: float, told: str, tmp_path: Path) -> None:
    """A list of the first would be of 8 GB."""
    shutil.copytree(FIVE / "modernbert", tmp_path / "theirs")
    values = contents(tmp_path / "theirs") | {"num_hidden_layers": layers, "layer_types": None}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match=told):
        import_huggingface(tmp_path / "theirs", tmp_path / "ours")


def test_layers_with_windows_turn_as_the_others_where_their_base_is_null(imported: Path, tmp_path: Path) -> None:
    """As version 4 has it; a base that isn't there is its default."""
    shutil.copytree(FOUR / "modernbert", tmp_path / "theirs")
    values = contents(tmp_path / "theirs") | {"local_rope_theta": None}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    import_huggingface(tmp_path / "theirs", tmp_path / "null")
    del values["local_rope_theta"]
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    import_huggingface(tmp_path / "theirs", tmp_path / "missing")
    bases = [
        [open_checkpoint(tmp_path / n).config.of("encoder", i).rotary_base for i in (0, 1)] for n in ("null", "missing")
    ]
    assert bases == [[160000.0, 160000.0], [160000.0, 10000.0]]


def test_layers_that_follow_no_rule_are_listed(imported: Path, tmp_path: Path) -> None:
    """As version 5 has them, and version 4 can't."""
    shutil.copytree(FIVE / "modernbert", tmp_path / "other")
    values = contents(tmp_path / "other")
    values["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    import_huggingface(tmp_path / "other", tmp_path / "ours")
    config = open_checkpoint(tmp_path / "ours").config
    assert [config.of("encoder", i).window for i in range(4)] == [3, None, 3, 3]
    written = contents(to_huggingface(tmp_path / "ours", tmp_path / "theirs"))
    assert written["layer_types"] == values["layer_types"]
    assert "global_attn_every_n_layers" not in written


def test_old_names_of_norms_are_read(imported: Path, tmp_path: Path) -> None:
    """gamma and beta, with the prefix that a bare encoder's file need not have."""
    shutil.copytree(FOUR / "bert", tmp_path / "old")
    tensors = load_file(tmp_path / "old" / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for end, other in old.items():
        tensors = {f"{n.removesuffix(end)}{other}" if n.endswith(end) else n: array for n, array in tensors.items()}
    tensors = {f"bert.{name}": array for name, array in tensors.items()}
    save_file({**tensors, "bert.embeddings.position_ids": np.arange(26)}, tmp_path / "old" / "model.safetensors")
    import_huggingface(tmp_path / "old", tmp_path / "ours")
    before, after = (dict(open_checkpoint(path).tensors()) for path in (imported / "bert", tmp_path / "ours"))
    assert all(np.array_equal(before[name], after[name]) for name in before)
