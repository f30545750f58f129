"""Which layers of an encoder may be int8: what is measured, which stay in float32, and that all who say so agree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from combined import combined, thinned
from rich.console import Console
from word_pieces import SPECIAL

from export import OnnxTransformer, export_onnx, export_search
from export.package.layers import MEASURED
from export.package.plan import describe_graphs
from export.package.quality import nearest, recorded, shared_neighbours
from export.search.metadata import SCALES
from export.validate import compare
from mlx_transformer.commands.info import describe
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.int8_scales import INT8_SCALES, layers_of, read_int8_scales
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.families.encoder_text import wordpiece
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json

GOLDEN = Path(__file__).parents[2] / "mlx_transformer" / "families" / "golden_encoders"
# A family each, with a head or none, and a text's vector by its folder or by the mean of the last layer.
MODELS = {"bert-words": True, "roberta": True, "distilbert-classes": False, "modernbert": False}
WORDS = [f"w{i}" for i in range(35)]
RNG = np.random.default_rng(3)
LINES = [" ".join(RNG.choice(WORDS, 2 + i % 9)) for i in range(90)]
ACCEPTED: dict[str, Any] = {"accept_loss": True, "precision": "int8"}
SENSITIVE = "encoder.layers.1.feed_forward"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "lines.txt"
    file.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return file


def checkpoint(name: str, folder: Path, told: bool = True, sensitive: bool = False) -> Path:
    """A golden encoder that reads words. told: its folder says how a text's vector is made. sensitive: one layer's
    matrix has a number in each row, large and multiplied with zeros alone, for which int8 rounds all others to 0."""
    (folder / "words").mkdir(parents=True)
    vocabulary = "".join(f"{word}\n" for word in [*SPECIAL, *WORDS])
    (folder / "words" / "vocab.txt").write_text(vocabulary, encoding="utf-8")
    import_huggingface(GOLDEN / name, folder / "imported")
    opened = open_checkpoint(folder / "imported")
    config = dataclasses.replace(opened.config, pad_id=0, bos_id=2, eos_id=3)
    weights = {key: np.array(array) for key, array in opened.tensors()}
    if sensitive:
        before = {"post": "self_attention_norm", "pre": "feed_forward_norm"}[config.norm_placement]
        for key in (key for key in weights if key.startswith(f"encoder.layers.1.{before}.")):
            weights[key][5] = 0
        weights[f"{SENSITIVE}.up_proj.weight"][:, 5] = 1e4
    texts = TextEmbedding(normalize=True).texts() if told else {}
    return save_checkpoint(folder / "model", config, weights, wordpiece(folder / "words", {}), texts=texts)


def int8_entry(folder: Path) -> dict[str, Any]:
    return read_json(folder / "mlx_transformer.json")["precisions"]["int8"]


def in_float32(folder: Path) -> set[str]:
    """The matrices that the graph holds as they are."""
    graph = onnx.load(folder / "onnx" / "model_quantized.onnx", load_external_data=False).graph
    config = open_checkpoint(folder.parent / "model").config
    return {tensor.name for tensor in graph.initializer} & quantizable_shapes(config).keys()


@pytest.mark.parametrize("name", thinned(MODELS, 4))
def test_each_layer_is_measured_as_a_package_with_it_alone_would_be(name: str, text: Path, tmp_path: Path) -> None:
    model = checkpoint(name, tmp_path, told=MODELS[name])
    folder = export_onnx(model, tmp_path / "onnx", gate_source=text, **ACCEPTED)
    found, config = int8_entry(folder)["layers"], open_checkpoint(model).config
    layers = [layer for layer in layers_of(quantizable_shapes(config)) if not layer.startswith(("head", "output"))]
    assert list(found["each"]) == layers
    assert (found["text"], found["sentences"]) == (str(text), len(LINES))
    how = {} if MODELS[name] else {"pooling": "mean"}
    exact = OnnxTransformer(export_onnx(model, tmp_path / "float32"), threads=1).embed(LINES, **how).astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    for layer in (layers[0], layers[-1]):
        others = [other for other in layers_of(quantizable_shapes(config)) if other != layer]
        alone = export_onnx(model, tmp_path / layer, float32_layers=others, precision="int8")
        vectors = OnnxTransformer(alone, threads=1).embed(LINES, **how).astype(np.float64)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        distance = np.sqrt(np.square(vectors - exact).sum(axis=1).mean())
        assert found["each"][layer]["distance"] == pytest.approx(distance, rel=0.02)
        kept = shared_neighbours(nearest(exact), nearest(vectors))
        assert found["each"][layer]["neighbours"] == pytest.approx(kept, abs=0.01)
        assert 0 < distance < found["all"]["distance"] * 3
    assert "| `all of them` |" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "target"), combined(MODELS, ["portable", "cpu", "web"], step=4))
def test_the_layer_that_suffers_stays_in_float32(name: str, target: str, text: Path, tmp_path: Path) -> None:
    model = checkpoint(name, tmp_path, told=MODELS[name], sensitive=True)
    told: list[str] = []
    options = {**ACCEPTED, "target": target, "gate_source": text}
    folder = export_onnx(model, tmp_path / "onnx", least_neighbours=0.8, log=told.append, **options)
    entry, config = int8_entry(folder), open_checkpoint(model).config
    assert entry["float32"] == [f"{SENSITIVE}.up_proj"]
    each = {layer: moved["distance"] for layer, moved in entry["layers"]["each"].items()}
    assert each.pop(SENSITIVE) > 3 * max(each.values())
    assert entry["layers"]["all"]["neighbours"] < 0.8
    assert any(line.startswith(f"int8: float32 stays in {SENSITIVE}.up_proj: ") for line in told)
    # All who say which they are say the same.
    matrices = {f"{SENSITIVE}.up_proj.weight"}
    assert in_float32(folder) == matrices
    scales = read_int8_scales(folder, config)
    assert scales is not None
    assert {key for key, product in scales.products.items() if product.float32} == matrices
    assert f"float32 stays in `{SENSITIVE}.up_proj`; all other layers are int8." in (folder / "README.md").read_text(
        "utf-8"
    )
    report = compare(model, folder, ["onnxruntime"], seed=5, longest=9, threads=1, searches=False)
    assert report.equal, report.failures()
    assert report.runtimes[0].arithmetic == f"int8; float32 in {SENSITIVE}.up_proj"
    if MODELS[name]:
        (quality,) = recorded(folder)
        assert quality.agreement >= 0.8
        assert report.notes == [f"onnxruntime: when it was exported, {quality}"]


@pytest.mark.slow
def test_as_few_matrices_as_it_takes_stay(text: Path, tmp_path: Path) -> None:
    model = checkpoint("roberta", tmp_path)
    found = int8_entry(export_onnx(model, tmp_path / "onnx", gate_source=text, **ACCEPTED))["layers"]
    none, best = found["all"]["neighbours"], max(moved["neighbours"] for moved in found["each"].values())
    assert none < best

    def left(least: float) -> set[str]:
        folder = export_onnx(model, tmp_path / str(least), least_neighbours=least, gate_source=text, **ACCEPTED)
        (quality,) = recorded(folder)
        assert quality.agreement > least  # by more than chance
        return in_float32(folder)

    matrices = [name for name in quantizable_shapes(open_checkpoint(model).config) if not name.startswith("head")]
    assert 0 < len(left(none)) <= len(left((none + best) / 2)) < len(matrices)


@pytest.mark.slow
def test_a_file_says_so_too(text: Path, tmp_path: Path) -> None:
    model = checkpoint("roberta", tmp_path, sensitive=True)
    options = {**ACCEPTED, "gate_source": text, "least_neighbours": 0.8}
    folder = export_onnx(model, tmp_path / "onnx", **options)
    file = export_search(model, tmp_path / "one.onnx", text=True, **options)
    proto = onnx.load(file)
    (said,) = (entry.value for entry in proto.metadata_props if entry.key == SCALES)
    assert said == (folder / INT8_SCALES).read_text(encoding="utf-8")
    console = Console(width=400)
    with console.capture() as printed:
        console.print(describe(file, describe_graphs))
    assert SENSITIVE in printed.get()
    names = {tensor.name for tensor in proto.graph.initializer}
    assert {name for name in names if name.startswith(f"{SENSITIVE}.up_proj.weight")} == {f"{SENSITIVE}.up_proj.weight"}


def test_layers_are_left_by_name(tmp_path: Path) -> None:
    model = checkpoint("bert-words", tmp_path)
    named = ["embedding", "encoder.layers.1", "encoder.layers.0.feed_forward.down_proj"]
    folder = export_onnx(model, tmp_path / "onnx", float32_layers=named, precision="int8")
    left = ["embedding", "encoder.layers.0.feed_forward.down_proj", "encoder.layers.1.self_attention", SENSITIVE]
    assert int8_entry(folder) == {"suffix": "_quantized", "float32": left}
    expected = {name for name in quantizable_shapes(open_checkpoint(model).config) if name.startswith(tuple(named))}
    assert in_float32(folder) == expected
    console = Console(width=400)
    with console.capture() as printed:
        console.print(describe(folder, describe_graphs))
    assert ", ".join(left) in printed.get()
    report = compare(model, folder, ["onnxruntime"], seed=5, longest=9, threads=1, searches=False)
    assert report.equal, report.failures()
    # A checkpoint that has the file is exported the same way again.
    (model / INT8_SCALES).write_bytes((folder / INT8_SCALES).read_bytes())
    again = export_onnx(model, tmp_path / "again", precision="int8")
    assert in_float32(again) == expected
    assert export_onnx(model, tmp_path / "one", float32_layers="embedding", precision="int8")


@pytest.mark.slow
def test_with_fixed_scales_too(text: Path, tmp_path: Path) -> None:
    """Between its integers as exact as float32 is, and float32 in the rest."""
    model = checkpoint("modernbert", tmp_path)
    options = {**ACCEPTED, "int8_scales": "fixed", "calibrate": text, "float32_layers": SENSITIVE}
    folder = export_onnx(model, tmp_path / "onnx", **options)
    entry = int8_entry(folder)
    assert (entry["scales"], entry["float32"]) == ("fixed", [SENSITIVE])
    report = compare(model, folder, ["onnxruntime"], seed=5, longest=9, threads=1, searches=False)
    assert report.equal, report.failures()
    on_integers = {point.tap.partition(" ")[0] for point in report.points if point.tap.endswith("(integers)")}
    assert "encoder.layers.1.self_attention.query_proj.weight" in on_integers
    assert f"{SENSITIVE}.up_proj.weight" not in on_integers


@pytest.mark.fast("more")
@pytest.mark.parametrize("change", ["more", "fewer"])
def test_validate_finds_other_layers_than_said(change: str, tmp_path: Path) -> None:
    model = checkpoint("distilbert-classes", tmp_path)
    folder = export_onnx(model, tmp_path / "onnx", float32_layers=SENSITIVE, precision="int8")
    values = json.loads((folder / INT8_SCALES).read_text(encoding="utf-8"))
    other = "encoder.layers.0.feed_forward.up_proj.weight"
    values["products"] |= {other: {"float32": True}} if change == "more" else {f"{SENSITIVE}.up_proj.weight": {}}
    (folder / INT8_SCALES).write_text(json.dumps(values), encoding="utf-8")
    (folder / "manifest.json").unlink()
    (structure,) = compare(model, folder, ["onnxruntime"], seed=5, longest=6, threads=1, searches=False).structures
    said = f"{other}: integers, int8_scales.json has it in float32"
    if change == "fewer":
        said = f"{SENSITIVE}.up_proj.weight: float32, int8_scales.json doesn't say so"
    assert said in structure.problem


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "int4", "float32_layers": "embedding"}, "float32_layers embedding: precision int4 has no"),
        ({"float32_layers": ["encoder.layers.7"]}, "float32 layer 'encoder.layers.7': the model has embedding, enc"),
        ({"float32_layers": "encoder.layers.0.feed"}, "float32 layer 'encoder.layers.0.feed': the model has embed"),
        ({"least_neighbours": 0.9}, "least_neighbours 0.9: is judged on text: give some with --gate-source FILE"),
        ({"least_neighbours": 1.5}, "least_neighbours 1.5: is a share, above 0 and at most 1"),
        ({"least_neighbours": float("nan")}, "least_neighbours nan: is a share, above 0 and at most 1"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = checkpoint("bert-words", tmp_path)
    with pytest.raises(UserError, match=said):
        export_onnx(model, tmp_path / "onnx", **{"precision": "int8", **changes})
    assert not (tmp_path / "onnx").exists()


def test_a_share_that_no_layer_can_keep_is_refused(text: Path, tmp_path: Path) -> None:
    model = checkpoint("bert-words", tmp_path)
    with pytest.raises(UserError, match=r"least_neighbours 1: with any layer in int8 fewer are kept: take float16"):
        export_onnx(model, tmp_path / "onnx", least_neighbours=1.0, gate_source=text, **ACCEPTED)


@pytest.mark.parametrize("lines", ["", "\n \n", "w1 w2\n"])
def test_a_text_without_neighbours_is_refused(lines: str, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text(lines)
    with pytest.raises(UserError, match=r"few\.txt: the quality gate compares texts: give two lines or more"):
        export_onnx(checkpoint("bert-words", tmp_path), tmp_path / "onnx", gate_source=few, **ACCEPTED)


@pytest.mark.slow
def test_a_long_text_is_measured_in_parts(tmp_path: Path) -> None:
    model = checkpoint("roberta", tmp_path)
    many = tmp_path / "many.txt"
    many.write_text("".join(f"{line}\n" for line in LINES * 5), encoding="utf-8")
    shares: list[float] = []
    watch = lambda share, what: shares.append(share) if what == "int8 layers" else None  # noqa: E731
    folder = export_onnx(model, tmp_path / "onnx", gate_source=many, watch=watch, **ACCEPTED)
    assert int8_entry(folder)["layers"]["sentences"] == len(LINES * 5) // 3 <= MEASURED
    assert shares == sorted(shares)
    assert shares[-1] == 1
