"""What the model reads and writes: the tokens of one sentence, and how the output was found.

encoder-decoder   source -> its translation, or the target that is given
decoder           prompt -> its continuation, or the one that is given
encoder           the text, with or without <mask>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from export.validate.cases import Case
from mlx_transformer.generation.fill import ids_with_masks
from mlx_transformer.generation.options import Options
from mlx_transformer.system.errors import UserError

from .opening import Opened
from .tree import Node, searched

CONTINUATION = 20
"""New tokens of a decoder alone, unless another number is asked for."""


@dataclass(frozen=True)
class ExplainedSentence:
    """Ids of one input. `source`: what the encoder reads; `target`: what the decoder reads; empty where there is none.

    `written`: the token that follows each position of the target (or, of an encoder alone, that stands at each of the
    source); `given`: how many of them, from the first on, were no choice of the model. `tree`: of the beam search that
    found the output; `score`: its log p / lp(length).
    """

    text: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    written: tuple[int, ...]
    given: int
    output: str
    tree: tuple[Node, ...] = ()
    score: float | None = None

    @property
    def case(self) -> Case:
        """As the engines take it: one row, no padding."""
        source, target = (np.array([ids], np.int64) for ids in (self.source, self.target))
        if not self.source:
            return Case("sentence", target, None, None, 1)
        return Case("sentence", source, None, target if self.target else None, 1)


def read_sentence(model: Opened, text: str, target: str | None, options: Options) -> ExplainedSentence:
    """Tokenise, and let the model find its output unless `target` gives one.

    `UserError` for an empty text, one that is too long for the model, and a target that an encoder can't have.
    """
    if not text.strip():
        raise UserError("the sentence is empty: give one with words in it")
    architecture = model.config.architecture
    if architecture == "encoder":
        return _filled(model, text, target)
    if architecture == "decoder":
        return _continued(model, text, target, options)
    return _translated(model, text, target, options)


def _filled(model: Opened, text: str, target: str | None) -> ExplainedSentence:
    if target is not None:
        raise UserError(f"{model.folder}: is an encoder alone, which writes nothing: leave out --target")
    ids = tuple(ids_with_masks(model.tokenizer, text))
    _check_length(model, ids, "text")
    return ExplainedSentence(text, ids, (), ids, len(ids), "")


def _translated(model: Opened, text: str, target: str | None, options: Options) -> ExplainedSentence:
    source = model.tokenizer.source.encode(text)
    _check_length(model, source, "sentence")
    bos = model.config.bos_id
    if target is not None:
        written = model.tokenizer.encode(target)
        _check_length(model, written, "target")
        return ExplainedSentence(text, tuple(source), (bos, *written[:-1]), tuple(written), len(written), target)
    written, tree, score = _searched(model, source, options)
    output = model.tokenizer.decode(written)
    return ExplainedSentence(text, tuple(source), (bos, *written[:-1]), tuple(written), 0, output, tree, score)


def _continued(model: Opened, text: str, target: str | None, options: Options) -> ExplainedSentence:
    prompt = [model.config.bos_id, *model.tokenizer.encode(text)[:-1]]
    _check_length(model, prompt, "prompt")
    if target is not None:
        new, tree, score, output = model.tokenizer.encode(target), (), None, target
    else:
        new, tree, score = _searched(model, prompt, options)
        output = model.tokenizer.decode(new)
    ids = (*prompt, *new)
    _check_length(model, ids[:-1], "prompt and continuation")
    given = len(ids) if target is not None else len(prompt) - 1
    return ExplainedSentence(text, (), ids[:-1], ids[1:], given, output, tree, score)


def _searched(model: Opened, ids: list[int], options: Options) -> tuple[list[int], tuple[Node, ...], float]:
    """Return the best output, with eos unless it was cut at its limit; the tree of a beam search; the score."""
    with model.engine.searching() as searchable:
        hypotheses, tree, limit = searched(searchable, ids, options)
    best = hypotheses[0]
    end = [model.config.eos_id] if len(best.ids) < limit else []
    return [*best.ids, *end], tuple(tree), best.score


def _check_length(model: Opened, ids: Sequence[int], what: str) -> None:
    most = model.config.max_positions
    if len(ids) > most:
        raise UserError(f"the {what} has {len(ids)} tokens, {model.folder} takes at most {most}: shorten it")
