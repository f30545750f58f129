"""A search graph in ONNX Runtime: ids or text in, the n best out, with the same arguments as the other runtimes.

Shapes: B sentences, S source, n = n_best, T longest output.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from export.runtime.sessions import CPU, SLOW_FUSIONS, Session, session_options
from export.targets.coreml.trial import with_options
from export.targets.portable.runtime import padded_sources
from mlx_transformer.generation.options import (
    EXTRA_TOKENS,
    Hypothesis,
    Ids,
    Options,
    check_beam,
    check_ids,
    expected_tokens,
    length_limits,
)
from mlx_transformer.generation.search import batches
from mlx_transformer.generation.steps import DEAD
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.manifest import verify_file

from .interface import ACTIVATIONS, CONFIG, DEFAULTS, TEXT_DOMAIN

if TYPE_CHECKING:
    from mlx_transformer.generation.translate import Translation

EXTENSIONS = "onnxruntime_extensions"
OWN = ("max_new_tokens", "rows", "seed")  # inputs that aren't simply an option's value


class SearchModel:
    """One file written by `export_search`.

        model = SearchModel("model.onnx")
        model.generate([[17, 5, 2]], beam=4)                  # [[ids]]
        model.search([[17, 5, 2]], beam=4, n_best=2)          # [[Hypothesis(ids, score), ...]]
        SearchModel("text.onnx").translate(["a line"])        # exported with text

    Raises `UserError` for a file that isn't one, and for the arguments as `generation.search.search` does.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        threads: int | None = None,
        providers: Sequence[str] | None = None,
        verify: bool = True,
    ):
        """threads: of one operator, default the machine's cores. providers: ONNX Runtime's, default the CPU. verify:
        compare the file with its digest where a manifest beside it has one."""
        self.path = Path(path)
        if verify:
            verify_file(self.path)
        self.session = _opened(self.path, threads, providers)
        metadata = self.session.get_modelmeta().custom_metadata_map
        if CONFIG not in metadata:
            raise UserError(f"{path}: isn't a search graph of this project: write one with export_search")
        # ONNX Runtime rounds the activations of weights in blocks unless it is told not to, and the file says that.
        if metadata.get(ACTIVATIONS) == "float32":
            self.session = _opened(self.path, threads, providers, "float32")
        self.takes_text = "text" in {entry.name for entry in self.session.get_inputs()}
        try:
            self.config = TransformerConfig.from_json(metadata[CONFIG])
        except UserError as error:
            raise UserError(f"{path}: {error}; write it again with export_search") from error

    def generate(self, ids: Ids, **options: Any) -> list[list[int]]:
        """New token ids of each input's best output."""
        return [hypotheses[0].ids for hypotheses in self.search(ids, **options)]

    def search(self, ids: Ids, **options: Any) -> list[list[Hypothesis]]:
        """The `n_best` best outputs of each input, best first. options: the fields of `Options`."""
        self._check(False, "ids", "translate")
        chosen = self._options(options)
        rows = check_ids(ids, self.config.source_vocab_size)
        limits = length_limits(rows, [np.zeros(0, np.int64)] * len(rows), chosen, self.config, hard=True)
        results: list[list[Hypothesis]] = [[] for _ in rows]
        lengths = np.array([len(row) for row in rows], int)
        for index in batches(lengths, expected_tokens(lengths, limits, chosen), limits, chosen):
            hypotheses = self._run(index, [rows[i] for i in index], limits[index], chosen)
            for i, best in zip(index, hypotheses, strict=True):
                results[i] = best
        _check_finite(results, "source row")
        return results

    def translate(self, lines: Sequence[str], **options: Any) -> list[str]:
        """The best translation of each line; an empty line stays empty."""
        from mlx_transformer.generation.translate import check_single

        check_single(options)
        return [translations[0].text for translations in self.n_best(lines, **options)]

    def n_best(self, lines: Sequence[str], **options: Any) -> list[list[Translation]]:
        """The `n_best` translations of each line with their scores. For a file exported with text."""
        from mlx_transformer.generation.translate import Translation, as_lines  # not at the top: see `..runtime`
        from mlx_transformer.spec.tokenizer import unicode_texts

        self._check(True, "text", "generate")
        chosen = self._options(options)
        lines = list(unicode_texts(as_lines(lines)))
        for i, line in enumerate(lines):
            if "\0" in line:
                raise UserError(f"line {i + 1}: holds a NUL character, at which a string of ONNX Runtime ends")
        limit = np.array([chosen.max_new_tokens or 0])
        sizes = np.array([len(line.encode()) for line in lines], int)  # a bound on the tokens
        results: list[list[Translation]] = [[] for _ in lines]
        limits = sizes + EXTRA_TOKENS
        for index in batches(sizes, expected_tokens(sizes, limits, chosen), limits, chosen):
            text = np.array([lines[i] for i in index], object)
            feeds = {"text": text, **feeds_of(chosen), "max_new_tokens": limit, "rows": index}
            texts, scores = self._outputs(["translations", "scores"], feeds)
            for i, row, values in zip(index, texts, scores, strict=True):
                results[i] = [Translation(t, float(s)) for t, s in zip(row, values, strict=True) if not s <= DEAD]
        _check_finite(results, "line")
        return results

    def _check(self, text: bool, passed: str, method: str) -> None:
        if self.takes_text != text:
            taken = "text" if self.takes_text else "ids"
            raise UserError(f"{self.path}: takes {taken}, not {passed}: call {method}, or export it the other way")

    def _options(self, options: dict[str, Any]) -> Options:
        chosen = Options(**options)
        check_beam(chosen, self.config)
        return chosen

    def _outputs(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[Any]:
        try:
            return list(self.session.run(names, feeds))
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise UserError(f"{self.path}: {str(error).splitlines()[0]}; a sentence may be too long for it") from None

    def _run(
        self, index: np.ndarray, rows: list[np.ndarray], limits: np.ndarray, options: Options
    ) -> list[list[Hypothesis]]:
        ids, mask = padded_sources(rows, self.config)
        feeds = {"input_ids": ids, "attention_mask": mask, **feeds_of(options), "max_new_tokens": limits, "rows": index}
        sequences, lengths, scores = self._outputs(["sequences", "lengths", "scores"], feeds)
        return [
            [
                Hypothesis(row[:length].tolist(), float(score))
                for row, length, score in zip(*sentence, strict=True)
                if not score <= DEAD  # not a number stays in, to be reported
            ]
            for sentence in zip(sequences, lengths, scores, strict=True)
        ]


def _opened(
    path: Path, threads: int | None, providers: Sequence[str] | None, activations: str | None = None
) -> ort.InferenceSession:
    options = session_options(threads or None, activations=activations)
    if find_spec(EXTENSIONS):
        options.register_custom_ops_library(import_module(EXTENSIONS).get_library_path())
    arguments: dict[str, Any] = {"providers": with_options(providers or [CPU]), "disabled_optimizers": SLOW_FUSIONS}
    try:
        return Session(path, options, **arguments)
    except Exception as error:  # onnxruntime's exceptions have no common base
        reason = str(error).splitlines()[0]
        if TEXT_DOMAIN in str(error) and not find_spec(EXTENSIONS):
            reason = "its text operators need: pip install -e '.[text]' in the project's folder"
        raise UserError(f"{path}: ONNX Runtime can't open it ({reason})") from None


def _check_finite(results: Sequence[Sequence[Hypothesis | Translation]], what: str) -> None:
    first = 1 if what == "line" else 0
    for i, best in enumerate(results, first):
        if not best or not np.isfinite(best[0].score):
            raise UserError(f"{what} {i}: the model's logits are not finite; check its weights")


def feeds_of(options: Options) -> dict[str, np.ndarray]:
    """The settings as the graph's inputs, but for the length limit and the rows' numbers."""
    settings = {name: np.asarray(getattr(options, name), x.dtype) for name, x in DEFAULTS.items() if name not in OWN}
    return {**settings, "seed": np.asarray(options.seed, np.uint64).view(np.int64)}
