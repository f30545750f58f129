"""Decoders that make text vectors: what sentence-transformers computes with them (`make_golden_vectors.py`), in both
runtimes, and their folders again."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import combined
from safetensors.numpy import load_file

from export import OnnxTransformer, export_onnx
from export.validate import compare
from export.validate.reference import Reference
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.text_embedding import read_embedding
from mlx_transformer.generation.embed import Embedder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import write_tensors

GOLDEN = Path(__file__).parent / "golden_vectors"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
ANSWERS = {name: dict(np.load(GOLDEN / name / "answers.npz")) for name in NAMES}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, by the names."""
    folder = tmp_path_factory.mktemp("vectors")
    for name in NAMES:
        import_huggingface(GOLDEN / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("name", "runtime"), [*((name, "mlx") for name in NAMES), *combined(NAMES, ["portable", "cpu"])]
)
def test_vectors_are_those_of_sentence_transformers(name: str, runtime: Any, imported: Path, tmp_path: Path) -> None:
    """With a prompt and without, in one batch and one by one; Mistral's longest text is cut."""
    if runtime == "mlx":
        model: Any = Transformer.load(imported / name)
    else:
        model = OnnxTransformer(export_onnx(imported / name, tmp_path / "onnx", target=runtime), threads=1)
    texts = ANSWERS[name]["texts"].tolist()
    for kind, options in {"plain": {}, "query": dict(prompt_name="query")}.items():
        single = [model.embed([text], **options)[0] for text in texts]
        for found in (model.embed(texts, **options), np.stack(single)):
            np.testing.assert_allclose(found, ANSWERS[name][kind], atol=2e-5, err_msg=kind)


@pytest.mark.parametrize("name", NAMES)
def test_folders_are_written_again(name: str, imported: Path, tmp_path: Path) -> None:
    written = to_huggingface(imported / name, tmp_path / "theirs")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, written))
    said = {key for key in before.keys() & after.keys() if before[key] is not None}
    changed = {"tie_word_embeddings", *(["sliding_window"] if name == "gemma3" else [])}
    assert {key: after[key] for key in said - changed} == {key: before[key] for key in said - changed}
    assert after["tie_word_embeddings"] is True
    if name == "gemma3":  # 7 // 2 keys on each side
        assert (after["sliding_window"], after["use_bidirectional_attention"]) == (6, True)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, written))
    assert ours.keys() == theirs.keys()
    import_huggingface(written, tmp_path / "again")
    first, second = (open_checkpoint(folder) for folder in (imported / name, tmp_path / "again"))
    assert first.config == second.config
    for (key, array), (other, same) in zip(first.tensors(), second.tensors(), strict=True):
        assert key == other
        assert np.allclose(array, same, atol=1e-6)
    made = [read_embedding(each.folder, each.config.d_model) for each in (first, second)]
    assert made[0] == made[1]


def test_validate_finds_the_graph_equal(imported: Path, tmp_path: Path) -> None:
    report = compare(imported / "gemma3", export_onnx(imported / "gemma3", tmp_path / "onnx"), ["onnxruntime"], 3)
    assert report.equal, report.failures()


WRONG: dict[str, tuple[str, dict]] = {
    "attention to both sides": ("qwen3", dict(causal=False)),
    "causal attention": ("gemma3", dict(causal=True)),
    "one key more on each side": ("gemma3", dict(layer_pattern=[{"window": 4, "rotary_base": 1e4}, {}])),
    "a window of one key more": ("mistral", dict(window=6)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_option_is_caught(what: str, imported: Path) -> None:
    name, changes = WRONG[what]
    opened, model = open_checkpoint(imported / name), Transformer.load(imported / name)
    embedding = read_embedding(imported / name, opened.config.d_model)
    assert embedding is not None
    ids = np.array(Embedder(opened.config, model.tokenizer, embedding, model.encode).rows(ANSWERS[name]["texts"][1:2]))

    def vector(config: Any) -> np.ndarray:
        memory = Reference(config, dict(opened.tensors())).encode(ids)
        return embedding.vectors(memory, np.ones_like(ids))[0]

    expected = ANSWERS[name]["plain"][1]
    assert np.abs(vector(opened.config) - expected).max() < 2e-5
    assert np.abs(vector(dataclasses.replace(opened.config, **changes)) - expected).max() > 1e-3


def test_a_classifier_is_left_out_and_its_absence_no_problem(imported: Path, tmp_path: Path) -> None:
    """Whether config.json names the network alone or one with a classifier, and whether one is stored."""
    folder = shutil.copytree(GOLDEN / "qwen3", tmp_path / "theirs")
    weights = load_file(folder / "model.safetensors")
    classifier = np.ones_like(weights["embed_tokens.weight"])
    prefixed = {f"model.{name}": array for name, array in weights.items()}
    write_tensors(folder / "model.safetensors", {**prefixed, "lm_head.weight": classifier})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    import_huggingface(folder, tmp_path / "out")
    one, other = (open_checkpoint(place) for place in (imported / "qwen3", tmp_path / "out"))
    assert one.config == other.config
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(one.tensors(), other.tensors(), strict=True))


def test_other_families_refuse_attention_to_both_sides(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "gemma3", tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    with pytest.raises(UserError, match="use_bidirectional_attention is on"):
        import_huggingface(folder, tmp_path / "out")
