"""Folders that `transformers` wrote, and what it computed with them (`make_golden.py`): the same logits and tokens
here, in MLX and in exported graphs, and the same files again. `golden/` is version 4's, `golden_5/` version 5's.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from combined import combined, one_of_each, thinned_rows
from safetensors.numpy import load_file, save_file

from export import OnnxTransformer, export_onnx
from export.targets.table import TARGETS
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer, cli
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.nn.parameters import named_parameters

HERE = Path(__file__).parent
GOLDEN, GOLDEN_5 = HERE / "golden", HERE / "golden_5"
PAPER = ("marian", "pegasus")
"""Families of the paper's network, which the tests of targets have."""
FOLDERS = {path.name: path for path in sorted(GOLDEN.iterdir())}
FOLDERS |= {path.name: path for path in sorted(GOLDEN_5.iterdir()) if path.name not in FOLDERS}
NAMES = list(FOLDERS)
AGAIN = [name for name in NAMES if FOLDERS[name].parent == GOLDEN and (GOLDEN_5 / name).is_dir()]
BEAMS = dict(beam=4, early_stopping=True, length_penalty=1.0, penalty_form="length")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, by the names."""
    folder = tmp_path_factory.mktemp("golden")
    for name in NAMES:
        import_huggingface(FOLDERS[name], folder / name)
    return folder


@pytest.fixture(scope="module")
def exported(imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The portable export of a name's checkpoint, made when it is first asked for; nobody changes it."""
    folder = tmp_path_factory.mktemp("exported")
    return cache(lambda name: export_onnx(imported / name, folder / name))


def answers(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDERS[name] / "answers.npz"))


def contents(folder: Path, file: str) -> dict:
    return json.loads((folder / file).read_text(encoding="utf-8"))


def model_type(name: str) -> str:
    return contents(FOLDERS[name], "config.json")["model_type"]


def on_the_other_side(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same rows, each with its padding moved from one side to the other."""
    places = np.argsort(np.where(mask[:, :1], mask, ~mask), axis=1, kind="stable")
    return np.take_along_axis(ids, places, axis=1), np.take_along_axis(mask, places, axis=1)


def in_parts(model: Transformer, ids: np.ndarray, target: np.ndarray, mask: np.ndarray, at: int) -> np.ndarray:
    """Logits of a decoder that reads the target in two steps."""
    cache = model.start(model.encode(mx.array(ids), mx.array(mask)), mx.array(mask))
    parts = (target[:, :at], target[:, at:])
    return np.concatenate([np.array(model.step(mx.array(part), cache)) for part in parts if part.size], axis=1)


@pytest.mark.parametrize(
    ("name", "eighth"),
    [*((name, i % 8) for i, name in enumerate(NAMES)), *thinned_rows(product(NAMES, [None]), len(NAMES))],
)
def test_logits_are_equal_by_the_rule(name: str, eighth: int | None, imported: Path) -> None:
    """Whichever side is padded, and wherever the target is cut in two: at every eighth place, which are all places in
    any eight names, and of one name everywhere."""
    given = answers(name)
    ids, mask, target = given["ids"], given["mask"].astype(bool), given["target"]
    places = range(1, target.shape[1] + 1) if eighth is None else range(1 + eighth, target.shape[1] + 1, 8)
    opened = open_checkpoint(imported / name)
    weights = dict(opened.tensors())
    truth64, truth32 = (Reference(opened.config, weights, kind)(ids, target, mask) for kind in (np.float64, np.float32))
    truth = Truth.of(truth64, truth32, np.ones(target.shape, bool))
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    model = Transformer.load(imported / name)
    other_ids, other_mask = on_the_other_side(ids, mask)
    computed = {
        "transformers": given["logits"],
        "mlx": np.array(model(mx.array(ids), mx.array(target), mx.array(mask))),
        "other side": np.array(model(mx.array(other_ids), mx.array(target), mx.array(other_mask))),
        **{f"cut at {at}": in_parts(model, ids, target, mask, at) for at in places},
    }
    for runtime, logits in computed.items():
        measured = Measurement.of(Deviation.of(logits, truth), truth.scale, pool, budget)
        assert measured.passed, f"{runtime}: {measured}"


@pytest.mark.fast("umt5", "bart")
@pytest.mark.parametrize("name", one_of_each(NAMES, model_type))
def test_tokens_are_equal(name: str, imported: Path, exported: Callable[[str], Path]) -> None:
    """Greedy and of four beams, after the first token that generation_config.json forces."""
    given, eos = answers(name), open_checkpoint(imported / name).config.eos_id
    rows = [ids[real].tolist() for ids, real in zip(given["ids"], given["mask"].astype(bool), strict=True)]
    models = (Transformer.load(imported / name), OnnxTransformer(exported(name), threads=1))
    for search, options in {"tokens": dict(beam=1), "beams": BEAMS}.items():
        expected = [row[: row.index(eos)] if eos in row else row for row in given[search].tolist()]
        for model in models:
            assert model.generate(rows, max_new_tokens=given["tokens"].shape[1], **options) == expected


@pytest.mark.parametrize("name", AGAIN)
def test_both_versions_files_are_the_same_model(name: str, imported: Path, tmp_path: Path) -> None:
    import_huggingface(GOLDEN_5 / name, tmp_path / "five")
    four, five = open_checkpoint(imported / name), open_checkpoint(tmp_path / "five")
    assert five.config == four.config
    before, after = dict(four.tensors()), dict(five.tensors())
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_written_again(name: str, imported: Path, tmp_path: Path) -> None:
    """Each tensor bit for bit but rows that nobody reads, and each key that means anything."""
    family = "t5" if name.startswith("mt5-tied") else model_type(name)  # which both versions take the same way
    written = to_huggingface(imported / name, tmp_path / "theirs", family)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (FOLDERS[name], written))
    learned = {key for key in theirs if "embed_positions" in key} & ours.keys()
    assert {key for key in theirs if "embed_positions" not in key} <= ours.keys() - learned
    # Copies that version 5 wants and version 4 leaves out.
    assert {key.rpartition(".embed_tokens")[1] for key in ours.keys() - theirs.keys()} <= {".embed_tokens"}
    shared = theirs.get("model.shared.weight")
    assert all(np.array_equal(ours[key], theirs.get(key, shared)) for key in ours.keys() - learned)
    assert all(np.array_equal(ours[key][2:], theirs[key][2:]) and not ours[key][:2].any() for key in learned)
    before, after = (contents(folder, "config.json") for folder in (FOLDERS[name], written))
    differing = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    # forced_eos_token_id: what the models here are asked not to do.
    differing -= {"model_type", "architectures"} if family != model_type(name) else set()
    differing -= {"bos_token_id"} if before.get("bos_token_id") is None else set()
    assert differing <= {"activation_function", "forced_eos_token_id"}  # the first has two words for some
    assert before.get("activation_function") in ("swish", "gelu_new") or "activation_function" not in differing


@pytest.mark.fast("t5", "bart")
@pytest.mark.parametrize("name", ["t5", "t5-1.1", "marian", "bart", "mbart-50"])
def test_optimums_folder_of_any_family_opens(
    name: str, imported: Path, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its graphs have the names of ours, and its config.json is the published model's."""
    folder = shutil.copytree(exported(name), tmp_path / "onnx")
    ours = OnnxTransformer(folder, threads=1)
    for file in ("mlx_transformer.json", "manifest.json"):
        (folder / file).unlink()
    shutil.copyfile(FOLDERS[name] / "config.json", folder / "config.json")
    theirs = OnnxTransformer(folder, threads=1)
    assert theirs.config == open_checkpoint(imported / name).config
    rows = [[5, 6, 7, 8], [9, 4]]
    assert theirs.search(rows, beam=3, max_new_tokens=8) == ours.search(rows, beam=3, max_new_tokens=8)


@pytest.mark.fast("bart-portable")
@pytest.mark.parametrize(("name", "target"), combined([name for name in NAMES if name not in PAPER], TARGETS, step=20))
def test_validate_finds_every_target_equal(
    name: str, target: str, imported: Path, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    if target == "portable":
        folder = exported(name)
    else:
        folder = export_onnx(imported / name, tmp_path / "onnx", target=target)
    engines = ["mlx", "onnxruntime"] if target == "portable" else ["onnxruntime"]
    report = compare(imported / name, folder, engines, 3, threads=1, searches=target == "portable")
    assert report.equal, report.failures()


@pytest.mark.parametrize("name", ["t5-1.1", "bart", "mbart-50", "m2m100", "marian", "pegasus"])
def test_an_exported_folder_says_what_the_published_one_does(name: str, exported: Callable[[str], Path]) -> None:
    """By its own name, for Optimum and transformers.js, which take the sizes of the cache from there."""
    written = contents(exported(name), "config.json")
    published = contents(FOLDERS[name], "config.json")
    sizes = ("model_type", "architectures", "d_model", "d_kv", "num_heads", "decoder_layers", "num_decoder_layers")
    sizes += ("decoder_attention_heads", "vocab_size", "decoder_start_token_id", "eos_token_id", "pad_token_id")
    assert {key: written.get(key) for key in sizes} == {key: published.get(key) for key in sizes}


@pytest.mark.parametrize("name", ["t5", "m2m100", "bart", "marian"])
def test_who_counts_columns_is_told_to_pad_on_the_right(name: str, imported: Path, tmp_path: Path, capfd) -> None:
    with suppress(SystemExit):
        cli.main(["to-huggingface", str(imported / name), str(tmp_path / "theirs")])
    note = "" if name in ("t5", "m2m100") else "; pad its inputs on the right"
    assert capfd.readouterr().out == f"{tmp_path / 'theirs'}: written{note}\n"


def test_float16_of_t5_computes_what_is_beyond_its_range(tmp_path: Path) -> None:
    """As transformers does, whose `wo` stays float32."""
    theirs = shutil.copytree(GOLDEN / "t5", tmp_path / "theirs")
    weights = load_file(theirs / "model.safetensors")
    large = {
        name: array * np.float32(300 if ".wi." in name or ".wo." in name else 1) for name, array in weights.items()
    }
    save_file({name: x.astype(np.float16) for name, x in large.items()}, theirs / "model.safetensors")
    import_huggingface(theirs, tmp_path / "ours")
    kept, wide = (Transformer.load(tmp_path / "ours", precision=precision) for precision in (None, "float32"))
    kinds = {name: array.dtype for name, array in named_parameters(kept)}
    assert {name for name, kind in kinds.items() if kind == mx.float32} == {n for n in kinds if ".down_proj." in n}
    given = [mx.array(answers("t5")[name]) for name in ("ids", "target", "mask")]
    seen: dict[str, float] = {}
    wide.encode(given[0], given[2], tap=lambda name, x: seen.update({name: mx.abs(x).max().item()}))
    assert max(seen.values()) > 65504
    narrow, exact = (np.array(model(*given)) for model in (kept, wide))
    assert np.abs(narrow - exact).max() <= 0.02 * np.abs(exact).max()


def off_by_one(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: np.roll(array, 1, axis=0) if n.endswith(".positions.weight") else array for n, array in weights.items()}


def layers_swapped(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    first, second = (f"decoder.positions.layers.{i}.weight" for i in range(2))
    return {**weights, first: weights[second], second: weights[first]}


WRONG: dict[str, tuple[str, dict]] = {
    "epsilon 1e-12 for 1e-5": ("bart", dict(norm_epsilon=1e-12)),
    "tanh for erf": ("bart", dict(activation="gelu_tanh")),
    "erf for tanh": ("t5-1.1", dict(activation="gelu")),
    "no square root": ("mbart", dict(scale_embeddings=False)),
    "positions from 0": ("m2m100", dict(first_position=0)),
    "positions from pad_id": ("m2m100", dict(first_position=1)),
    "the paper's frequencies": ("small100", dict(positions="sinusoidal_halves")),
    "scores divided": ("flan", dict(attention_scale=None)),
    "classifier divided": ("madlad", dict(logit_scale=0.25)),
    "classifier not divided": ("t5", dict(logit_scale=None)),
    "buckets of another distance": ("mt5", dict(relative_distance=13)),
    "rows of positions off by one": ("mbart-odd", {}),
    "tables of two layers swapped": ("umt5", {}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_option_is_caught(what: str, imported: Path) -> None:
    name, changes = WRONG[what]
    given, opened = answers(name), open_checkpoint(imported / name)
    config = dataclasses.replace(opened.config, **changes)
    wrong = dict if changes else {"mbart-odd": off_by_one, "umt5": layers_swapped}[name]
    weights = wrong(dict(opened.tensors()))
    inputs = given["ids"], given["target"], given["mask"].astype(bool)
    truth64, truth32 = (Reference(config, weights, kind)(*inputs) for kind in (np.float64, np.float32))
    truth = Truth.of(truth64, truth32, np.ones(given["target"].shape, bool))
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    assert not Measurement.of(Deviation.of(given["logits"], truth), truth.scale, pool, budget).passed
