"""Opened graphs as one model: encode, decode, and decoding step by step with a cache. NumPy in, NumPy out.

Shapes: B sentences, R rows (B or B*beams), S source, T target, L new tokens, P past, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export.interface import CROSS_ATTENTION, DECODER_FIRST, DECODER_MERGED, DECODER_NEXT, ENCODER, MODEL
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.arrays import NumpyArrays
from mlx_transformer.system.errors import UserError

Feeds = dict[str, NDArray]

SOURCE_MULTIPLE = 4
"""A padded source's length is a multiple of it. Where one query attends to keys, ONNX Runtime sums four of them at a
time and the rest one by one: a sum's order, and with it the last bit, would depend on how much longer a sentence's
neighbours are."""

PROMPT_MULTIPLE = 16
"""The same where padding is on the left: no token may change its lane in a register of 16 numbers."""


class Session(Protocol):
    """The part of `onnxruntime.InferenceSession` that is used here."""

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, NDArray]) -> list[Any]: ...
    def get_inputs(self) -> list[Any]: ...
    def get_outputs(self) -> list[Any]: ...


class NamedSession:
    """One session with its names; inputs that it doesn't have are left out."""

    def __init__(self, session: Session, vocab_size: int | None = None):
        self.session, self.vocab_size, self.where = session, vocab_size, getattr(session, "file", "graph")
        self.inputs = {entry.name: list(entry.shape) for entry in session.get_inputs()}
        self.outputs = [entry.name for entry in session.get_outputs()]
        self.presents = [name for name in self.outputs if name.startswith("present.")]
        self_attention = [name for name in self.presents if ".encoder." not in name]
        self.steps = ["logits", *self_attention]

    def __call__(self, outputs: Sequence[str], **feeds: NDArray) -> Feeds:
        inputs = {name: feeds[name] for name in self.inputs if name in feeds}
        self.need(outputs=outputs)
        tensors = dict(zip(outputs, self.session.run(outputs, inputs), strict=True))
        for name, x in tensors.items():
            self._check(name, x)
        return tensors

    def need(self, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> None:
        """`UserError` unless the graph has them."""
        for kind, wanted, there in (("input", inputs, self.inputs), ("output", outputs, self.outputs)):
            if missing := [name for name in wanted if name not in there]:
                raise UserError(f"{self.where}: has no {kind} {missing[0]!r}; export the model again")

    def _check(self, name: str, x: Any) -> None:
        axes = 4 if name in self.presents else 3
        whole = ("logits", "last_hidden_state", CROSS_ATTENTION)
        if axes == 3 and name not in whole:  # a part of one, or of a fixed shape
            return
        if getattr(x, "ndim", 0) != axes or x.dtype.kind not in "fV":  # V: bfloat16
            raise UserError(f"{self.where}: its output {name} is no tensor of {axes} axes; export the model again")
        if name == "logits" and self.vocab_size is not None and x.shape[2] != self.vocab_size:
            raise UserError(f"{self.where}: its logits are of {x.shape[2]} tokens, the model has {self.vocab_size}")

    def empty_past(self, rows: int) -> Feeds:
        """Keys and values of no position at all."""
        past = {name: shape for name, shape in self.inputs.items() if name.startswith("past_key_values.")}
        for name, shape in past.items():
            if len(shape) != 4 or not all(isinstance(n, int) and 0 < n < 1 << 20 for n in (shape[1], shape[3])):
                raise UserError(f"{self.where}: its input {name} is {shape}; export the model again")
        return {name: np.zeros((rows, shape[1], 0, shape[3]), np.float32) for name, shape in past.items()}


@dataclass
class OnnxCache:
    """One batch in decoding. Rows are hypotheses, `beams` of each sentence side by side."""

    fixed: Feeds
    """What comes from the source: attention mask, hidden states, after the first run keys and values; empty for a
    decoder-only model."""
    shared: bool
    """`fixed` has one row a sentence, whatever the number of beams."""
    mask: NDArray[np.int64] | None = None
    """Decoder-only: 1 on tokens, 0 on the prompt's padding (R, P)."""
    past: Feeds = field(default_factory=dict)
    """Keys and values so far, under the names of the inputs that take them; empty before the first run."""
    beams: int = 1

    def repeat(self, times: int) -> None:
        self.beams *= times
        rows = np.repeat(np.arange(next(iter(self.past.values())).shape[0]), times)
        self._take(rows, None if self.shared else rows)
        if self.mask is not None:
            self.mask = self.mask[rows]

    def reorder(self, rows: NDArray) -> None:
        """Hypotheses of one sentence change places, so what belongs to the source stays."""
        if not np.array_equal(rows, np.arange(len(rows))):
            self._take(rows, None)

    def keep(self, rows: NDArray) -> None:
        self._take(rows, rows[:: self.beams] // self.beams if self.shared else rows)
        if self.mask is not None:
            self.mask = self.mask[rows]

    def _take(self, rows: NDArray, fixed: NDArray | None) -> None:
        self.past = {name: np.take(x, rows, axis=0) for name, x in self.past.items()}
        if fixed is not None:
            self.fixed = {name: np.take(x, fixed, axis=0) for name, x in self.fixed.items()}


class OnnxDecoder:
    """`generation.steps.Decoder` on a cache."""

    def __init__(self, graphs: EncoderDecoderGraphs | CausalGraphs, cache: OnnxCache):
        self.graphs, self.cache = graphs, cache

    def step(self, ids: NDArray) -> NDArray:
        return self.graphs.step(ids[:, None].astype(np.int64), self.cache)[:, -1]

    def repeat(self, times: int) -> None:
        self.cache.repeat(times)

    def reorder(self, rows: NDArray) -> None:
        self.cache.reorder(rows)

    def keep(self, rows: NDArray) -> None:
        self.cache.keep(rows)


class EncoderDecoderGraphs:
    """encoder_model with decoder_model and decoder_with_past_model, or with decoder_model_merged."""

    extends_positions = False
    arrays = NumpyArrays()

    def __init__(self, config: TransformerConfig, sessions: Mapping[str, Session]):
        self.config = config
        self.graphs = {name: NamedSession(session, config.vocab_size) for name, session in sessions.items()}
        self.first = self.graphs.get(DECODER_FIRST) or self.graphs[DECODER_MERGED]
        self.next = self.graphs.get(DECODER_NEXT) or self.graphs[DECODER_MERGED]
        source = "inputs_embeds" if "inputs_embeds" in self.graphs[ENCODER].inputs else "input_ids"
        self.graphs[ENCODER].need([source], ["last_hidden_state"])
        for graph in (self.first, self.next):
            graph.need(["input_ids", "encoder_attention_mask"], ["logits"])
        # Our graph names the axis of the source's rows apart from that of the decoder's, others can't share.
        rows = [self.next.inputs[name][:1] for name in ("encoder_attention_mask", "input_ids")]
        self.shared = rows[0] != rows[1]

    def encode(self, ids: NDArray, mask: NDArray) -> NDArray:
        """Encoder's output (B, S, D) of ids (B, S), or vectors (B, S, D) in their place, and mask (B, S)."""
        encoder = self.graphs[ENCODER]
        feeds = {**source_feed(encoder.session, ids), "attention_mask": mask}
        return encoder(["last_hidden_state"], **feeds)["last_hidden_state"]

    def decode(self, ids: NDArray, hidden: NDArray, mask: NDArray) -> NDArray:
        return self._begin(["logits"], ids, hidden, mask)["logits"]

    def attention(self, ids: NDArray, mask: NDArray, target_ids: NDArray) -> NDArray:
        """The weights (B, T, S) that a folder exported with attention returns, of sources and targets (B, T)."""
        return self._begin([CROSS_ATTENTION], target_ids, self.encode(ids, mask), mask)[CROSS_ATTENTION]

    def begin(self, hidden: NDArray, mask: NDArray) -> OnnxCache:
        return OnnxCache({"encoder_hidden_states": hidden, "encoder_attention_mask": mask}, self.shared)

    def step(self, ids: NDArray, cache: OnnxCache) -> NDArray:
        """Logits (R, L, V) after the tokens (R, L)."""
        if cache.past:
            outputs = self.next(
                self.next.steps, input_ids=ids, use_cache_branch=np.array([True]), **cache.fixed, **cache.past
            )
        else:
            hidden, mask = cache.fixed["encoder_hidden_states"], cache.fixed["encoder_attention_mask"]
            outputs = self._begin(["logits", *self.first.presents], ids, hidden, mask)
            cache.fixed |= {_past(name): outputs.pop(name) for name in list(outputs) if ".encoder." in name}
            if "encoder_hidden_states" not in self.next.inputs:
                del cache.fixed["encoder_hidden_states"]
        logits = outputs.pop("logits")
        cache.past = {_past(name): x for name, x in outputs.items()}
        return logits

    def start(self, rows: Sequence[NDArray]) -> tuple[OnnxDecoder, NDArray]:
        """For a search: encode, and the logits (B, V) after the start token."""
        ids, mask = padded_sources(rows, self.config)
        decoder = OnnxDecoder(self, self.begin(self.encode(ids, mask), mask))
        return decoder, decoder.step(np.full(len(rows), self.config.bos_id, np.int64))

    def _begin(self, outputs: list[str], ids: NDArray, hidden: NDArray, mask: NDArray) -> Feeds:
        feeds = {"input_ids": ids, "encoder_hidden_states": hidden, "encoder_attention_mask": mask}
        return self.first(outputs, use_cache_branch=np.array([False]), **feeds, **self.first.empty_past(len(ids)))


class CausalGraphs:
    """A decoder alone: model.onnx with its cache."""

    extends_positions = False
    arrays = NumpyArrays()

    def __init__(self, config: TransformerConfig, sessions: Mapping[str, Session]):
        self.config, self.graph = config, NamedSession(sessions[MODEL], config.vocab_size)

    def logits(self, ids: NDArray, mask: NDArray) -> NDArray:
        return self.step(ids, self.begin(mask))

    def begin(self, mask: NDArray) -> OnnxCache:
        """`mask` (B, L) of the first tokens, 0 on padding at the left."""
        return OnnxCache({}, True, mask)

    def step(self, ids: NDArray, cache: OnnxCache) -> NDArray:
        """Logits (R, L, V) after the tokens (R, L)."""
        assert cache.mask is not None
        if cache.past:
            cache.mask = np.concatenate([cache.mask, np.ones_like(ids)], axis=1)
        positions = np.maximum(np.cumsum(cache.mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        past = cache.past or self.graph.empty_past(len(ids))
        feeds = {"input_ids": ids, "attention_mask": cache.mask, "position_ids": positions}
        outputs = self.graph(self.graph.steps, **feeds, **past)
        logits = outputs.pop("logits")
        cache.past = {_past(name): x for name, x in outputs.items()}
        return logits

    def start(self, rows: Sequence[NDArray]) -> tuple[OnnxDecoder, NDArray]:
        """For a search: read the prompts, padded on the left, and give the logits (B, V) after them."""
        # Relative positions count padding, and their table has no row to spare for it.
        multiple = 1 if self.config.positions == "relative" else PROMPT_MULTIPLE
        length = -(-max(map(len, rows)) // multiple) * multiple
        ids, mask = padded(rows, self.config.pad_id, length, left=True)
        cache = self.begin(mask)
        return OnnxDecoder(self, cache), self.step(ids, cache)[:, -1]


class EncoderGraphs:
    """An encoder alone: model.onnx. It takes ids (B, L), or vectors (B, L, D) in their place."""

    def __init__(self, config: TransformerConfig, sessions: Mapping[str, Session]):
        self.config, self.graph = config, NamedSession(sessions[MODEL], config.vocab_size)

    def encode(self, ids: NDArray, mask: NDArray) -> NDArray:
        return self._run("last_hidden_state", ids, mask)

    def logits(self, ids: NDArray, mask: NDArray) -> NDArray:
        return self._run("logits", ids, mask)

    def _run(self, output: str, ids: NDArray, mask: NDArray) -> NDArray:
        return self.graph([output], **source_feed(self.graph.session, ids), attention_mask=mask)[output]


def source_feed(encoder: Any, source: NDArray) -> Feeds:
    """What an encoder's session is fed of ids (B, S), or of vectors (B, S, D). `UserError` if it takes the other."""
    name, other = ("inputs_embeds", "input_ids") if source.ndim == 3 else ("input_ids", "inputs_embeds")
    entries = {entry.name for entry in encoder.get_inputs()}
    if name not in entries:
        where, hint = getattr(encoder, "file", "graph"), "export the model again"
        if other in entries:
            hint = f"give it {other}, or export the model with{'out' * (other == 'inputs_embeds')} --inputs-embeds"
        raise UserError(f"{where}: takes no {name}: {hint}")
    return {name: source}


def padded_sources(rows: Sequence[NDArray], config: TransformerConfig) -> tuple[NDArray, NDArray[np.int64]]:
    """Sources of any lengths, ids (S,) or vectors (S, D) -> ids (B, S) or vectors (B, S, D), and mask (B, S); S: a
    multiple of `SOURCE_MULTIPLE`, if the model takes as many."""
    longest = max(map(len, rows))
    rounded = -(-longest // SOURCE_MULTIPLE) * SOURCE_MULTIPLE
    return padded(rows, config.pad_id, max(longest, min(rounded, config.max_positions)))


def padded(
    rows: Sequence[NDArray], pad_id: int, length: int | None = None, left: bool = False
) -> tuple[NDArray, NDArray[np.int64]]:
    """Rows of any lengths, ids or vectors -> the same and mask (B, `length`), default the longest; 1 on tokens."""
    longest = max(map(len, rows)) if length is None else length
    ids = np.full((len(rows), longest, *rows[0].shape[1:]), pad_id, rows[0].dtype)
    mask = np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def _past(present: str) -> str:
    return present.replace("present.", "past_key_values.", 1)
