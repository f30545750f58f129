"""Graphs of fixed shape (`graphs.py`) as a model: rows in portions of as many as one takes, padded to its lengths.

Shapes: B rows of the graph, R rows in decoding, S source and T target positions of the graph, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from export.interface import DECODER_COREML, ENCODER_COREML, GRAPHS, VECTORS_OF, Request
from export.targets.portable.runtime import EncoderGraphs
from export.targets.session import PortSession, Session, Values
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources
from mlx_transformer.generation.steps import Model
from mlx_transformer.system.errors import UserError


class CoreMLSession(PortSession):
    """A session whose inputs have B rows, run on any number."""

    def __init__(self, session: Session, graph: str, request: Request):
        super().__init__(session, GRAPHS[graph](request))
        self.rows, self.length = next(iter(self.shapes.values()))
        """B, and the positions of the input that is read first."""

    def portions(self, values: Values, outputs: Sequence[str]) -> Values:
        """Run on inputs with R rows, B at a time; returns the outputs with R rows."""
        count = len(next(iter(values.values())))
        results = []
        for rows in self._places(count):
            # The last portion is filled up with copies of its last row.
            filled = values if len(rows) == count else {value: x[rows] for value, x in values.items()}
            results.append(self(outputs, filled))
        if len(results) == 1:
            return {value: x[:count] for value, x in results[0].items()}
        return {value: np.concatenate([part[value] for part in results])[:count] for value in outputs}

    def _places(self, count: int) -> Iterator[NDArray[np.int64]]:
        for first in range(0, count, self.rows):
            yield np.minimum(np.arange(first, first + self.rows), count - 1)


class CoreMLEncoder(EncoderGraphs):
    """encoder_coreml: of an encoder alone, or the encoder's side of both."""

    def __init__(self, request: Request, sessions: Mapping[str, Session]):
        self.config = request.config
        self.graph = CoreMLSession(sessions[ENCODER_COREML], ENCODER_COREML, request)

    def run(self, sources: Sources, outputs: Sequence[str]) -> Values:
        """Return the outputs (R, S, ...) of rows, and "source_mask" (R, S), 1 on tokens. `UserError` for vectors."""
        self.graph.check_source(sources.rows)
        length = self.graph.length
        for i in np.flatnonzero(sources.lengths > length):
            raise UserError(f"row {i}: {sources.lengths[i]} tokens, the graph was exported for {length}")
        source, mask = sources.padded(length)
        return {**self.graph.portions({**source, "source_mask": mask}, outputs), "source_mask": mask}

    def _run(self, outputs: list[str], source: Values, mask: NDArray) -> list[NDArray]:
        """Return outputs (B, L, ...) with the values of tokens in their places, where `mask` has them, 0 on padding;
        vectors of rows (B, ...) as they are."""
        arrays = self.run(unpadded(self.config, source, mask), outputs)
        of_tokens = {"memory", VECTORS_OF["sparse"], VECTORS_OF["multi"]}
        rows = [value == "vector" or (self.config.head.per_row and value not in of_tokens) for value in outputs]
        return [
            arrays[value] if of_row else placed(arrays[value], mask.astype(bool))
            for value, of_row in zip(outputs, rows, strict=True)
        ]


def placed(values: NDArray, real: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return values (B, L, ...) of rows that begin with their tokens, moved to where `real` (B, L) has these; 0
    elsewhere."""
    moved = np.zeros((*real.shape, *values.shape[2:]), np.float32)
    for i, is_token in enumerate(real):
        moved[i, is_token] = values[i, : is_token.sum()]
    return moved


def unpadded(config: TransformerConfig, source: Values, mask: NDArray) -> Sources:
    """Return the tokens alone of each row (B, L, ...)."""
    tokens = mask.astype(bool)
    rows = {value: [row[real] for row, real in zip(x, tokens, strict=True)] for value, x in source.items()}
    return Sources(config, rows)


class CoreMLDecoder:
    """`generation.steps.Decoder`: R rows, each with its buffers and its next position."""

    def __init__(self, graph: CoreMLSession, state: Values):
        self.graph, self.state = graph, state
        """`state`: everything with R rows, by value; its positions are the next ones."""

    def step(self, ids: NDArray, output: str = "logits") -> NDArray:
        """Take the last tokens (R,) and return an output (R, ...) after them."""
        values = {**self.state, "target_ids": ids[:, None].astype(np.int64)}
        outputs = self.graph.portions(values, [output, *self.graph.cache])
        last = outputs.pop(output)[:, -1]
        self.state |= outputs
        self.state["positions"] = self.state["positions"] + 1
        return last

    def repeat(self, times: int) -> None:
        self.keep(np.repeat(np.arange(len(self.state["positions"])), times))

    def reorder(self, rows: NDArray) -> None:
        if not np.array_equal(rows, np.arange(len(rows))):
            self.keep(rows)

    def keep(self, rows: NDArray) -> None:
        self.state = {name: x[rows] for name, x in self.state.items()}


class CoreMLModel(Model):
    """decoder_coreml with encoder_coreml, or alone."""

    def __init__(self, request: Request, sessions: Mapping[str, Session]):
        self.config = request.config
        self.graph = CoreMLSession(sessions[DECODER_COREML], DECODER_COREML, request)
        self.encoder = CoreMLEncoder(request, sessions) if request.config.has_encoder else None

    def encode(self, source: Values, mask: NDArray) -> NDArray:
        """Return (B, L, D) of a source, by value, and its mask (B, L)."""
        if self.encoder is None:
            raise UserError("a decoder alone encodes nothing")
        return self.encoder.encode(source, mask)

    def attention(self, source: Values, mask: NDArray, target_ids: NDArray) -> NDArray:
        """Return the weights (B, T, S) that a folder exported with attention returns, of sources and targets (B, T)."""
        decoder = self.begin(unpadded(self.config, source, mask))
        weights = np.stack([decoder.step(column, "attention") for column in target_ids.T], axis=1)
        return placed(weights.swapaxes(1, 2), mask.astype(bool)).swapaxes(1, 2)

    def start(self, sources: Sources) -> tuple[CoreMLDecoder, NDArray]:
        """Return the decoder, and the logits (R, V) after the start token, or after each prompt."""
        decoder = self.begin(sources)
        if self.encoder is None:
            return decoder, self.read(decoder, list(sources))[-1]
        return decoder, decoder.step(np.full(len(sources), sources.start, np.int64))

    def begin(self, sources: Sources) -> CoreMLDecoder:
        """Return the decoder before its first token; sources encoded, where there is an encoder."""
        rows = len(sources)
        state: Values = {
            value: np.zeros((rows, *self.graph.shapes[value][1:]), np.float32) for value in self.graph.cache
        }
        state["positions"] = np.zeros((rows, 1), np.int64)
        if self.encoder is not None:
            state |= self.encoder.run(sources, self.encoder.graph.cross)
        return CoreMLDecoder(self.graph, state)

    def read(self, decoder: CoreMLDecoder, prompts: Sequence[NDArray]) -> list[NDArray]:
        """Return the logits (R, V) after each token of the longest prompt. A shorter one's last token is read again at
        its place until then."""
        last = np.array([len(row) - 1 for row in prompts])
        logits = []
        for t in range(last.max() + 1):
            at = np.minimum(t, last)
            decoder.state["positions"] = at[:, None]
            logits.append(decoder.step(np.array([row[i] for row, i in zip(prompts, at, strict=True)])))
        return logits
