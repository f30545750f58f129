"""`import` and `to-huggingface` against `transformers`: the same weights give the same logits and the same tokens.

Logits by the rule of `export/validate/rule.py`. Shapes: B batch, S source, T target, V vocabulary.
"""

import dataclasses
import itertools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import HERE, MODEL, PYTHON
from small_models import encoder_decoder, random_weights

from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer, load
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.data import built_in

pytestmark = pytest.mark.consumers

# transformers' arguments, and ours that mean the same.
SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"greedy": (dict(num_beams=1), dict(beam=1))}
for early, stop in ((True, True), ("never", False)):
    for alpha in (0.6, 1.0):
        theirs = dict(num_beams=4, early_stopping=early, length_penalty=alpha)
        ours = dict(beam=4, early_stopping=stop, length_penalty=alpha, penalty_form="length")
        SEARCHES[f"beam, early_stopping {early}, alpha {alpha}"] = (theirs, ours)

SIZES = dict(
    model_type="marian",
    **dict(vocab_size=80, d_model=48, encoder_layers=2, decoder_layers=3, max_position_embeddings=64),
    **dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96),
    **dict(pad_token_id=79, decoder_start_token_id=79, eos_token_id=0, forced_eos_token_id=None),
    **dict(activation_function="swish", scale_embedding=True),
)
# Models that transformers makes.
THEIRS = {
    "opus": {},
    "paper": dict(activation_function="relu", pad_token_id=0, eos_token_id=2, decoder_start_token_id=1),
    "unscaled": dict(scale_embedding=False, d_model=32, activation_function="gelu", encoder_layers=3, decoder_layers=1),
    "untied": dict(share_encoder_decoder_embeddings=False, tie_word_embeddings=False, d_model=64),
    "target and output tied": dict(share_encoder_decoder_embeddings=False, activation_function="gelu_new"),
    "output untied": dict(tie_word_embeddings=False, activation_function="relu"),
    "pegasus": dict(model_type="pegasus", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
}
PAPER = encoder_decoder("paper")
# Models that we make.
OURS = {
    "ours, paper": PAPER,
    "ours, biases": dataclasses.replace(
        PAPER,
        attention_bias=True,
        output_bias=True,
        activation="gelu_tanh",
        tie_embeddings="none",
        d_model=64,
        d_k=16,
        d_v=16,
    ),
    "ours, unscaled": dataclasses.replace(
        PAPER, scale_embeddings=False, feed_forward_bias=False, activation="silu", tie_embeddings="target-output"
    ),
    "ours, pre-norm": dataclasses.replace(PAPER, norm_placement="pre"),
}
TRAINED = "trained"
END = 3.5  # added to the logits of the end of sentence, so that random models come to one
ALL = [*THEIRS, *OURS, TRAINED]
NEW_TOKENS, PHRASES = 40, 100


@dataclass(frozen=True)
class Pair:
    """One model on both sides: our checkpoint, the inputs, and what transformers said of them."""

    checkpoint: Path
    rows: list[list[int]]
    inputs: dict[str, np.ndarray]
    answers: dict[str, np.ndarray]

    def tokens(self, search: str) -> list[list[int]]:
        """What transformers generated, without eos and what is behind it."""
        eos = open_checkpoint(self.checkpoint).config.eos_id
        rows = self.answers[search].tolist()
        return [row[: row.index(eos)] if eos in row else row for row in rows]


def padded(rows: list[list[int]], pad: int) -> np.ndarray:
    """(B, longest), padding on the right, where Marian wants it."""
    return np.array([row + [pad] * (max(map(len, rows)) - len(row)) for row in rows])


def inputs_of(rows: list[list[int]], vocab_size: int, pad: int, start: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    target = rng.integers(3, vocab_size - 1, (len(rows), 9))
    target[:, 0] = start
    mask = padded([[1] * len(row) for row in rows], 0)
    return {"ids": padded(rows, pad), "mask": mask, "target": target}


def random_rows(vocab_size: int, eos: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [[*rng.integers(3, vocab_size - 1, length).tolist(), eos] for length in rng.permutation(24)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("marian")
    tasks, given = [], {}
    for i, name in enumerate(ALL):
        here, made = folder / str(i), None
        here.mkdir()
        if name in THEIRS:
            config = {**SIZES, **THEIRS[name]}
            made = {"config": config, "end": END}
            rows = random_rows(config["vocab_size"], config["eos_token_id"])
            ids = config["vocab_size"], config["pad_token_id"], config["decoder_start_token_id"]
            checkpoint = here / "ours"
        else:
            if name == TRAINED:
                checkpoint, (_, tokenizer) = MODEL, load(MODEL)
                assert tokenizer is not None
                rows = tokenizer.encode_batch(built_in.build("cldr:en-de").held_out.source[:PHRASES])
            else:
                weights = random_weights(OURS[name])
                norm = weights[f"decoder.layers.{OURS[name].decoder_layers - 1}.feed_forward_norm.weight"]
                norm *= np.sign(
                    np.random.default_rng(3).standard_normal(norm.shape, np.float32)
                )  # as in with_marian.py
                if OURS[name].output_bias:
                    weights["output_proj.bias"][OURS[name].eos_id] += END
                checkpoint = save_checkpoint(here / "ours", OURS[name], weights)
                rows = random_rows(OURS[name].vocab_size, OURS[name].eos_id)
            c = open_checkpoint(checkpoint).config
            ids = c.vocab_size, c.pad_id, c.bos_id
            to_huggingface(checkpoint, here / "theirs")
        inputs = inputs_of(rows, *ids)
        np.savez(here / "inputs.npz", **inputs)  # type: ignore[arg-type]
        searches = {search: {**theirs, "max_new_tokens": NEW_TOKENS} for search, (theirs, _) in SEARCHES.items()}
        files = {"inputs": str(here / "inputs.npz"), "answers": str(here / "answers.npz")}
        tasks.append({"folder": str(here / "theirs"), "make": made, "searches": searches, **files})
        given[name] = here, checkpoint, rows, inputs
    (folder / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
    command = [str(PYTHON), "-I", str(HERE / "with_marian.py"), str(folder / "tasks.json")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except FileNotFoundError:
        pytest.fail(f"{PYTHON} is not there; run make test-consumers", pytrace=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name, (here, checkpoint, rows, inputs) in given.items():
        if name in THEIRS:
            import_huggingface(here / "theirs", checkpoint)
        found[name] = Pair(checkpoint, rows, inputs, dict(np.load(here / "answers.npz")))
    return found


@pytest.mark.parametrize("name", ALL)
def test_logits_are_equal_by_the_rule(name: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[name]
    opened = open_checkpoint(pair.checkpoint)
    ids, mask, target = (pair.inputs[key] for key in ("ids", "mask", "target"))
    weights = dict(opened.tensors())
    truth64, truth32 = (Reference(opened.config, weights, kind)(ids, target, mask) for kind in (np.float64, np.float32))
    truth = Truth.of(truth64, truth32, np.ones(target.shape, bool))
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    model = Transformer.load(pair.checkpoint)
    in_mlx = np.array(model(mx.array(ids), mx.array(target), mx.array(mask.astype(bool))))
    for runtime, logits in {"transformers": pair.answers["logits"], "mlx": in_mlx}.items():
        measured = Measurement.of(Deviation.of(logits, truth), truth.scale, pool, budget)
        assert measured.passed, f"{runtime}: {measured}"


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ALL)
def test_tokens_are_equal(name: str, search: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[name]
    model = Transformer.load(pair.checkpoint)
    ours = model.generate(pair.rows, max_new_tokens=NEW_TOKENS, **SEARCHES[search][1])
    assert ours == pair.tokens(search)


def test_the_searches_differ(pairs: dict[str, Pair]) -> None:
    """Else equality would prove little: penalties and ways to stop give different tokens somewhere."""
    for one, other in itertools.combinations(SEARCHES, 2):
        assert any(not np.array_equal(p.answers[one], p.answers[other]) for p in pairs.values()), (one, other)


@pytest.mark.parametrize("search", SEARCHES)
def test_sentences_end_by_themselves(search: str, pairs: dict[str, Pair]) -> None:
    """And at many lengths: else the length penalty would not be tested."""
    lengths = [len(row) for pair in pairs.values() for row in pair.tokens(search)]
    ended = [length for length in lengths if length < NEW_TOKENS]
    assert len(ended) > 0.6 * len(lengths)
    assert len(set(ended)) >= 10
