"""Run one sentence through a model: find its output, and record attention weights, predictions, norms and the logit
lens.

encoder-decoder   source -> its translation, or a given target
decoder           prompt -> its continuation, or a given target
encoder           the text, with or without <mask>

`read_sentence` finds the tokens, and records a beam search: every candidate of every step, its parent and its fate.
`trace` runs one pass over the result.

Shapes: L positions of a stack, S source, T target, D model, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from export.validate.opening import Opened
from export.validate.points import inner_names, tap_names
from export.validate.reference.layers import softmax
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import TOKEN_TYPES
from mlx_transformer.decoding.arrays import Arrays
from mlx_transformer.decoding.beam import Beam
from mlx_transformer.decoding.greedy import Greedy
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.search import checked
from mlx_transformer.decoding.steps import DEAD, Batch, run
from mlx_transformer.generation.embed import prepared
from mlx_transformer.generation.heads import ids_with_masks
from mlx_transformer.generation.settings import Around
from mlx_transformer.system.errors import UserError

CONTINUATION = 20
"""New tokens of a decoder-only model by default."""

NOTHING = Around([], [])
KEPT, FINISHED, DROPPED = "kept", "finished", "dropped"
"""The fates of a candidate."""


@dataclass(frozen=True)
class Node:
    """A candidate token of a beam search.

    parent: its index in the tree, -1 at the start. log_p: of all tokens up to here. score: log p / lp(length), for a
    finished candidate.
    """

    step: int
    parent: int
    token: int
    log_p: float
    fate: str
    score: float | None = None


@dataclass(frozen=True)
class ExplainedSentence:
    """The ids of an input and its output.

    source: ids read by the encoder; target: ids read by the decoder; empty if there is no such stack. written: the
    token that follows each target position (in an encoder-only model, the token at each source position); prompted: how
    many of these, from the first on, were not chosen by the model. tree: of the beam search that found the output;
    score: its log p / lp(length).
    """

    text: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    written: tuple[int, ...]
    prompted: int
    output: str
    tree: tuple[Node, ...] = ()
    score: float | None = None
    types: tuple[int, ...] = ()
    """Token types, if the encoder has them: 1 in the second of two texts."""

    def case(self, config: TransformerConfig) -> Case:
        """The sentence as input for the engines: one row without padding. Tokens of a single text have type 0."""
        source, target = (np.array([ids], np.int64) for ids in (self.source, self.target))
        if not self.source:
            return Case("sentence", target, None, None, 1)
        types = np.array([self.types], np.int64) if self.types else np.zeros_like(source)
        others = {TOKEN_TYPES.name: types} if config.token_types else {}
        return Case("sentence", source, None, target if self.target else None, 1, others=others)


def read_sentence(
    model: Opened,
    texts: Sequence[str],
    target: str | None,
    options: Options,
    around: Around = NOTHING,
    prefix: str = "",
) -> ExplainedSentence:
    """Tokenise the texts, and let the model find its output unless `target` gives it.

    texts: one; two for an encoder-only model, read as a pair. prefix: put before an encoder-decoder's text; around:
    tokens before and after it, e.g. a language's id. Raises UserError for an empty text, a text too long for the model,
    a target for an encoder-only model, and a second text for other models.
    """
    if not all(text.strip() for text in texts):
        raise UserError("the sentence is empty: give one with words in it")
    architecture = model.config.architecture
    if len(texts) == 2 and architecture == "encoder" and target is None:
        return _paired(model, texts[0], texts[1])
    if len(texts) != 1:
        pairs = "; an encoder alone reads two, as a pair"
        raise UserError(f"explain takes one sentence in quotes; {len(texts)} of them are given{pairs}")
    text = texts[0]
    if architecture == "encoder":
        return _filled(model, text, target)
    if architecture == "decoder":
        return _continued(model, text, target, options)
    source = around(model.tokenizer.source.encode(prefix + text))
    return _translated(model, text, source, target, options)


def _filled(model: Opened, text: str, target: str | None) -> ExplainedSentence:
    if target is not None:
        raise UserError(f"{model.folder}: is an encoder alone, which writes nothing: leave out --target")
    embedding = model.embedding
    if embedding is None:
        ids = tuple(ids_with_masks(model.tokenizer, text))
    else:  # as in `embed`
        read = prepared(embedding.prompt() + text, embedding)
        ids = tuple(model.tokenizer.encode(read))
        most = embedding.max_length or len(ids)
        ids = ids if len(ids) <= most else (*ids[: most - 1], ids[-1])
    _check_length(model, ids, "text")
    return ExplainedSentence(text, ids, (), ids, len(ids), "")


def _paired(model: Opened, text: str, second: str) -> ExplainedSentence:
    [pair] = model.tokenizer.encode_pairs([(text, second)])
    ids = tuple(pair.ids)
    _check_length(model, ids, "pair of texts")
    types = tuple(pair.token_types) if model.config.token_types else ()
    return ExplainedSentence(f"{text} · {second}", ids, (), ids, len(ids), "", types=types)


def _translated(model: Opened, text: str, source: list[int], target: str | None, options: Options) -> ExplainedSentence:
    _check_length(model, source, "sentence")
    bos = model.config.bos_id if options.start_id is None else options.start_id
    forced = options.forced_first
    if target is not None:
        written = [*forced, *model.tokenizer.encode(target)]
        _check_length(model, written, "target")
        return ExplainedSentence(text, tuple(source), (bos, *written[:-1]), tuple(written), len(written), target)
    written, tree, score = _searched(model, source, options)
    output = model.tokenizer.decode(written)
    return ExplainedSentence(
        text, tuple(source), (bos, *written[:-1]), tuple(written), len(forced), output, tree, score
    )


def _continued(model: Opened, text: str, target: str | None, options: Options) -> ExplainedSentence:
    [prompt] = model.tokenizer.prompts([text])
    _check_length(model, prompt, "prompt")
    if target is not None:
        new, tree, score, output = model.tokenizer.documents([target])[0], (), None, target
    else:
        new, tree, score = _searched(model, prompt, options)
        output = model.tokenizer.decode(new)
    ids = (*prompt, *new)
    _check_length(model, ids[:-1], "prompt and continuation")
    prompted = len(ids) if target is not None else len(prompt) - 1
    return ExplainedSentence(text, (), ids[:-1], ids[1:], prompted, output, tree, score)


def _searched(model: Opened, ids: list[int], options: Options) -> tuple[list[int], tuple[Node, ...], float]:
    """The best output, with eos unless it was cut at its limit; the tree of a beam search (empty for greedy search);
    the score."""
    with model.engine.searching() as searchable:
        sources, forced, limits = checked(searchable, {"ids": [ids]}, None, options)
        batch = Batch(np.arange(1), sources, forced, limits, np.arange(1))
        kind = RecordedBeam if options.beam > 1 else Greedy
        strategy = kind(searchable.arrays, batch, options, searchable.config)
        hypotheses = run(searchable, batch, strategy)[0]
    if not hypotheses or not np.isfinite(hypotheses[0].score):
        raise UserError("the model's logits are not finite; check its weights")
    best = hypotheses[0]
    end = [model.config.eos_id] if len(best.ids) < limits[0] else []
    return [*best.ids, *end], tuple(getattr(strategy, "nodes", [])), best.score


def _check_length(model: Opened, ids: Sequence[int], what: str) -> None:
    most = model.config.max_positions
    if len(ids) > most:
        raise UserError(f"the {what} has {len(ids)} tokens, {model.folder} takes at most {most}: shorten it")


class RecordedBeam(Beam):
    """A beam search of a sentence, with a record of its candidates."""

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig):
        super().__init__(xp, batch, options, config)
        self.nodes: list[Node] = []
        self.slots = [-1]  # node of each live hypothesis

    def advance(self, values: Any, parent: Any, token: Any, t: int) -> tuple[Any, Any]:
        log_p, slot, id = (np.asarray(self.xp.numpy(x))[0] for x in (values, parent, token))
        ended = bool(np.asarray(self.xp.numpy(self.done))[0])
        at_limit = int(np.asarray(self.xp.numpy(self.limits))[0]) <= t + 1
        result = super().advance(values, parent, token, t)
        if not ended:
            self._note(log_p, slot, id, at_limit, t)
        return result

    def _note(self, values: NDArray, parent: NDArray, token: NDArray, at_limit: bool, t: int) -> None:
        slots: list[int] = []
        for place, (log_p, slot, id) in enumerate(zip(values, parent, token, strict=True)):
            if log_p <= DEAD:
                continue
            ends, score = bool(id == self.config.eos_id), None
            if place < self.width and (ends or at_limit):
                fate, score = FINISHED, float(log_p / self.options.penalty(t + 1))
            elif not ends and len(slots) < self.width and not at_limit:
                fate = KEPT
            else:
                fate = DROPPED
            if not ends and len(slots) < self.width:
                slots.append(len(self.nodes))
            self.nodes.append(Node(t, self.slots[int(slot)], int(id), float(log_p), fate, score))
        self.slots = slots or [-1]


Array = NDArray[np.float32]

KINDS = {
    "encoder": ("encoder", "self_attention"),
    "decoder": ("decoder", "self_attention"),
    "cross": ("decoder", "cross_attention"),
}
"""Where each kind of attention is: its stack, and the sub-layer in each layer."""


@dataclass(frozen=True)
class Trace:
    """The values of a pass.

    points: {point: (L, D)}, as far as the runtime shows them. weights: {kind: (layers, H, L, S)}. logits (L, V): the
    decoder's, or an encoder-only model's. lens: {point: logits (L, V)} of each layer, classified as if it were the
    last. An encoder whose head predicts no words has other outputs in `logits`, and no lens.
    """

    points: Mapping[str, Array]
    weights: Mapping[str, Array]
    logits: Array
    lens: Mapping[str, Array]


def trace(model: Opened, sentence: ExplainedSentence) -> Trace:
    """Run the model once. Raises UserError if its graphs don't name their inner values, or if a number isn't finite."""
    config = model.config
    names = [*tap_names(config), *(name for name in inner_names(config) if name.endswith(".weights"))]
    points_of = model.engine.points(sentence.case(config), names)
    if "logits" not in points_of or any(name not in points_of for name in names if name.endswith(".weights")):
        raise UserError(f"{model.folder}: its graphs don't name what is inside them; export the model again")
    values = {name: np.asarray(value, np.float32)[0] for name, value in points_of.items()}
    if not all(np.isfinite(value).all() for value in values.values()):
        raise UserError(f"{model.folder}: computes numbers that are not finite; check its weights")
    weights = {
        kind: np.stack([values[f"{stack}.layers.{i}.{part}.weights"] for i in range(layers_of(config, stack))])
        for kind, (stack, part) in KINDS.items()
        if f"{stack}.layers.0.{part}.weights" in values
    }
    stacks = [name for name in tap_names(config) if name.startswith(("encoder.", "decoder."))]
    points = {name: values[name] for name in stacks if name in values}
    return Trace(points, weights, values["logits"], _lens(model, points) if gives_words(config) else {})


def layers_of(config: TransformerConfig, stack: str) -> int:
    return config.encoder_layers if stack == "encoder" else config.decoder_layers


def gives_words(config: TransformerConfig) -> bool:
    """Whether the logits are over the vocabulary."""
    return config.head.kind == "vocabulary"


def written_by(config: TransformerConfig) -> str:
    """The stack whose output is classified."""
    return "decoder" if config.has_decoder else "encoder"


def probabilities(logits: Array) -> NDArray[np.float64]:
    """Softmax over the vocabulary in float64."""
    return softmax(logits.astype(np.float64))


def most_likely(probability: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The ids (L, count) of the most likely tokens, best first; of equals the lowest id."""
    return np.argsort(-probability, axis=-1, kind="stable")[:, :count]


def norms(points: Mapping[str, Array]) -> dict[str, Array]:
    """{point: (L,)}, the Euclidean norm of the vector at each position."""
    return {name: np.linalg.norm(value, axis=-1) for name, value in points.items()}


def _lens(model: Opened, points: Mapping[str, Array]) -> dict[str, Array]:
    """Classify every layer's output, after the stack's final norm (if any) and the head (nostalgebraist 2020)."""
    config, stack = model.config, written_by(model.config)
    first = "embedding_norm" if config.embedding_norm else "embedding"
    names = [f"{stack}.{first}", *(f"{stack}.layers.{i}" for i in range(layers_of(config, stack)))]
    reference = model.reference
    read = {}
    for name in names:
        if name in points:
            x = reference.final_norm(stack, points[name][None], None)
            x = reference.head(x, np.ones(x.shape[:2], bool), None) if stack == "encoder" else x
            read[name] = reference.classify(x, None)[0]
    return read
