"""Graphs of fixed shape (`graphs.py`) as a model: rows in portions of as many as one takes, padded to its lengths.

Shapes: B rows of the graph, R rows in decoding, S source and T target positions of the graph, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from export.interface import CROSS_ATTENTION, DECODER_COREML, ENCODER_COREML
from export.targets.portable.runtime import EncoderGraphs, Feeds, NamedSession, Session, source_feed
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.arrays import NumpyArrays
from mlx_transformer.system.errors import UserError

from .shape import joined, parts_of


class CoreMLSession(NamedSession):
    """A session whose inputs have B rows, run on any number. Outputs that are split into parts are joined."""

    def __init__(self, session: Session):
        super().__init__(session)
        self.rows = self.inputs["input_ids"][0]
        self.parts = parts_of(self.outputs)

    def __call__(self, outputs: Sequence[str], **feeds: NDArray) -> Feeds:
        return joined(super().__call__([x for name in outputs for x in self.parts.get(name, [name])], **feeds), -1)

    def portions(self, feeds: Feeds, outputs: Sequence[str]) -> Feeds:
        """Run on inputs with R rows, B at a time; returns the outputs with R rows."""
        count = len(feeds["input_ids"])
        results = []
        for rows in self._places(count):
            # The last portion is filled up with copies of its last row.
            filled = feeds if len(rows) == count else {name: x[rows] for name, x in feeds.items()}
            results.append(self(outputs, **filled))
        if len(results) == 1:
            return {name: x[:count] for name, x in results[0].items()}
        return {name: np.concatenate([part[name] for part in results])[:count] for name in outputs}

    def _places(self, count: int) -> Iterator[NDArray[np.int64]]:
        for first in range(0, count, self.rows):
            yield np.minimum(np.arange(first, first + self.rows), count - 1)


class CoreMLEncoder(EncoderGraphs):
    """encoder_coreml: of an encoder alone, or the encoder's side of both."""

    def __init__(self, config: TransformerConfig, sessions: Mapping[str, Session]):
        self.config, self.graph = config, CoreMLSession(sessions[ENCODER_COREML])
        self.length = self.graph.inputs["input_ids"][1]

    def encode(self, ids: NDArray, mask: NDArray) -> NDArray:
        return self._padded_as(mask, "last_hidden_state", ids)

    def logits(self, ids: NDArray, mask: NDArray) -> NDArray:
        return self._padded_as(mask, "logits", ids)

    def run(self, rows: Sequence[NDArray], outputs: Sequence[str]) -> Feeds:
        """Outputs (R, S, ...) of rows of ids, and "attention_mask" (R, S), 1 on tokens. `UserError` for vectors."""
        source_feed(self.graph.session, rows[0][None])
        ids = np.full((len(rows), self.length), self.config.pad_id, np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            if len(row) > self.length:
                raise UserError(f"row {i}: {len(row)} tokens, the graph was exported for {self.length}")
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        values = self.graph.portions({"input_ids": ids, "attention_mask": mask}, outputs)
        return {**values, "attention_mask": mask}

    def _padded_as(self, mask: NDArray, output: str, ids: NDArray) -> NDArray:
        """An output (B, L, ...) with the values of tokens in their places, where `mask` has them; 0 on padding."""
        tokens = mask.astype(bool)
        values = self.run([row[is_token] for row, is_token in zip(ids, tokens, strict=True)], [output])[output]
        placed = np.zeros((*mask.shape, values.shape[-1]), np.float32)
        for i, is_token in enumerate(tokens):
            placed[i, is_token] = values[i, : is_token.sum()]
        return placed


class CoreMLDecoder:
    """`generation.steps.Decoder`: R rows, each with its buffers and its next position."""

    def __init__(self, graph: CoreMLSession, state: Feeds):
        self.graph, self.state = graph, state
        """`state`: everything with R rows, by the names of the graph's inputs; position_ids are the next ones."""

    def step(self, ids: NDArray, output: str = "logits") -> NDArray:
        """Last tokens (R,) -> an output (R, ...) after them."""
        feeds = {**self.state, "input_ids": ids[:, None].astype(np.int64)}
        outputs = self.graph.portions(feeds, [output, *self.graph.presents])
        wanted = outputs.pop(output)[:, -1]
        self.state |= {name.replace("present.", "past_key_values.", 1): x for name, x in outputs.items()}
        self.state["position_ids"] = self.state["position_ids"] + 1
        return wanted

    def repeat(self, times: int) -> None:
        self.keep(np.repeat(np.arange(len(self.state["position_ids"])), times))

    def reorder(self, rows: NDArray) -> None:
        if not np.array_equal(rows, np.arange(len(rows))):
            self.keep(rows)

    def keep(self, rows: NDArray) -> None:
        self.state = {name: x[rows] for name, x in self.state.items()}


class CoreMLModel:
    """decoder_coreml with encoder_coreml, or alone."""

    extends_positions = False
    arrays = NumpyArrays()

    def __init__(self, config: TransformerConfig, sessions: Mapping[str, Session]):
        self.config, self.graph = config, CoreMLSession(sessions[DECODER_COREML])
        self.encoder = CoreMLEncoder(config, sessions) if config.has_encoder else None

    def encode(self, ids: NDArray, mask: NDArray) -> NDArray:
        """(B, L) -> (B, L, D)."""
        if self.encoder is None:
            raise UserError("a decoder alone encodes nothing")
        return self.encoder.encode(ids, mask)

    def attention(self, ids: NDArray, mask: NDArray, target_ids: NDArray) -> NDArray:
        """The weights (B, T, S) that a folder exported with attention returns, of sources and targets (B, T)."""
        tokens = mask.astype(bool)
        decoder = self.begin([row[is_token] for row, is_token in zip(ids, tokens, strict=True)])
        weights = np.stack([decoder.step(column, CROSS_ATTENTION) for column in target_ids.T], axis=1)
        placed = np.zeros((*target_ids.shape, ids.shape[1]), np.float32)
        for i, is_token in enumerate(tokens):  # in the graph a source's tokens come first
            placed[i][:, is_token] = weights[i, :, : is_token.sum()]
        return placed

    def start(self, rows: Sequence[NDArray]) -> tuple[CoreMLDecoder, NDArray]:
        """The decoder, and the logits (R, V) after the start token, or after each prompt."""
        decoder = self.begin(rows)
        if self.encoder is None:
            return decoder, self.read(decoder, rows)[-1]
        return decoder, decoder.step(np.full(len(rows), self.config.bos_id, np.int64))

    def begin(self, rows: Sequence[NDArray]) -> CoreMLDecoder:
        """The decoder before its first token; sources encoded, where there is an encoder."""
        state: Feeds = {
            name: np.zeros((len(rows), *shape[1:]), np.float32)
            for name, shape in self.graph.inputs.items()
            if name.startswith("past_key_values.") and ".encoder." not in name
        }
        state["position_ids"] = np.zeros((len(rows), 1), np.int64)
        if self.encoder is not None:
            source = self.encoder.run(rows, self.encoder.graph.presents)
            state["encoder_attention_mask"] = source.pop("attention_mask")
            state |= {name.replace("present.", "past_key_values.", 1): x for name, x in source.items()}
        return CoreMLDecoder(self.graph, state)

    def read(self, decoder: CoreMLDecoder, prompts: Sequence[NDArray]) -> list[NDArray]:
        """Logits (R, V) after each token of the longest prompt. A shorter one's last token is read again at its place
        until then."""
        last = np.array([len(row) - 1 for row in prompts])
        logits = []
        for t in range(last.max() + 1):
            at = np.minimum(t, last)
            decoder.state["position_ids"] = at[:, None]
            logits.append(decoder.step(np.array([row[i] for row, i in zip(prompts, at, strict=True)])))
        return logits
