"""A search graph in ONNX Runtime: ids or text in, the n best out, with the same arguments as the other runtimes.

Shapes: B sentences, S source, n = n_best, T longest output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.interface import GRAPHS, SEARCH, Request
from export.precision.table import PRECISIONS
from export.search_inputs import TEXT_SETTINGS
from export.targets.portable.runtime import SOURCE_MULTIPLE
from mlx_transformer.core.inputs import Ids, Sources
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.generation.candidates import check_candidates
from mlx_transformer.generation.options import (
    EXTRA_TOKENS,
    Hypothesis,
    Options,
    check_options,
    check_prefix,
    check_single,
    expected_tokens,
    length_limits,
)
from mlx_transformer.generation.search import UNSHARED, DoneShare, SharedSearch, batches, check_fits, reported
from mlx_transformer.generation.settings import (
    TASK_PREFIX,
    Settings,
    around_source,
    checked_settings,
    resolved,
    with_source_language,
)
from mlx_transformer.generation.steps import DEAD
from mlx_transformer.generation.verbs import TextVerbs
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import parse_json

from .metadata import (
    ACTIVATIONS,
    ATTENTION,
    GENERATION,
    LATER,
    PRECISION,
    TOKENIZER,
    VECTOR,
    inputs_of,
)
from .opening import OneFile, opened

if TYPE_CHECKING:
    from mlx_transformer.core.tokenizer import Tokenizer
    from mlx_transformer.generation.translate import Overlong, Translation, Translator

REPLACEMENT = "\ufffd"  # of a character that was cut
MOST_TOKENS = 8
"""More than a byte of text becomes: one, or where SentencePiece replaces a character by a phrase, several."""


class SearchModel(TextVerbs):
    """One file written by `export_search`.

        model = SearchModel("model.onnx")
        model.generate([[17, 5, 2]], beam=4)                  # [[ids]]
        model.search([[17, 5, 2]], beam=4, n_best=2)          # [[Hypothesis(ids, score), ...]]
        model.translate(["a line"])                           # exported with text, or of a model with a tokenizer

    Raises `UserError` for a file that isn't one, and for the arguments as `generation.search.search` does.
    """

    has_steps = False

    def __init__(
        self,
        path: str | Path,
        *,
        threads: int | None = None,
        providers: Sequence[str] | None = None,
        verify: bool = True,
        file: OneFile | None = None,
    ):
        """threads: of one operator, default the machine's cores. providers: ONNX Runtime's, default the CPU. verify:
        compare the file with its digest where a manifest beside it has one. file: the same, opened already."""
        file = file or OneFile.open(path, threads, providers, verify)
        self.path, self.where, self.session, self.metadata = file.path, str(path), file.session, file.metadata
        metadata = self.metadata
        if VECTOR in metadata:
            raise UserError(f"{path}: gives vectors of texts, no translations: it is for embed")
        # ONNX Runtime rounds the activations of weights in blocks unless it is told not to, and the file says that.
        if metadata.get(ACTIVATIONS) == "float32":
            self.session = opened(self.path, threads, providers, "float32")
        settings = self.session.get_overridable_initializers()  # inputs with a default
        sides = [*self.session.get_inputs(), *settings], self.session.get_outputs()
        names = [[entry.name for entry in side] for side in sides]
        self.config = file.config
        layer = int(metadata[ATTENTION]) if self.shows_attention else None
        of_text = Request(config=self.config, text=True)
        self.takes_text = GRAPHS[SEARCH](of_text).input_names["text"] in names[0]
        request = of_text if self.takes_text else Request(config=self.config, attention_layer=layer)
        self.ports = GRAPHS[SEARCH](request).among(*names)

    def __repr__(self) -> str:
        return f"SearchModel({self.where!r}): {self.config.architecture}, {parameter_count(self.config):,} parameters"

    def generate(self, ids: Ids | None = None, prefix: Ids | None = None, **options: Any) -> list[list[int]]:
        check_single(options, "generate", "search")
        return [hypotheses[0].ids for hypotheses in self.search(ids, prefix, **options)]

    @property
    def depends_on_batch(self) -> bool:
        """As `OnnxTransformer` has it."""
        chosen = PRECISIONS.get(self.metadata.get(PRECISION, ""))
        return chosen is not None and chosen.depends_on_batch and self.metadata.get(ACTIVATIONS) != "float32"

    def search(
        self,
        ids: Ids | None = None,
        prefix: Ids | None = None,
        *,
        candidates: Ids | None = None,
        attention: bool = False,
        done: DoneShare | None = None,
        share: SharedSearch = UNSHARED,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """Return the `n_best` best outputs of each input, best first. prefix: forced first tokens of each, [] for none;
        one that is a language, say. candidates: the ids that each output may be made of. attention: each with its own.
        done: told the share that is finished. share: for a server's batches. options: the fields of `Options`."""
        ids, options = with_source_language(self.generation, ids, options)
        if candidates is None and not self.takes_text:
            ids, listed = self._shortlisted(ids, {})
            candidates = listed.get("candidates")
        if self.takes_text:
            raise UserError(f"{self.path}: takes text, not ids: call translate, or export it without text")
        if ids is None:
            raise UserError(f"{self.path}: takes ids, no vectors; export a folder for those")
        if attention and not self.shows_attention:
            raise UserError(f"{self.path}: returns no attention: export it with --search --attention")
        chosen = self._options(options)
        sources = Sources.of(self.config, ids=ids)
        forced = check_prefix(prefix, len(sources), self.config, chosen.end_ids)
        if any(map(len, forced)) and "prefix" not in self.ports.input_names:
            raise UserError(f"{self.path}: takes no prefix: an earlier version wrote it; export it again")
        if candidates is not None and "candidates" not in self.ports.input_names:
            raise UserError(f"{self.path}: takes no candidates: an earlier version wrote it; export it again")
        own = None if candidates is None else check_candidates(candidates, len(sources), self.config)
        limits = length_limits(sources, forced, chosen, self.config, hard=True)
        lengths = sources.lengths
        check_fits(self.config, chosen.beam, int(lengths.max(initial=0)), int(limits.max(initial=0)))
        places = _places(share, len(sources))
        results: list[list[Hypothesis]] = [[] for _ in sources]
        indices = batches(lengths, expected_tokens(lengths, limits, chosen, forced), limits, chosen)
        for index in reported(indices, len, len(sources), done):
            settings = {**inputs_of(vars(chosen)), "rows": places[index], "max_new_tokens": limits[index]}
            settings["prefix"] = prefixes([forced[i] for i in index])
            settings["candidates"] = prefixes([]) if own is None else prefixes([own[i] for i in index], 1)
            hypotheses = self._run(sources[index], settings, share, attention)
            for i, best in zip(index, hypotheses, strict=True):
                results[i] = best
        for i, best in enumerate(results):
            _check_finite(best, f"source row {i}")
        return results

    def without_limit(self, ids: Ids, options: Options) -> list[list[Hypothesis]]:
        """Return the same where the file decides how long an output may be, as for whoever runs it by itself."""
        sources = Sources.of(self.config, ids=ids)
        settings = {**inputs_of(vars(options)), "max_new_tokens": np.array([0])}
        settings |= {"rows": _places(UNSHARED, len(sources)), "prefix": prefixes([]), "candidates": prefixes([])}
        return self._run(sources, settings, UNSHARED, False)

    def _n_best(
        self,
        lines: str | Sequence[str],
        *,
        overlong: Overlong = "error",
        first_line: int = 1,
        on_overlong: Callable[[int], None] | None = None,
        **options: Any,
    ) -> list[list[Translation]]:
        """Translate text: in a file exported with text the tokenizer is the graph's; else it is this process's."""
        from mlx_transformer.generation.translate import as_lines, join  # not at the top: see `..runtime`

        lines = as_lines(lines)
        if not self.takes_text:
            return super()._n_best(lines, overlong=overlong, first_line=first_line, on_overlong=on_overlong, **options)
        if options.pop("aligned", False):
            raise UserError(f"{self.path}: gives text without alignments: export it without text")
        options.pop("scored", None)
        prefix = options.pop(TASK_PREFIX, None)
        owners, pieces = self.pieces(lines, overlong, first_line, on_overlong, task_prefix=prefix)
        results = self.translated(pieces, [first_line + owner for owner in owners], **options)
        return join(len(lines), owners, results)

    def check_lines(
        self,
        lines: Sequence[str],
        overlong: Overlong = "error",
        first_line: int = 1,
        task_prefix: str | None = None,
    ) -> None:
        if self.takes_text:
            self.pieces(lines, overlong, first_line, task_prefix=task_prefix)
        else:
            super().check_lines(lines, overlong, first_line, task_prefix)

    def log_probabilities(self, ids: Ids, targets: Ids, **options: Any) -> list[np.ndarray]:
        raise UserError(f"{self.path}: the search is in the file, which gives no log-probabilities: export a folder")

    def decoding(self) -> AbstractContextManager[Any]:
        raise UserError(
            "{}: the search is in the file, which gives whole lines alone: leave out {stream}", self.path, stream=True
        )

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        from mlx_transformer.core.tokenizer import Tokenizer

        return Tokenizer(self.metadata[TOKENIZER]) if TOKENIZER in self.metadata else None

    @cached_property
    def generation(self) -> Settings:
        if GENERATION not in self.metadata:
            return {}
        values = parse_json(self.metadata[GENERATION], f"{self.path}: damaged settings", "export it again")
        return checked_settings(values, self.config, str(self.path))

    @property
    def place(self) -> Path:
        return self.path.parent

    @property
    def shows_attention(self) -> bool:
        return ATTENTION in self.metadata

    @property
    def translator(self) -> Translator:
        """For a file that takes ids; `UserError` where it has no tokenizer."""
        if self.tokenizer is None:
            raise UserError(f"{self.path}: takes ids, and holds no tokenizer: call generate, or export the model again")
        return super().translator

    def pieces(
        self,
        lines: Sequence[str],
        overlong: Overlong,
        first_line: int = 1,
        on_overlong: Callable[[int], None] | None = None,
        *,
        task_prefix: str | None = None,
    ) -> tuple[list[int], list[str]]:
        """Return what a graph that takes text is given for lines, and the index of the line each belongs to.
        task_prefix: text before each, in place of the model's own."""
        from mlx_transformer.core.tokenizer import unicode_texts
        from mlx_transformer.generation.translate import as_lines

        prefix = self.generation.get(TASK_PREFIX, "") if task_prefix is None else task_prefix
        owners, pieces = [], []
        for i, line in enumerate(unicode_texts(as_lines(lines))):
            if "\0" in line:
                if overlong == "error":
                    number = first_line + i
                    raise UserError(f"line {number}: holds a NUL character, at which a string of ONNX Runtime ends")
                line = line.replace("\0", "")
            new = [prefix + line if line.strip() else line]
            if len(new[0].encode()) * MOST_TOKENS >= self.config.max_positions and TOKENIZER in self.metadata:
                long: list[int] = []
                _, rows = self.translator.with_prefix(prefix).rows([line], overlong, first_line + i, long.append)
                if long:
                    new = [self.translator.tokenizer.source.decode(row).rstrip(REPLACEMENT) for row in rows]
                    if on_overlong is not None:
                        on_overlong(first_line + i)
            owners += [i] * len(new)
            pieces += new
        return owners, pieces

    def translated(
        self,
        lines: Sequence[str],
        numbers: Sequence[int],
        *,
        done: DoneShare | None = None,
        share: SharedSearch = UNSHARED,
        **options: Any,
    ) -> list[list[Translation]]:
        """Translate `pieces`. `numbers`: their line numbers, for messages. `share`: how a server batches them."""
        from mlx_transformer.generation.translate import Translation

        around, options = around_source(self.generation, options)
        if any(ids and name not in self.ports.input_names for name, ids in zip(TEXT_SETTINGS, around, strict=True)):
            raise UserError(f"{self.path}: takes no source_language: an earlier version wrote it; export it again")
        chosen = self._options(options)
        limit = np.array([chosen.max_new_tokens or 0])
        places = _places(share, len(lines))
        sizes = np.array([len(line.encode()) for line in lines], int)  # a bound on the tokens
        results: list[list[Translation]] = [[] for _ in lines]
        limits = sizes + EXTRA_TOKENS
        most = min(int(limits.max(initial=0)), self.config.max_positions)
        check_fits(self.config, chosen.beam, 0, chosen.max_new_tokens or most)
        indices = batches(sizes, expected_tokens(sizes, limits, chosen), limits, chosen)
        for index in reported(indices, len, len(lines), done):
            text = np.array([lines[i] for i in index], object)
            values = {"text": text, **inputs_of(vars(chosen)), "max_new_tokens": limit, "rows": places[index]}
            values["prefix"] = values["candidates"] = prefixes([])
            values |= {name: np.array(ids, np.int64) for name, ids in zip(TEXT_SETTINGS, around, strict=True)}
            texts, scores = self._outputs(["translations", "scores"], values, share)
            for i, row, values in zip(index, texts, scores, strict=True):
                results[i] = [Translation(t, float(s)) for t, s in zip(row, values, strict=True) if not s <= DEAD]
        for number, best in zip(numbers, results, strict=True):
            _check_finite(best, f"line {number}")
        return results

    def _options(self, options: dict[str, Any]) -> Options:
        chosen = Options.of(resolved(self.generation, options))
        check_options(chosen, self.config)
        usual, known = Options.__dataclass_fields__, self.ports.input_names
        for name in LATER:
            if name not in known and name in usual and getattr(chosen, name) != usual[name].default:
                raise UserError(f"{self.path}: takes no {name}: an earlier version wrote it; export it again")
        return chosen

    def _outputs(self, outputs: list[str], values: dict[str, np.ndarray], share: SharedSearch) -> list[Any]:
        names = [self.ports.output_names[value] for value in outputs]
        feeds = {name: values[value] for value, name in self.ports.input_names.items()}
        try:
            if share is UNSHARED:
                return list(self.session.run(names, feeds))
            return self.session.run_until(share.stopped, names, feeds)
        except UserError as error:
            raise UserError(f"{error}; a sentence may be too long for it") from None

    def _run(
        self, sources: Sources, settings: dict[str, np.ndarray], share: SharedSearch, attention: bool
    ) -> list[list[Hypothesis]]:
        source, mask = sources.padded(SOURCE_MULTIPLE, self.config.max_positions)
        names = ["sequences", "lengths", "scores", *(["attention"] if attention else [])]
        tensors = self._outputs(names, {**source, "source_mask": mask, **settings}, share)
        results = []
        for row, *sentence in zip(sources, *tensors, strict=True):
            weights = [x[:, : len(row)] for x in sentence[3]] if attention else [None] * len(sentence[0])
            results.append(
                [
                    Hypothesis(ids[:length].tolist(), float(score), attention=None if x is None else x[:length])
                    for ids, length, score, x in zip(*sentence[:3], weights, strict=True)
                    if not score <= DEAD  # not a number stays in, to be reported
                ]
            )
        return results


def _places(share: SharedSearch, count: int) -> np.ndarray:
    return np.arange(count) if share.row_numbers is None else np.asarray(share.row_numbers, np.int64)


def _check_finite(best: Sequence[Hypothesis | Translation], what: str) -> None:
    if not best or not np.isfinite(best[0].score):
        raise UserError(f"{what}: the model's logits are not finite; check its weights")


def prefixes(rows: Sequence[np.ndarray], least: int = 0) -> np.ndarray:
    """Return tokens of each row (B, P), P no less than `least`, -1 after the last of each; (1, 0) of no rows."""
    padded = np.full((max(1, len(rows)), max(map(len, rows), default=0)), -1, np.int64)
    if rows and padded.shape[1] < least:
        padded = np.full((len(rows), least), -1, np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
