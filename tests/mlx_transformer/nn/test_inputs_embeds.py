"""Vectors in place of ids: rows of the embedding are encoded as their ids are, others as the reference has it."""

import mlx.core as mx
import numpy as np
import pytest
from choices import both_choices
from small_models import alone, encoder_decoder, random_weights

from export.validate import compare_engines
from export.validate.cases import grid, with_vectors
from export.validate.engines.mlx_engine import MlxEngine
from export.validate.reference import Reference
from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

pytestmark = both_choices

MODELS: dict[str, TransformerConfig] = {
    "scaled, sinusoidal": encoder_decoder("paper"),
    "rotary": encoder_decoder("modern"),
    "not scaled, two tables": encoder_decoder("two vocabularies"),
    "learned": alone("odd widths", "encoder"),
    "decoder": alone("modern", "decoder"),
}
SOURCE, TARGET = np.array([[5, 6, 7, 2], [9, 10, 2, 0]]), np.array([[1, 12, 3], [1, 9, 4]])
MASK = np.array([[True] * 4, [True] * 3 + [False]])


def model_of(config: TransformerConfig) -> Transformer:
    return Transformer.from_weights(config, random_weights(config))


@pytest.fixture(scope="module")
def paper() -> Transformer:
    return model_of(MODELS["scaled, sinusoidal"])


@pytest.mark.parametrize("name", MODELS)
def test_what_the_embedding_gives_is_encoded_as_its_ids_are(name: str) -> None:
    model = model_of(MODELS[name])
    embed = model.embed_source if model.config.has_encoder else model.embed_target
    target = {"target_ids": TARGET} if model.config.architecture == "encoder-decoder" else {}
    mask = {"source_mask" if model.config.has_encoder else "mask": MASK}
    vectors = embed(mx.array(SOURCE))
    taps: list[dict[str, mx.array]] = [{}, {}]
    of_ids = model(SOURCE, **target, **mask, tap=taps[0].__setitem__)
    of_vectors = model(inputs_embeds=vectors, **target, **mask, tap=taps[1].__setitem__)
    assert list(taps[0]) == list(taps[1])
    of_lists = model(inputs_embeds=np.array(vectors).tolist(), **target, **mask)
    truth, single = (Reference(model.config, model.weights(), dtype) for dtype in ("f8", "f4"))
    inputs = (SOURCE, TARGET if target else None, MASK)
    real = MASK if not target else np.ones(TARGET.shape, bool)
    limit = 8 * np.abs(single(*inputs) - truth(*inputs))[real].max()  # two passes may differ by a kernel's rounding
    for logits in (of_ids, of_vectors, of_lists):
        assert np.abs(np.array(logits) - truth(*inputs))[real].max() <= limit


@pytest.mark.fast("own-rotary", "own-learned", "gpu-learned")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "decoder"])
def test_vectors_of_no_table_are_encoded_as_the_reference_has_it(name: str, tmp_path) -> None:
    """By the rule of `validate`: all taps, cached decoding and searches, padding on either side."""
    config = MODELS[name]
    save_checkpoint(tmp_path, config, random_weights(config))
    checkpoint = open_checkpoint(tmp_path)
    cases = with_vectors(grid(config, 3, longest=20), config, 3)
    report = compare_engines(checkpoint, [MlxEngine(checkpoint)], cases, share=0.3)
    assert report.equal, report.failures()


def test_vectors_that_are_not_what_is_said_are_a_mismatch(tmp_path, monkeypatch) -> None:
    """Multiplied by sqrt(d_model), as rows of the table are: the first point that shows it is named."""
    config = alone("paper", "encoder")
    save_checkpoint(tmp_path, config, random_weights(config))
    checkpoint = open_checkpoint(tmp_path)
    embedded = Transformer._embedded
    monkeypatch.setattr(Transformer, "_embedded", lambda *given: embedded(*given) * config.d_model**0.5)
    report = compare_engines(checkpoint, [MlxEngine(checkpoint)], with_vectors(grid(config, 3)[:2], config, 3))
    assert not report.equal
    assert report.points[0].tap == "encoder.embedding"
    assert not report.points[0].worst.passed


def test_padding_is_nothing(paper) -> None:
    """What stands in padded places is not seen, and takes no position."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((1, 5, 32)).astype(np.float32)
    moved = np.concatenate([rng.standard_normal((1, 2, 32)) * 100, vectors], axis=1)
    mask = np.array([[False] * 2 + [True] * 5])
    alone, padded = paper.encode(inputs_embeds=vectors), paper.encode(None, mask, inputs_embeds=moved)[:, 2:]
    truth = Reference(paper.config, paper.weights()).encode(vectors)
    single = Reference(paper.config, paper.weights(), np.float32).encode(vectors)
    budget = 8 * np.abs(single - truth).max()
    assert np.abs(np.array(alone) - truth).max() <= budget
    assert np.abs(np.array(padded) - truth).max() <= budget


@pytest.mark.fast("own-options2", "own-options1")
@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"sample": True, "seed": 5}])
def test_search_from_vectors_writes_what_it_writes_from_their_ids(paper, options: dict) -> None:
    rows = [[5, 6, 7, 2], [9, 2], [11, 12, 13, 14, 15, 2], [4, 2]]
    vectors = [np.array(paper.embed_source(mx.array([row])))[0] for row in rows]
    options = {**options, "max_new_tokens": 12}
    assert paper.generate(inputs_embeds=vectors, **options) == paper.generate(rows, **options)
    best, of_ids = (paper.search(**given, **options) for given in ({"inputs_embeds": vectors}, {"ids": rows}))
    assert [[h.ids for h in row] for row in best] == [[h.ids for h in row] for row in of_ids]


def test_gradients_reach_the_vectors(paper) -> None:
    vectors = mx.random.normal((2, 4, 32))
    gradient = mx.grad(lambda x: paper(inputs_embeds=x, target_ids=mx.array(TARGET)).sum())(vectors)
    assert mx.all(mx.abs(gradient).max(axis=-1) > 0).item()


def test_sixteen_bits_stay_sixteen_bits() -> None:
    model = model_of(MODELS["rotary"])
    model.set_dtype(mx.bfloat16)
    assert model.encode(inputs_embeds=np.ones((1, 3, 32), np.float32)).dtype == mx.bfloat16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "source_ids: missing; give them, or vectors in their place as inputs_embeds"),
        ({"source_ids": SOURCE, "inputs_embeds": np.zeros((2, 4, 32))}, "source_ids and inputs_embeds: give one of"),
        (
            {"inputs_embeds": np.zeros((2, 4, 31))},
            r"inputs_embeds: expected \(rows, length, 32\).*found shape \(2, 4, 31",
        ),
        ({"inputs_embeds": mx.zeros((4, 32))}, r"found shape \(4, 32\)"),
        ({"inputs_embeds": np.zeros((2, 0, 32))}, r"found shape \(2, 0, 32\)"),
        ({"inputs_embeds": np.full((1, 1, 32), "a")}, "inputs_embeds: expected numbers"),
        ({"inputs_embeds": [[[0.0] * 32], [[0.0] * 32] * 2]}, "inputs_embeds: rows have different lengths"),
        (
            {"inputs_embeds": np.zeros((2, 4, 32)), "source_mask": MASK[:, :3]},
            r"source_mask: its shape \(2, 3\) differs",
        ),
    ],
)
def test_wrong_inputs_are_one_clear_error(paper, given: dict, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        paper.encode(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "source: expected a list of lists of ids, or vectors in their place as inputs_embeds"),
        ({"ids": [[5, 2]], "inputs_embeds": [np.zeros((2, 32))]}, "ids and inputs_embeds: give one of them"),
        ({"inputs_embeds": [np.zeros((2, 32)), np.zeros((2, 33))]}, r"inputs_embeds row 1: expected \(length, 32\)"),
        ({"inputs_embeds": [np.zeros((0, 32))]}, r"inputs_embeds row 0: .*found shape \(0, 32\)"),
        ({"inputs_embeds": [[[0.0], [0.0, 1.0]]]}, "inputs_embeds row 0: expected"),
        ({"inputs_embeds": [np.full((1, 32), "a")]}, "inputs_embeds row 0: expected numbers"),
        ({"inputs_embeds": "picture"}, "inputs_embeds: expected a list of lists of vectors, found str"),
        ({"inputs_embeds": [np.zeros((41, 32))], "max_new_tokens": 41}, None),
    ],
)
def test_wrong_inputs_of_a_search_are_too(paper, given: dict, said: str | None) -> None:
    if said is None:  # sinusoids go on past the table, as for ids
        assert len(paper.generate(**given)) == 1
        return
    with pytest.raises(UserError, match=said):
        paper.generate(**given)


def test_a_decoder_alone_goes_on_from_ids() -> None:
    with pytest.raises(UserError, match="inputs_embeds: a decoder alone goes on from ids"):
        model_of(MODELS["decoder"]).generate(inputs_embeds=[np.zeros((2, 32))])
