"""Target cpu among given ids: the product with their rows alone gives the numbers that all rows give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import in_pairs
from listed_models import listed_inputs, write_listed
from marian_models import KINDS
from small_models import SIZES, encoder_decoder, random_weights

from export import OnnxTransformer, export_onnx
from export.interface import LISTED_CPU, ROWS_CPU
from export.targets.cpu.runtime import Listed
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources
from mlx_transformer.core.int8_scales import INT8_SCALES, SYMMETRIC, Int8Scales, ProductScales, multiplied_names
from mlx_transformer.decoding.candidates import Candidates
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.search import search
from mlx_transformer.decoding.steps import Batch, Model

MODELS = {
    "tied": TransformerConfig(**SIZES),
    "untied, biased": encoder_decoder("untied"),
    "two vocabularies": encoder_decoder("two vocabularies"),
    "student": KINDS["student"],
}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": dict(beam=1),
    "scored": dict(beam=1, n_best=1, min_new_tokens=2),
    "beam": dict(beam=3, n_best=3),
    "rules": dict(beam=2, no_repeat_ngram=2, end_ids=(7,)),
    "drawn": dict(sample=True, seed=4),
}


class Columns(Model):
    """The runtime's model without its own way: all logits, and of these the candidates' columns."""

    def __init__(self, model: Any):
        self.start, self.config, self.arrays = model.start, model.config, model.arrays
        self.extends_positions = model.extends_positions


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_listed(MODELS[request.param], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=in_pairs(MODELS, ["float32", "int8"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnnxTransformer:
    name, precision = request.param
    checkpoint = write_listed(MODELS[name], tmp_path_factory.mktemp("model"))
    out = checkpoint.parent / precision
    export_onnx(checkpoint, out, target="cpu", precision=precision, accept_loss=True)
    # One kernel for all products: rows that are taken have no exact one where the processor's isn't.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Int8Scales, "may_overflow", False)
        return OnnxTransformer(out, threads=1)


@pytest.mark.fast(*(f"{model}-{choice}" for model in ("tied float32", "student int8") for choice in CHOICES))
@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_every_search_finds_what_all_logits_give(model: OnnxTransformer, options: dict[str, Any]) -> None:
    rows, own = listed_inputs(model.config)
    options = {**options, "max_new_tokens": 12}
    found = search(model.graphs, rows, candidates=own, **options)
    expected = search(Columns(model.graphs), rows, candidates=own, **options)
    assert [[h.ids for h in best] for best in found] == [[h.ids for h in best] for best in expected]
    ours, theirs = ([h.score for best in each for h in best] for each in (found, expected))
    if options.get("beam", 1) > 1 or options.get("sample"):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    alone = [search(model.graphs, [row], candidates=[ids], **options)[0] for row, ids in zip(rows, own, strict=True)]
    if not options.get("sample"):
        assert [best[0].ids for best in alone] == [best[0].ids for best in found]
    assert model.generate(rows, candidates=own, **{**options, "n_best": 1}) == [best[0].ids for best in found]
    assert [best[0].ids for best in found] != model.generate(rows, **{**options, "n_best": 1}, candidates=None)


def test_logits_are_those_of_all_rows_bit_for_bit_in_integers(model: OnnxTransformer) -> None:
    config, graphs = model.config, model.graphs
    rows, own = listed_inputs(config)
    listed = [np.array(ids) for ids in own]
    sources, count = Sources.of(config, ids=rows), len(rows)
    batch = Batch(np.arange(count), sources, [np.zeros(0, int)] * count, np.full(count, 9), np.arange(count), listed)
    candidates = Candidates.of(batch, Options(), config)
    among = graphs.among(candidates)
    assert isinstance(among, Listed)
    (decoder, logits), (other, every) = among.start(sources), graphs.start(sources)
    assert candidates.unlisted is not None
    for _ in range(4):
        expected = every[:, candidates.ids] + candidates.unlisted
        if model.folder.precision == "int8":
            assert np.array_equal(logits, expected)
        else:
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        tokens = logits.argmax(axis=1)
        logits, every = decoder.step(tokens), other.step(candidates.ids[tokens])


def test_weights_in_blocks_have_columns_of_all_logits(checkpoint: Path, tmp_path: Path) -> None:
    export_onnx(checkpoint, tmp_path / "blocks", target="cpu", precision="int8-weights", accept_loss=True)
    model = OnnxTransformer(tmp_path / "blocks", threads=1)
    assert not model.folder.listed
    rows, own = listed_inputs(model.config)
    listed = [np.array(ids) for ids in own]
    sources, count = Sources.of(model.config, ids=rows), len(rows)
    batch = Batch(np.arange(count), sources, [np.zeros(0, int)] * count, np.full(count, 9), np.arange(count), listed)
    assert model.graphs.among(Candidates.of(batch, Options(), model.config)) is None
    assert all({*out} <= {*ids} for out, ids in zip(model.generate(rows, candidates=own), own, strict=True))


@pytest.mark.fast("tied")
def test_portable_graphs_write_the_same(checkpoint: Path, tmp_path: Path) -> None:
    cpu, portable = (
        OnnxTransformer(export_onnx(checkpoint, tmp_path / target, target=target), threads=1)
        for target in ("cpu", "portable")
    )
    rows, own = listed_inputs(cpu.config)
    assert portable.generate(rows, candidates=own, beam=2) == cpu.generate(rows, candidates=own, beam=2)


def test_what_is_damaged_is_told_when_it_is_opened(model: OnnxTransformer) -> None:
    assert {*model.folder.listed} == {ROWS_CPU, LISTED_CPU}
    file = model.folder.listed[LISTED_CPU]
    data = file.read_bytes()
    try:
        file.write_bytes(data[:-1])
        with pytest.raises(Exception, match=f"{file.name}"):
            OnnxTransformer(model.folder.path, threads=1)
    finally:
        file.write_bytes(data)


def test_fixed_scales_need_no_bias(tmp_path: Path) -> None:
    """What keeps sentences from each other's ids is no bias, which an integer product would take in."""
    config = MODELS["tied"]
    assert isinstance(config, TransformerConfig)
    assert not config.output_bias
    rows, own = listed_inputs(config)
    scales = {name: ProductScales(np.float32(30), steps=SYMMETRIC) for name in multiplied_names(config)}
    texts = {INT8_SCALES: Int8Scales(scales, {"file": "drawn"}).json()}
    save_checkpoint(tmp_path / "model", config, random_weights(config), texts=texts)
    export_onnx(tmp_path / "model", tmp_path / "cpu", target="cpu", precision="int8", accept_loss=True)
    model = OnnxTransformer(tmp_path / "cpu", threads=1)
    for beam in (1, 3):
        found = search(model.graphs, rows, candidates=own, beam=beam, max_new_tokens=12)
        expected = search(Columns(model.graphs), rows, candidates=own, beam=beam, max_new_tokens=12)
        assert [best[0].ids for best in found] == [best[0].ids for best in expected]
