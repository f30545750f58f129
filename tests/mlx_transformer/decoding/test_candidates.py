"""A search among given ids: that of the whole vocabulary in which no other id has any probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from combined import combined
from marian_models import KINDS, shortlist, write_model
from small_models import CHOICES, encoder_decoder, random_weights
from toy_model import Toy, close

from mlx_transformer import Transformer
from mlx_transformer.convert import import_marian
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.core.shortlist import Shortlist, open_shortlist, shortlist_bytes
from mlx_transformer.decoding.search import SharedSearch, search
from mlx_transformer.decoding.steps import Model
from mlx_transformer.generation.stream import stream_ids
from mlx_transformer.nn.quantize import use_quantized_layers
from mlx_transformer.runtime.decoding import MlxModel
from mlx_transformer.system.errors import UserError

ROWS = [[3, 4, 2], [2], [5, 2], [6, 3, 7, 5, 2], [4, 2], [7, 7, 2]]
OWN = [[4, 9, 5], [3, 11], [10, 7], [6, 3, 8], [12], [5, 12, 4, 3]]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": dict(beam=1),
    "beam": dict(beam=3, n_best=3),
    "a beam of more than there are": dict(beam=6, n_best=2),
    "not too short": dict(beam=2, min_new_tokens=3),
    "rules": dict(beam=2, no_repeat_ngram=2, repetition_penalty=1.5),
    "forced": dict(beam=2, forced_first=(8,), forced_end=True, end_ids=(6,)),
    "suppressed": dict(suppressed=(3, 9)),
    "banned": dict(beam=2, suppressed_first=(5, 10), banned_sequences=((4, 4), (5, 13), (12, 3), (7, 7, 7))),
    "drawn": dict(sample=True, temperature=1.5, seed=3),
    "a few drawn": dict(sample=True, top_k=3, seed=5),
}


@dataclass
class Masked(Model):
    """Any model, with nothing left of the ids that a sentence hasn't."""

    model: Any
    own: list[list[int]]

    def __post_init__(self) -> None:
        self.config, self.arrays = self.model.config, self.model.arrays
        self.extends_positions = self.model.extends_positions

    def start(self, sources: Any) -> Any:
        decoder, logits = self.model.start(sources)
        (listed,) = (own for row, own in zip(ROWS, self.own, strict=True) if row == next(iter(sources)).tolist())
        mask = np.full((1, self.config.vocab_size), -1e9, np.float32)
        mask[0, listed] = 0
        mask = self.arrays.asarray(mask)
        step = decoder.step
        decoder.step = lambda ids: step(ids) + mask
        return decoder, logits + mask


def restricted(model: Any, options: dict[str, Any], prefix: list[list[int]] | None = None) -> list[Any]:
    """Sentence by sentence, with all logits."""
    c = model.config
    always = [c.eos_id, c.pad_id, c.bos_id, *options.get("forced_first", ()), *options.get("end_ids", ())]
    own = [[*row, *always, *(prefix or [[]] * len(ROWS))[i]] for i, row in enumerate(OWN)]
    masked = Masked(model, own)
    found = []
    for i, row in enumerate(ROWS):
        place = SharedSearch(row_numbers=[i])
        found += search(masked, [row], prefix and [prefix[i]], max_new_tokens=8, share=place, **options)
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_the_search_in_which_others_have_no_probability(options: dict[str, Any]) -> None:
    for seed in range(3):
        toy = Toy(vocab_size=14, seed=seed, eos_bias=-1.0)
        found = search(toy, ROWS, candidates=OWN, max_new_tokens=8, **options)
        for ours, expected in zip(found, restricted(toy, options), strict=True):
            close(ours, [(h.ids, h.score) for h in expected])
        unlike = search(toy, ROWS, max_new_tokens=8, **options)
        assert [best[0].ids for best in unlike] != [best[0].ids for best in found]


@pytest.mark.parametrize("beam", [1, 3])
def test_what_is_forced_is_always_among_them(beam: int) -> None:
    toy, prefix = Toy(vocab_size=14, seed=2), [[9, 8], [], [6], [13], [], [12]]
    found = search(toy, ROWS, prefix, candidates=OWN, beam=beam, max_new_tokens=8)
    for ours, expected, forced in zip(found, restricted(toy, {"beam": beam}, prefix), prefix, strict=True):
        close(ours, [(h.ids, h.score) for h in expected])
        assert ours[0].ids[: len(forced)] == forced


@pytest.mark.fast("positions=relative_layers-None", "two vocabularies-None")
@pytest.mark.parametrize(("name", "bits"), combined(CHOICES, [None, 8], step=4))
def test_mlx_multiplies_their_rows_alone(name: str, bits: int | None) -> None:
    config = encoder_decoder(name)
    weights = {key: mx.array(array) for key, array in random_weights(config).items()}
    network = Transformer(config)
    network.load_weights([*weights.items()])
    network.eval()
    if bits:
        names = [f"{path}.weight" for path, m in network.named_modules() if hasattr(m, "to_quantized")]
        widths = {name: weights[name].shape[1] for name in names}
        use_quantized_layers(network, {n: Scheme(32, bits) for n in names if widths[n] % 32 == 0})
    model = MlxModel(network)
    assert "among" in dir(model)
    choices: list[dict[str, Any]] = [dict(beam=1), dict(beam=3, n_best=2)]
    for options in choices:
        found = search(model, ROWS, candidates=OWN, max_new_tokens=8, **options)
        expected = restricted(model, options)
        assert [[h.ids for h in best] for best in found] == [[h.ids for h in best] for best in expected]
        scores = [[h.score for best in rows for h in best] for rows in (found, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-4)
    hidden = mx.array(np.random.default_rng(0).standard_normal((1, 2, config.d_model), np.float32))
    logits = network.classifier().among(mx.array([5, 9, 4]))(hidden)
    assert logits.shape == (1, 2, 3)
    np.testing.assert_allclose(logits, network.logits(hidden)[..., [5, 9, 4]], rtol=1e-4, atol=1e-4)


def test_a_stream_has_its_candidates() -> None:
    toy = Toy(vocab_size=14, seed=1)
    expected = search(toy, ROWS, candidates=OWN, max_new_tokens=8)
    for row, own, best in zip(ROWS, OWN, expected, strict=True):
        assert [*stream_ids(toy, row, candidates=own, max_new_tokens=8)] == best[0].ids


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (OWN[:-1], "candidates has 5 rows for 6 inputs: give one list for each"),
        ([*OWN[:-1], [3, 14]], "candidates row 5, position 1: id 14 is outside the vocabulary (0 to 13)"),
        ([*OWN[:-1], "a"], "candidates row 5: expected a list of ids, found an array of shape ()"),
        ("ab", "candidates: expected a list of lists of ids, found str"),
    ],
)
def test_wrong_ones_are_one_line(candidates: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        search(Toy(vocab_size=14), ROWS, candidates=candidates)
    assert str(error.value) == message


@pytest.mark.parametrize("kind", ["student", "two vocabularies"])
def test_an_imported_model_has_the_shortlist_that_its_settings_name(kind: str, tmp_path: Any) -> None:
    """As the maker's engine has, which reads the same settings; without, and in its place another."""
    write_model(tmp_path / "marian", KINDS[kind], integers=True)
    import_marian(tmp_path / "marian", tmp_path / "model")
    model = Transformer.load(tmp_path / "model")
    lists = shortlist(*KINDS[kind]["dim-vocabs"])
    rows = [[5, 4, 9, 0], [7, 0], [3, 12, 8, 6, 0]]
    own = [lists.candidates(row, 30, kind == "student").tolist() for row in rows]
    expected = model.generate(rows, candidates=own)
    assert all({*out} <= {*among} for out, among in zip(expected, own, strict=True))
    assert model.generate(rows) == expected
    assert [*model.stream_ids(rows[2])] == expected[2]
    lines = ["the ate", "an is in"]
    assert model.tokenizer is not None
    sources = model.tokenizer.source.encode_batch(lines)
    assert model.translate(lines) == model.tokenizer.decode_batch(model.generate(sources))
    model.shortlist = None
    assert model.generate(rows) != expected
    model.shortlist = Shortlist(1, 1, np.zeros(len(lists.offsets), np.uint64), np.zeros(0, np.uint32))
    assert model.generate(rows) != expected


def test_a_sentence_without_any_has_its_end_alone() -> None:
    toy, none = Toy(vocab_size=14, seed=1), [[] for _ in ROWS]
    for beam in (1, 2):
        assert [best[0].ids for best in search(toy, ROWS, candidates=none, beam=beam)] == none
    with pytest.raises(UserError, match="source row 0: the rules ban all its candidates"):
        search(toy, ROWS, candidates=none, beam=2, min_new_tokens=2)


def test_a_shortlist_of_other_vocabularies_is_one_line(tmp_path: Any) -> None:
    path, config = tmp_path / "lex.bin", TransformerConfig(vocab_size=28)
    path.write_bytes(shortlist_bytes(shortlist(29, 29)))
    with pytest.raises(UserError, match="is of other vocabularies: 29 source pieces, and target pieces up to 2"):
        open_shortlist(path, config)
    assert open_shortlist(path, TransformerConfig(vocab_size=30)).first == 3  # one row more: padding
    with pytest.raises(UserError, match="the model has 31 and 31"):
        open_shortlist(path, TransformerConfig(vocab_size=31))
    apart = TransformerConfig(vocab_size=40, source_vocab_size=31, tie_embeddings="none")  # rows behind the smaller's
    assert open_shortlist(path, apart).best == 5
    alone = TransformerConfig(vocab_size=30, architecture="decoder", encoder_layers=0, tie_embeddings="none")
    with pytest.raises(UserError, match="a shortlist is for an encoder-decoder"):
        open_shortlist(path, alone)
