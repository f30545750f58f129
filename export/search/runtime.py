"""Run a file with the search inside in ONNX Runtime: ids or text in, n best out, with the arguments of the other
runtimes.

`decoding.search` checks, sorts and batches as for every model; here each batch is one run of the graph.

Shapes: B sentences, S source, n = n_best, T longest output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.interface import GRAPHS, SEARCH, TEXT_SETTINGS, Request
from export.precision.table import PRECISIONS
from export.runtime.sessions import CPU, SLOW_FUSIONS, Session, session_options
from export.runtime.transformer import passes_of
from export.targets.portable.runtime import SOURCE_MULTIPLE
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Ids, Sources
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.decoding.options import (
    EXTRA_TOKENS,
    Hypothesis,
    Options,
    check_options,
    check_single,
    expected_tokens,
)
from mlx_transformer.decoding.search import (
    UNSHARED,
    DoneShare,
    SharedSearch,
    batches,
    check_fits,
    in_order,
    never,
    search,
)
from mlx_transformer.decoding.steps import DEAD, Batch, Decoder, Model
from mlx_transformer.generation.settings import (
    TASK_PREFIX,
    Settings,
    checked_settings,
    chosen_options,
    typed_language,
    with_languages,
)
from mlx_transformer.generation.verbs import TextVerbs
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import parse_json
from mlx_transformer.system.lazy import needs
from mlx_transformer.system.manifest import verify_file

from .metadata import ACTIVATIONS, ATTENTION, CONFIG, GENERATION, PRECISION, TEXT_DOMAIN, TOKENIZER, VECTOR, inputs_of

if TYPE_CHECKING:
    from mlx_transformer.generation.translate import Overlong, Translation, Translator
    from mlx_transformer.text.chat import ChatTemplates, Messages
    from mlx_transformer.text.tokenizer import Tokenizer

    from .vector_model import VectorModel


EXTENSIONS = "onnxruntime_extensions"


@dataclass(frozen=True)
class OneFile:
    """An open file of `export_search`."""

    path: Path
    session: Session
    metadata: dict[str, str]
    config: TransformerConfig

    @classmethod
    def open(cls, path: str | Path, threads: int | None, providers: Sequence[str] | None, verify: bool) -> OneFile:
        """Open the file. Raises UserError if it is damaged, or if `export_search` didn't write it."""
        path = Path(path)
        if verify:
            verify_file(path)
        session = opened(path, threads, providers)
        metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
        if CONFIG not in metadata:
            raise UserError(f"{path}: isn't a search graph of this project: write one with export --search")
        try:
            return cls(path, session, metadata, TransformerConfig.from_json(metadata[CONFIG]))
        except UserError as error:
            raise UserError(f"{path}: {error}; write it again with export --search") from error


def opened(path: Path, threads: int | None, providers: Sequence[str] | None, activations: str | None = None) -> Session:
    """Open a session of the file. Raises UserError if ONNX Runtime can't."""
    options = session_options(threads or None, activations=activations)
    if find_spec(EXTENSIONS):
        options.register_custom_ops_library(import_module(EXTENSIONS).get_library_path())
    arguments: dict[str, Any] = {"providers": providers or [CPU], "disabled_optimizers": SLOW_FUSIONS}
    try:
        return Session(path, options, **arguments)
    except Exception as error:  # onnxruntime's exceptions have no common base
        reason = str(error).splitlines()[0]
        if TEXT_DOMAIN in str(error) and not find_spec(EXTENSIONS):
            reason = f"its text operators need: {needs('text')}"
        raise UserError(f"{path}: ONNX Runtime can't open it ({reason})") from None


REPLACEMENT = "\ufffd"  # decoded from a character cut in two
MOST_TOKENS = 8
"""Most tokens per byte of text: usually one, more where SentencePiece replaces a character by a phrase."""


class SearchModel(TextVerbs):
    """A file written by `export_search`.

        model = SearchModel("model.onnx")
        model.generate([[17, 5, 2]], beam=4)                  # [[ids]]
        model.search([[17, 5, 2]], beam=4, n_best=2)          # [[Hypothesis(ids, score), ...]]
        model.translate(["a line"])                           # exported with text, or of a model with a tokenizer

    Raises UserError for any other file, and for wrong arguments as `decoding.search.search` does.
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
        """Open the file.

        threads: per operator; None: all cores. providers: of ONNX Runtime; None: the CPU. verify: compare the file with
        its digest, if a manifest beside it has one. file: the same file, already open.
        """
        file = file or OneFile.open(path, threads, providers, verify)
        self.path, self.where, self.session, self.metadata = file.path, str(path), file.session, file.metadata
        metadata = self.metadata
        if VECTOR in metadata:
            raise UserError(f"{path}: gives vectors of texts, no translations: it is for embed")
        # With block-quantized weights ONNX Runtime rounds activations unless the session forbids it.
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
        self.ports = GRAPHS[SEARCH](request)
        for kind, ports, has in zip(("input", "output"), (self.ports.inputs, self.ports.outputs), names, strict=True):
            if missing := [port.name for port in ports if port.name not in has]:
                raise UserError(f"{path}: has no {kind} {missing[0]}; export it again")

    def __repr__(self) -> str:
        return f"SearchModel({self.where!r}): {self.config.architecture}, {parameter_count(self.config):,} parameters"

    @property
    def depends_on_batch(self) -> bool:
        """See `OnnxTransformer.depends_on_batch`."""
        chosen = PRECISIONS.get(self.metadata.get(PRECISION, ""))
        return chosen is not None and chosen.depends_on_batch and self.metadata.get(ACTIVATIONS) != "float32"

    def search(
        self, ids: Ids | None = None, prefix: Ids | None = None, *, attention: bool = False, **options: Any
    ) -> list[list[Hypothesis]]:
        """Return the `n_best` best outputs of each input, best first; see `decoding.search.search`.

        attention: fill in `Hypothesis.attention`; the file has to be exported with `--attention`.
        """
        return self._searched(search, ids, prefix, options, attention=attention)

    def _searched(self, verb: Any, ids: Ids | None, *arguments: Any, **how: Any) -> list[Any]:
        if self.takes_text:
            verb = "translate" if self.config.has_encoder else "complete"
            raise UserError(f"{self.path}: takes text, not ids: call {verb}, or export it without text")
        if ids is None:
            raise UserError(f"{self.path}: takes ids, no vectors; export a folder for those")
        return super()._searched(verb, ids, *arguments, **how)

    def decoding(self, attention: bool = False) -> AbstractContextManager[Model]:
        if attention and not self.shows_attention:
            raise UserError(f"{self.path}: returns no attention: export it with --search --attention")
        return nullcontext(WholeSearch(self, attention))

    def without_limit(self, ids: Ids, options: Options) -> list[list[Hypothesis]]:
        """Search in one batch with the graph's default length limits, as for callers of the graph itself."""
        sources = Sources.of(self.config, ids=ids)
        rows = np.arange(len(sources))
        batch = Batch(rows, sources, [], np.array([0]), rows)
        return self.hypotheses(batch, inputs_of(vars(options)), never)

    def _n_best(
        self,
        lines: str | Sequence[str],
        *,
        overlong: Overlong = "error",
        first_line: int = 1,
        on_overlong: Callable[[int], None] | None = None,
        **options: Any,
    ) -> list[list[Translation]]:
        """Translate text, with the graph's tokenizer if it has one, otherwise with this process's."""
        from mlx_transformer.generation.translate import as_lines, join  # lazy: it loads the tokenizer

        lines = as_lines(lines)
        if not self.takes_text:
            return super()._n_best(lines, overlong=overlong, first_line=first_line, on_overlong=on_overlong, **options)
        if options.pop("aligned", False):
            raise UserError(f"{self.path}: gives text without alignments: export it without text")
        options.pop("scored", None)
        prefix, options = options.pop(TASK_PREFIX, None), with_languages(self.generation, options, lines=lines)
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

    def complete(self, prompts: str | Sequence[str], *, stop: Sequence[str] = (), **options: Any) -> Any:
        """Continue prompts, by the graph's tokenizer if it has one, otherwise by this process's."""
        if not self.takes_text:
            return super().complete(prompts, stop=stop, **options)
        from mlx_transformer.generation.stream import check_stop, until
        from mlx_transformer.generation.translate import as_lines

        self._decoders("generate")
        if options.pop("control_tokens", False):
            raise UserError(f"{self.path}: continues no prompts of control tokens: export it without text")
        check_stop(stop)
        check_single(options, "complete", "search")
        lines = as_lines(prompts)
        if any("\0" in line for line in lines):
            raise UserError("a prompt holds a NUL character, at which a string of ONNX Runtime ends")
        best = self.translated(lines, [*range(1, len(lines) + 1)], **options)
        texts = ["".join(until([each[0].text], stop)) for each in best]
        return texts[0] if isinstance(prompts, str) else texts

    def completions(self, prompts: Sequence[str], **options: Any) -> list[dict[str, Any]]:
        if not self.takes_text:
            return super().completions(prompts, **options)
        if options.pop("scored", False) or options.pop("likeliest", 0):
            raise UserError(f"{self.path}: takes text, and shows no tokens: export it without text")
        return [{"text": text, "finish_reason": None} for text in self.complete(prompts, **options)]

    def check_chat(self) -> ChatTemplates:
        if self.takes_text:
            raise UserError(f"{self.path}: takes text, in which a template's tokens are text: export it without text")
        return super().check_chat()

    def stream_chat(
        self,
        messages: Messages,
        *,
        stop: Sequence[str] = (),
        on_limit: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Yield the whole answer of `chat` at once: the file gives no output before its search ends."""
        answer, limit = self._answer(messages, stop, {**options})
        yield answer
        if on_limit is not None and limit is not None:
            on_limit(limit)

    def log_probabilities(self, ids: Ids, targets: Ids, **options: Any) -> list[np.ndarray]:
        raise UserError(f"{self.path}: the search is in the file, which gives no log-probabilities: export a folder")

    def token_logits(self, ids: list[list[int]], **others: Any) -> Any:
        return self.log_probabilities(ids, [])

    def _streamed(self, begin: Callable[[Model], Iterator[Any]]) -> Iterator[Any]:
        raise UserError(
            "{}: the search is in the file, which gives only whole lines: leave out {stream}", self.path, stream=True
        )

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        from mlx_transformer.text.tokenizer import Tokenizer

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
        """The translator of a file that takes ids. Raises UserError if the file has no tokenizer."""
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
        """Cut lines into pieces short enough for a graph with a tokenizer; return each piece's line index, and the
        pieces.

        task_prefix: put before each line, e.g. "translate English to German: "; None: the model's own.
        """
        from mlx_transformer.generation.translate import as_lines
        from mlx_transformer.text.tokenizer import unicode_texts

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
        """Translate the results of `pieces`.

        numbers: their line numbers, for messages. share: for a server's batches.
        """
        from mlx_transformer.generation.translate import Translation

        around, chosen = chosen_options(self.generation, options)
        typed = [n for n, line in zip(numbers, lines, strict=True) if typed_language(self.generation, line)]
        if around.before and typed:
            raise UserError(f"line {typed[0]}: names its language, and target_language is given too: leave one out")
        check_options(chosen, self.config)
        sizes = np.array([len(line.encode()) for line in lines], int)  # bytes, a bound on the tokens
        limits = sizes + EXTRA_TOKENS
        most = min(int(limits.max(initial=0)), self.config.max_positions)
        check_fits(self.config, chosen.beam, 0, chosen.max_new_tokens or most)
        texts, places = np.array(lines, object), share.places(len(lines))
        inputs = {**inputs_of(vars(chosen)), "max_new_tokens": np.array([chosen.max_new_tokens or 0])}
        inputs |= {name: np.array(ids, np.int64) for name, ids in zip(TEXT_SETTINGS, around[:2], strict=True)}
        inputs |= {"prefix": padded([]), "candidates": padded([])}

        def search_on(index: np.ndarray) -> tuple[np.ndarray, list[list[Translation]]]:
            values = {**inputs, "text": texts[index], "rows": places[index]}
            outputs = zip(*self._outputs(["translations", "scores"], values, share.stopped), strict=True)
            return index, [
                [Translation(text, float(score)) for text, score in zip(*row, strict=True) if not score <= DEAD]
                for row in outputs
            ]

        indices = batches(sizes, expected_tokens(sizes, limits, chosen), limits, chosen)
        return in_order(map(search_on, indices), len(lines), done, lambda i: f"line {numbers[i]}")

    def hypotheses(
        self, batch: Batch, inputs: dict[str, np.ndarray], stopped: Callable[[], bool], attention: bool = False
    ) -> list[list[Hypothesis]]:
        """Search one batch of ids in one run of the graph. inputs: the options, from `inputs_of`."""
        source, mask = batch.sources.padded(SOURCE_MULTIPLE, self.config.max_positions)
        values = {**inputs, **source, "source_mask": mask, "rows": batch.places, "max_new_tokens": batch.limits}
        values |= {"prefix": padded(batch.prefix), "candidates": padded(batch.candidates or [], 1)}
        names = ["sequences", "lengths", "scores", *(["attention"] if attention else [])]
        tensors = self._outputs(names, values, stopped)
        results = []
        for row, *sentence in zip(batch.sources, *tensors, strict=True):
            weights = [x[:, : len(row)] for x in sentence[3]] if attention else [None] * len(sentence[0])
            results.append(
                [
                    Hypothesis(ids[:length].tolist(), float(score), attention=None if x is None else x[:length])
                    for ids, length, score, x in zip(*sentence[:3], weights, strict=True)
                    if not score <= DEAD  # NaN passes, and is reported later
                ]
            )
        return results

    def _outputs(self, outputs: list[str], values: dict[str, np.ndarray], stopped: Callable[[], bool]) -> list[Any]:
        names = [self.ports.output_names[value] for value in outputs]
        feeds = {name: values[value] for value, name in self.ports.input_names.items()}
        try:
            if stopped is never:  # the run needs no watching thread
                return list(self.session.run(names, feeds))
            return self.session.run_until(stopped, names, feeds)
        except UserError as error:
            raise UserError(f"{error}; a sentence may be too long for it") from None


class WholeSearch(Model):
    """A `SearchModel` as a model for `decoding.search`, which hands it whole batches."""

    def __init__(self, file: SearchModel, attention: bool):
        self.file, self.config, self.attention = file, file.config, attention

    def start(self, sources: Sources) -> tuple[Decoder, Any]:
        raise NotImplementedError("the steps are inside the graph")

    def batch_search(self, options: Options, stopped: Callable[[], bool]) -> Callable[[Batch], list[list[Hypothesis]]]:
        inputs = inputs_of(vars(options))
        return lambda batch: self.file.hypotheses(batch, inputs, stopped, self.attention)


def padded(rows: Sequence[np.ndarray], least: int = 0) -> np.ndarray:
    """Pad rows of token ids with -1 to (B, P), with P at least `least`; (1, `least`) for no rows."""
    width = max(least, *map(len, rows)) if rows else 0
    array = np.full((max(1, len(rows)), width), -1, np.int64)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


def open_file(
    path: str | Path,
    *,
    threads: int | None = None,
    providers: Sequence[str] | None = None,
    verify: bool = True,
) -> SearchModel | VectorModel:
    """Open a file of either kind, a translator's or an encoder's; arguments as for `SearchModel`."""
    file = OneFile.open(path, threads, providers, verify)
    if VECTOR in file.metadata:
        from .vector_model import VectorModel  # lazy: imports the tokenizer, 7 MB

        return VectorModel(file.path, file.session, file.metadata, file.config, passes_of(threads, providers))
    return SearchModel(path, threads=threads, providers=providers, file=file)
