"""The inputs of `validate`: random, new in each run, and repeatable with a seed.

The grid has the shapes that break implementations: a single token, a single row, batches without padding, ragged
padding on the right, on the left and on both sides, rows of a single token, the model's longest sequence, and real text
if the checkpoint has a tokenizer. Cached runs begin with a token, with some, or with nearly all of them, and continue
with a token or several at a time.

B batch, S source length, T target length (a model with a single stack has only S).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export.interface import CROSS_ATTENTION, TEXT_OUTPUTS
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import SOURCE_IDS, VECTORS, companions
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.positions import borders
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .points import tap_names
from .reference.layers import MADE

if TYPE_CHECKING:
    from .reference import Cache, Reference, Tap

Array = NDArray
Bits = NDArray[np.bool_]

# Most logits of a case (32 MB in float64): the longest target is cut to fit.
MOST_LOGITS = 1 << 22
# Most parameters of a model that is judged on all rows and sentences.
LARGEST = 1 << 26
FEWEST = 2
"""Rows of a batch, and sentences, of even the largest model."""
# Most scores of an attention (256 MB): 2048 positions of up to 8 heads.
MOST_SCORES = 1 << 25

SENTENCES = (
    "Attention is all you need.",
    "The animal didn't cross the street because it was too tired.",
    "Zwei junge Männer stehen im Freien, nahe vieler Büsche.",
    "4 September 2027, 09:30",
    "1,234.5 kilometres",
    "Ça coûte 12,50 € – déjà !",
    "日本語の文章 and 🙂",
)


@dataclass(frozen=True)
class Case:
    """An input of the network.

    `ids` (B,S) int64. `mask` (B,S): True on tokens, or None. `target_ids` (B,T): for models with both stacks.
    `vectors` (B,S,D) float32: the encoder reads them in place of `ids`. `others`: further inputs (B,S) by name
    (`core/inputs.py`), e.g. token types. `prefill`: decoder tokens in the first pass of a cached run; `chunk`: tokens
    in each later pass.
    """

    name: str
    ids: NDArray[np.int64]
    mask: Bits | None
    target_ids: NDArray[np.int64] | None
    prefill: int
    chunk: int = 1
    vectors: NDArray[np.float32] | None = None
    others: Mapping[str, Array] = field(default_factory=dict)

    @property
    def source(self) -> Array:
        """The input of the first stack: ids (B,S), or vectors (B,S,D)."""
        return self.ids if self.vectors is None else self.vectors

    @property
    def inputs(self) -> dict[str, Array]:
        """All inputs of the first stack except the mask, by name."""
        return {(SOURCE_IDS if self.vectors is None else VECTORS).name: self.source, **self.others}

    def passes(self) -> list[slice]:
        """Split the decoder's tokens into the passes of a cached run."""
        length = (self.ids if self.target_ids is None else self.target_ids).shape[1]
        starts = range(self.prefill, length, self.chunk)
        return [slice(0, self.prefill), *(slice(i, min(i + self.chunk, length)) for i in starts)]

    @property
    def size(self) -> str:
        """Rows x tokens -> the target's tokens, e.g. "4 x 12 -> 9"; without a target "4 x 12"."""
        rows, length = self.ids.shape
        return f"{rows} x {length}" + (f" -> {self.target_ids.shape[1]}" if self.target_ids is not None else "")

    @property
    def source_real(self) -> Bits:
        """Source positions with tokens (B,S)."""
        return np.ones(self.ids.shape, bool) if self.mask is None else self.mask

    @property
    def source_mask(self) -> Array:
        """The mask (B,S) as graphs take it: int64, 1 on tokens."""
        return self.source_real.astype(np.int64)

    @property
    def prompt_mask(self) -> Bits | None:
        """The mask of left-padded prompts. Padding on the right needs no mask, as attention is causal."""
        return self.mask if self.mask is not None and self.mask[:, -1].all() else None

    def valid(self, tap: str) -> Bits:
        """The positions of a tap that count (B,L): tokens, not padding. Targets have no padding."""
        decoder = self.target_ids is not None and (tap in ("logits", CROSS_ATTENTION) or tap.startswith("decoder."))
        return np.ones(self.target_ids.shape, bool) if decoder and self.target_ids is not None else self.source_real

    def counted(self, tap: str, value: Array) -> Bits:
        """The positions of a tap's value that count (B,L); all rows (B,) if the value is a vector per row."""
        return self.valid(tap) if value.ndim > 2 else np.ones(len(value), bool)

    def rows(self) -> list[Any]:
        """Return the source rows without padding: lists of ids, or arrays of vectors (length,D)."""
        rows = [row[real] for row, real in zip(self.source, self.source_real, strict=True)]
        return [row.tolist() for row in rows] if self.vectors is None else rows


def started(model: Any, case: Case) -> tuple[Array, Any]:
    """Return the ids to decode in `case.passes()`, and an MLX `Transformer`'s cache before the first pass."""
    if case.target_ids is not None:
        return case.target_ids, model.start(model.encode(source_mask=case.mask, **case.inputs), case.mask)
    mask = case.prompt_mask
    return case.ids, model.start(prompt_mask=None if mask is None else mask[:, : case.prefill])


def full_pass(model: Any, case: Case, tap: Any = None) -> Any:
    """Compute an MLX `Transformer`'s logits in a single pass."""
    if not model.config.has_encoder:
        return model(case.ids, case.mask, tap=tap)
    targets = {} if case.target_ids is None else {"target_ids": case.target_ids}
    return model(**case.inputs, **targets, source_mask=case.mask, tap=tap)


def reference_memory(reference: Reference, case: Case) -> Array:
    return reference.encode(case.source, case.mask, **case.others)  # type: ignore[arg-type]


def reference_started(reference: Reference, case: Case) -> Cache:
    """Return the reference's cache before the first of `case.passes()`."""
    if case.target_ids is None:
        return reference.start(batch=len(case.ids))
    return reference.start(reference_memory(reference, case), case.mask)


def reference_step(reference: Reference, case: Case, part: slice, cache: Cache, tap: Tap | None) -> tuple[Array, Cache]:
    """Compute the reference's logits for a pass of `case.passes()`; returns (logits, cache after the pass)."""
    ids, mask = (case.ids, case.prompt_mask) if case.target_ids is None else (case.target_ids, None)
    return reference.step(ids[:, part], cache, None if mask is None else mask[:, part], tap)


def reference_logits(reference: Reference, case: Case, tap: Tap | None = None) -> Array:
    """Compute the reference's logits in a single pass over all positions."""
    return reference(case.source, case.target_ids, case.mask, tap, **case.others)  # type: ignore[arg-type]


def search_inputs(sources: Sequence[Any]) -> dict[str, Any]:
    """Return `Case.rows` as a search's keyword argument, named for ids or vectors."""
    return {(VECTORS if isinstance(sources[0], np.ndarray) else SOURCE_IDS).argument: list(sources)}


def reference_taps(reference: Reference, case: Case) -> dict[str, Array]:
    """Return every tap of an input by name, from embedding to logits."""
    taps: dict[str, Array] = {}
    reference_logits(reference, case, taps.__setitem__)
    return taps


def weights_name(layer: int) -> str:
    """The point of a decoder layer's cross-attention weights."""
    return f"decoder.layers.{layer}.cross_attention.weights"


@dataclass(frozen=True)
class Extras:
    """Optional outputs of graphs, in addition to their taps."""

    layer: int | None = None
    """The decoder layer of the output `cross_attention`. The reference needs `inner_points` to compute it."""
    embedding: TextEmbedding | None = None
    """How to make a text's vector, and a text's other outputs (`TEXT_OUTPUTS`)."""


TAPS_ALONE = Extras()


def reference_outputs(
    reference: Reference, case: Case, extras: Extras, changed: Callable[[str, Array], Array] = lambda name, value: value
) -> dict[str, Array]:
    """Return every tap of an input, then the outputs `cross_attention` and `TEXT_OUTPUTS` if graphs have them.

    changed: gives the value of a tap to return and to go on with, by its name and value.
    """
    taps: dict[str, Array] = {}
    names = {*tap_names(reference.config)}
    if extras.layer is not None:
        names.add(weights_name(extras.layer))

    def keep(name: str, value: Array) -> Array:
        if name in names:
            taps[name] = value = changed(name, value)
        return value

    reference_logits(reference, case, keep)
    if extras.layer is not None:
        weights = taps.pop(weights_name(extras.layer))
        taps[CROSS_ATTENTION] = weights.mean(axis=1)
    if extras.embedding is not None:
        memory = taps[next(name for name in reversed(taps) if name.startswith("encoder."))]
        for kind in extras.embedding.kinds:
            taps[TEXT_OUTPUTS[kind]] = MADE[kind](extras.embedding, memory, case.source_real)
    return taps


def grid(
    config: TransformerConfig,
    seed: int,
    texts: list[list[int]] | None = None,
    longest: int | None = None,
    share: float = 1.0,
) -> list[Case]:
    """Draw the cases of a seed. Raises UserError for a negative seed.

    `texts`: tokenised real sentences. `longest`: length of the longest case, by default `max_positions`; less if its
    logits or scores are too many (`MOST_LOGITS`, `MOST_SCORES`). `share`: of the usual rows.
    """
    if seed < 0:
        raise UserError(f"seed {seed}: it must be 0 or more")
    rng = np.random.default_rng(seed)
    heads = max(layer.heads for layer in (*config.layers("encoder"), *config.layers("decoder")))
    limit = min(config.max_positions, longest or config.max_positions, math.isqrt(MOST_SCORES // max(8, heads)))
    short, middle = min(limit, int(rng.integers(5, 10))), min(limit, int(rng.integers(10, 19)))
    cases = [
        _case(config, rng, "single token", 1, 1, 1),
        replace(_case(config, rng, "one row", 1, short, min(limit, short + 2)), prefill=1),
        replace(_case(config, rng, "batch", fewer(3, share), middle, short), prefill=2, chunk=3),
        # In a cached run, padding on the right counts in the length by which longrope chooses its frequencies.
        *([] if borders(config) else [_case(config, rng, "padding right", fewer(4, share), middle, middle, "right")]),
        _case(config, rng, "padding left", fewer(4, share), middle, short, "left"),
    ]
    if config.architecture != "decoder":  # prompts are padded on one side only
        cases.append(_case(config, rng, "padding both sides", fewer(5, share), middle, short, "both"))
    if texts:
        rows = [row[:limit] for row in texts if row]
        cases.append(_text_case(config, rng, rows[: fewer(len(rows), share)]))
    width = config.vocab_size
    fitting = max(middle, min(limit, round(share * MOST_LOGITS) // width))
    source = limit if config.architecture == "encoder-decoder" else fitting
    return [_crossed(case, config) for case in (*cases, _case(config, rng, "longest", 1, source, fitting))]


def _crossed(case: Case, config: TransformerConfig) -> Case:
    """For longrope: make rows with long texts long already in the first pass, so that its keys equal a full pass's."""
    last = np.cumsum(case.source_real, axis=1) - 1
    columns = [column for begin in borders(config) for column in np.argwhere(case.source_real & (last == begin))[:, 1]]
    return replace(case, prefill=max([case.prefill, *(int(column) + 1 for column in columns)]))


def share_of(config: TransformerConfig) -> float:
    """The share of the usual rows, sentences and tokens for large models. Each runtime computes about 3,000 tokens, and
    with 100 million parameters a token takes MLX 0.1 s on a CPU."""
    count = sum(map(math.prod, parameter_shapes(config).values()))
    return 1.0 if count <= LARGEST else LARGEST / 2 / count


def fewer(count: int, share: float) -> int:
    """A share of a number of rows or sentences, at least `FEWEST` (or `count`, if it is smaller)."""
    return min(count, max(FEWEST, round(share * count)))


def with_vectors(cases: Sequence[Case], config: TransformerConfig, seed: int) -> list[Case]:
    """Give each case random vectors of the size of scaled embeddings in place of its ids, also on padding."""
    rng = np.random.default_rng([seed, 1])
    drawn = [rng.standard_normal((*case.ids.shape, config.d_model), dtype=np.float32) for case in cases]
    return [replace(case, vectors=vectors) for case, vectors in zip(cases, drawn, strict=True)]


def tokenised(path: Path | None, config: TransformerConfig) -> list[list[int]]:
    """Tokenise `SENTENCES` with the source's vocabulary, each ending with eos; empty without a tokenizer."""
    if path is None:
        return []
    vocabulary = min(config.vocab_size, config.source_vocab_size)
    return [[i for i in row if i < vocabulary] for row in Tokenizer.load(path).source.encode_batch(SENTENCES)]


def padding(lengths: NDArray[np.int64], width: int, side: str, rng: np.random.Generator) -> Bits:
    """Make a mask (B,width), True on tokens: row b has lengths[b] tokens.

    side: of the padding, "left", "right" or "both" (split at random).
    """
    room = width - lengths
    before = {"right": np.zeros_like(room), "left": room}.get(side)
    if before is None:
        before = rng.integers(0, room + 1)
    column = np.arange(width)
    return (column >= before[:, None]) & (column < (before + lengths)[:, None])


def words(config: TransformerConfig, rng: np.random.Generator, shape: tuple[int, ...], source: bool) -> Array:
    """Draw ids of the vocabulary, without pad, bos and eos if there are others."""
    size = config.source_vocab_size if source else config.vocab_size
    ordinary = np.setdiff1d(np.arange(size), [config.pad_id, config.bos_id, config.eos_id])
    return rng.choice(ordinary if ordinary.size else np.arange(size), shape).astype(np.int64)


def _case(
    config: TransformerConfig,
    rng: np.random.Generator,
    name: str,
    batch: int,
    source: int,
    target: int,
    side: str = "",
) -> Case:
    mask, prefill = None, _prefill(rng, source if config.architecture == "decoder" else target)
    if side:  # a row of a single token, a full row, the others between
        # A decoder's prompts end together, so there is no padding after the prefill.
        width = prefill if config.architecture == "decoder" and side == "left" else source
        lengths = rng.integers(1, width + 1, batch)
        lengths[:2] = 1, width
        mask = padding(rng.permutation(lengths) + source - width, source, side, rng)
    ids = words(config, rng, (batch, source), config.has_encoder)
    if mask is not None:
        ids = np.where(mask, ids, config.pad_id)
    targets = None
    if config.architecture == "encoder-decoder":
        targets = words(config, rng, (batch, target), False)
        targets[:, 0] = config.bos_id
    return Case(name, ids, mask, targets, prefill, others=_others(config, rng, ids.shape))


def _text_case(config: TransformerConfig, rng: np.random.Generator, rows: list[list[int]]) -> Case:
    width = max(map(len, rows))
    lengths = np.array([len(row) for row in rows])
    mask = padding(lengths, width, "left" if config.architecture == "decoder" else "right", rng)
    ids = np.full((len(rows), width), config.pad_id, np.int64)
    ids[mask] = np.concatenate(rows)
    targets = None
    if config.architecture == "encoder-decoder":  # another sentence's tokens, so that target and source differ
        targets = np.full((len(rows), min(width, config.max_positions)), config.eos_id, np.int64)
        for row, tokens in enumerate([*rows[1:], rows[0]]):
            tokens = [config.bos_id, *tokens][: targets.shape[1]]
            targets[row, : len(tokens)] = tokens
    prefill = width if targets is None else _prefill(rng, targets.shape[1])
    return Case("real text", ids, mask, targets, prefill, others=_others(config, rng, ids.shape))


def _others(config: TransformerConfig, rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Array]:
    """Draw a model's other inputs, e.g. token types."""
    return {entry.name: rng.integers(0, entry.size(config), shape) for entry in companions(config)}


def _prefill(rng: np.random.Generator, length: int) -> int:
    """Draw the length of the first cached pass. At most 12 single steps follow, as the longest case is slow."""
    return int(rng.integers(max(1, length - 12), length + 1))
