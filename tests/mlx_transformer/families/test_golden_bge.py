"""The three heads of bge-m3: what PyTorch computes with them (`make_golden_bge.py`), in both runtimes, and their files
again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from export import OnnxTransformer, export_onnx
from export.interface import TEXT_OUTPUTS
from export.validate import compare
from export.validate.reference import Reference
from export.validate.reference.layers import MADE
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer
from mlx_transformer.cli import main
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.heads import DENSE, EMBEDDING
from mlx_transformer.core.text_embedding import read_embedding
from mlx_transformer.families.folder import needed
from mlx_transformer.families.sentence_folder import HEADS
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.torch_files import stored_torch_tensors

GOLDEN = Path(__file__).parent / "golden_bge"
ANSWERS = dict(np.load(GOLDEN / "answers.npz"))
TEXTS = ANSWERS["texts"].tolist()
LENGTHS = ANSWERS["mask"].sum(axis=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bge")
    assert import_huggingface(GOLDEN, folder / "model") == []
    return {"model": folder / "model", "onnx": export_onnx(folder / "model", folder / "onnx")}


@pytest.fixture(scope="module", params=["model", "onnx"])
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Any:
    return (Transformer.load if request.param == "model" else OnnxTransformer)(folders[request.param])


def reference(folder: Path, kind: Any, dtype: type) -> NDArray:
    """Of each text by the reference, aligned with the ids."""
    opened = open_checkpoint(folder)
    embedding = read_embedding(folder, opened.config.d_model)
    assert embedding is not None
    real = ANSWERS["mask"].astype(bool)
    memory = Reference(opened.config, dict(opened.tensors()), dtype).encode(ANSWERS["ids"], real)
    return MADE[kind](embedding, memory, real)


def as_answered(folder: Path, kind: str, given: NDArray) -> NDArray:
    """The reference's output in the form of PyTorch's answers."""
    if kind != "sparse":
        return given[:, 1:] if kind == "multi" else given
    found = np.zeros(ANSWERS["lexical"].shape, given.dtype)
    for row, ids, weights in zip(found, ANSWERS["ids"], given, strict=True):
        np.maximum.at(row, ids, weights)
    found[:, :4] = 0  # special ids and the unknown word's
    return found


def answer(kind: str) -> NDArray:
    return ANSWERS["lexical" if kind == "sparse" else kind]


def dense_form(kind: str, found: Any) -> NDArray:
    """What `embed` returned, in that form."""
    if kind == "dense":
        return np.asarray(found)
    filled = np.zeros(answer(kind).shape, np.float32)
    for row, each in zip(filled, found, strict=True):
        if kind == "sparse":
            row[list(each)] = list(each.values())
        else:
            row[: len(each)] = each
    return filled


def passes(array: NDArray, truth: Truth) -> bool:
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    return Measurement.of(Deviation.of(array, truth), truth.scale, pool, budget).passed


def truth_of(kind: str, folder: Path) -> Truth:
    exact, single = (as_answered(folder, kind, reference(folder, kind, t)) for t in (np.float64, np.float32))
    np.testing.assert_allclose(exact, answer(kind), rtol=0, atol=1e-12)
    valid = ANSWERS["mask"].astype(bool)[:, 1:] if kind == "multi" else np.ones(len(TEXTS), bool)
    return Truth.of(answer(kind), single, valid)


@pytest.mark.parametrize("kind", MADE)
def test_each_head_is_pytorch_s_by_the_rule(kind: str, model: Any, folders: dict[str, Path]) -> None:
    truth, found = truth_of(kind, folders["model"]), model.embed(TEXTS, kind=kind)
    assert passes(dense_form(kind, found), truth)
    assert passes(dense_form(kind, [model.embed(text, kind=kind) for text in TEXTS]), truth)
    assert not passes(np.roll(dense_form(kind, found), 1, axis=-1), truth)


def test_the_graph_gives_all_three(folders: dict[str, Path]) -> None:
    session = onnxruntime.InferenceSession(folders["onnx"] / "onnx" / "model.onnx")
    given = {"input_ids": ANSWERS["ids"], "attention_mask": ANSWERS["mask"]}
    given["token_type_ids"] = np.zeros_like(ANSWERS["ids"])
    for kind, found in zip(MADE, session.run([*TEXT_OUTPUTS.values()], given), strict=True):
        assert passes(as_answered(folders["model"], kind, np.asarray(found)), truth_of(kind, folders["model"]))
    report = compare(folders["model"], folders["onnx"], ["onnxruntime"], seed=1, threads=1)
    assert report.equal, report.failures()
    assert {*TEXT_OUTPUTS.values()} <= {point.tap for point in report.points}


def test_their_forms(model: Any) -> None:
    ids = [row[: int(length)].tolist() for row, length in zip(ANSWERS["ids"], LENGTHS, strict=True)]
    assert model.embedder().rows(TEXTS) == ids
    np.testing.assert_array_equal(model.embed(TEXTS), model.embed(TEXTS, kind="dense"))
    for row, weights in zip(ids, model.embed(TEXTS, kind="sparse"), strict=True):
        assert weights.keys() <= set(row) - {0, 1, 2, 3}
        assert all(weight > 0 for weight in weights.values())
    for row, vectors in zip(ids, model.embed(TEXTS, kind="multi"), strict=True):
        assert (vectors.shape, vectors.dtype) == ((len(row) - 1, 12), np.float32)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert model.embed([], kind="sparse") == model.embed([], kind="multi") == []


def test_the_files_are_written_again(folders: dict[str, Path], tmp_path: Path) -> None:
    assert {EMBEDDING, DENSE} <= {path.name for path in folders["onnx"].iterdir()}
    theirs = to_huggingface(folders["model"], tmp_path / "theirs", "xlm-roberta")
    for file in HEADS.values():
        before, after = (stored_torch_tensors(folder / file) for folder in (GOLDEN, theirs))
        assert before.keys() == after.keys() == {"weight", "bias"}
        assert all(np.array_equal(before[name], after[name]) for name in before)
    import_huggingface(theirs, tmp_path / "again")
    for file in (EMBEDDING, DENSE):
        assert (tmp_path / "again" / file).read_bytes() == (folders["model"] / file).read_bytes()
    assert set(HEADS.values()) <= set(needed(path.name for path in GOLDEN.iterdir()))


def test_lines_of_json(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    model = Transformer.load(folders["model"])
    for kind, key in (("sparse", "weights"), ("multi", "embeddings")):
        given = ["-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / f"{kind}.jsonl"), "--kind", kind]
        main(["embed", str(folders["model"]), *given])
        lines = [json.loads(line) for line in (tmp_path / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [line["text"] for line in lines] == TEXTS
        for line, made in zip(lines, model.embed(TEXTS, kind=kind), strict=True):
            told = line[key]
            if kind == "sparse":
                assert list(told) == list(map(str, made))
                told, made = list(told.values()), list(made.values())
            np.testing.assert_allclose(told, made, rtol=0, atol=1e-6)


def test_what_can_t_be_asked_for(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Transformer.load(folders["model"])
    for option in ({"dimensions": 4}, {"pooling": "mean"}, {"normalize": False}):
        with pytest.raises(UserError, match=rf"{next(iter(option))}: is of a text's one vector"):
            model.embed(TEXTS, kind="multi", **option)
    with pytest.raises(UserError, match="kind='words' is not one of dense, sparse, multi"):
        model.embed(TEXTS, kind="words")
    out = str(tmp_path / "x.npy")
    with pytest.raises(SystemExit, match="2"):
        main(["embed", str(folders["model"]), "one", "--kind", "sparse", "-o", out])
    assert "an array holds one vector of each line" in capsys.readouterr().err
    shutil.copytree(GOLDEN, tmp_path / "plain")
    for file in HEADS.values():
        (tmp_path / "plain" / file).unlink()
    import_huggingface(tmp_path / "plain", tmp_path / "bare")
    bare = Transformer.load(tmp_path / "bare")
    assert bare.embed(TEXTS).shape == ANSWERS["dense"].shape
    with pytest.raises(UserError, match="kind=sparse: the model has no such head"):
        bare.embed(TEXTS, kind="sparse")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (("colbert_linear.pt", "sparse_linear.pt"), r"sparse.weight is \(12, 16\), expected \(1, 16\)"),
        (("model.safetensors", "colbert_linear.pt"), "colbert_linear.pt: no file of torch.save"),
    ],
)
def test_a_damaged_head_is_refused_in_one_line(damage: tuple[str, str], message: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "theirs")
    shutil.copy(*(tmp_path / "theirs" / name for name in damage))
    with pytest.raises(UserError, match=message) as error:
        import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()
