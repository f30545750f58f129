"""The quality gate: what a lower precision changes in translations, before anybody gets the package.

On text that is given (`Text`), or on held-out phrases where the model's run says that it was trained on the built-in
corpus, the package is compared with the same model in float32:

    agreement       share of the positions, teacher-forced on float32's translations, with the same best token
    same            share of the sentences with the same greedy translation to the letter
    neighbours      of vectors of texts in place of the first: share of each text's ten nearest that stay among them;
                    of an encoder that doesn't say how they are made, the mean of its last layer
    bleu, exact     of both against the references, if there are some: sacreBLEU and exact match in percent

Rounding moves some tokens in any model; the limits bound how much, and a package beyond them is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from export.precision.table import PRECISIONS, Limits
from export.settings import PrecisionName
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.core.inputs import SOURCE_IDS, Sources
from mlx_transformer.data import built_in
from mlx_transformer.data.corpus import read_lines, read_parallel
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.progress import Progress, no_progress

if TYPE_CHECKING:
    from export.runtime import OnnxTransformer
    from mlx_transformer.text.tokenizer import Tokenizer

PHRASES = 200
NEIGHBOURS = 10
BATCH = 32
CHOOSING = ("vocabulary", "token-classes")
"""Kinds of heads of an encoder that choose something at each token; of others the vectors are compared."""


LIMITS: dict[str, Limits] = {name: row.limits for name, row in PRECISIONS.items() if row.limits is not None}


@dataclass(frozen=True)
class Text:
    """Sentences to translate, their references if there are any, and where they come from."""

    source: list[str]
    reference: list[str] | None
    origin: str


@dataclass(frozen=True)
class Quality:
    """The scores of one precision on a text. BLEU and exact match are percentages; None without references."""

    precision: str
    text: str
    sentences: int
    agreement: float
    same: float
    bleu: float | None = None
    bleu_float32: float | None = None
    exact: float | None = None
    exact_float32: float | None = None
    neighbours: bool | None = None
    """Whether `agreement` is of each text's nearest neighbours, and `same` of texts that keep all of them."""

    @property
    def _counted(self) -> str:
        return "ten nearest neighbours" if self.neighbours else "best tokens"

    @property
    def problems(self) -> list[str]:
        """The scores beyond the limits, in words."""
        limits, problems = LIMITS[self.precision], []
        if self.agreement < limits.agreement:
            problems.append(
                f"{self.agreement:.1%} of the {self._counted} are float32's, the limit is {limits.agreement:.0%}"
            )
        for (name, got, wide), points in zip(self._scores(), (limits.bleu, limits.exact), strict=False):
            limit = points * (1000 / self.sentences) ** 0.5
            if wide - got > limit:
                problems.append(f"{name} falls from {wide:.2f} to {got:.2f}, the limit is {limit:.2f} points")
        return problems

    def _scores(self) -> list[tuple[str, float, float]]:
        """Return (name, here, in float32)."""
        pairs = (("BLEU", self.bleu, self.bleu_float32), ("exact match", self.exact, self.exact_float32))
        return [(name, got, wide) for name, got, wide in pairs if got is not None and wide is not None]

    def __str__(self) -> str:
        parts = [f"{self.agreement:.2%} of the {self._counted} and {self.same:.1%} of the sentences as in float32"]
        parts += [f"{name} {got:.2f} ({got - wide:+.2f})" for name, got, wide in self._scores()]
        return f"{self.precision}: {', '.join(parts)}; {self.sentences} sentences of {self.text}"

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "precision" and value is not None}


def gate_text(
    checkpoint: Checkpoint,
    judged: Sequence[str],
    source: str | Path | None,
    reference: str | Path | None,
    log: Callable[[str], None] = lambda _: None,
    vectors: bool = False,
) -> Text | None:
    """Return the text to judge the precisions `judged` on: the files given, or the built-in corpus's held-out phrases
    if the run around the checkpoint was trained on it; None if there is neither, or nothing to judge: `log` is called
    with a line on what that leaves undone. `vectors`: the encoder will read vectors, not text.

    Raises `UserError` for files that can't be read, and for a model that can't translate them.
    """
    if not judged:
        if source is not None or reference is not None:
            log(f"{source or reference}: nothing to judge on it; judged are {', '.join(LIMITS)}")
        return None
    if vectors:
        if source is not None or reference is not None:
            raise UserError(
                "{}: with {inputs_embeds} the encoder reads vectors: none of it is judged", source or reference
            )
        for precision in judged:
            log(f"{precision}: not judged: with inputs_embeds the encoder reads vectors, not text")
        return None
    readable = checkpoint.tokenizer_path is not None
    translates = checkpoint.config.architecture == "encoder-decoder" and readable
    embeds = checkpoint.config.architecture == "encoder" and readable
    if (source is not None or reference is not None) and not translates and not embeds:
        raise UserError(
            f"{checkpoint.folder}: the quality gate translates: it needs an encoder-decoder with its tokenizer, or for"
            " vectors of texts an encoder with its own"
        )
    if reference is not None and embeds:
        raise UserError("{}: vectors of texts have no reference: give the texts alone, as {gate_source}", reference)
    if source is not None and reference is not None:
        text = read_parallel(source, reference)
        return Text(list(text.source), list(text.target), str(source))
    if source is not None:
        lines = [line for line in read_lines(source) if line.strip()]
        if not lines or (embeds and len(lines) == 1):  # one text has no neighbours
            least = "two lines or more" if embeds else "lines"
            raise UserError(f"{source}: the quality gate compares texts: give {least} that aren't blank")
        return Text(lines, None, str(source))
    if reference is not None:
        raise UserError("a reference for the quality gate needs its source")
    drawn = _corpus(checkpoint.folder.parent / "run.json")
    if drawn is None or not translates:
        for precision in judged:
            log(f"{precision}: not judged{_instead(checkpoint, translates or embeds)}")
        return None
    held_out = built_in.build(*drawn).held_out.select(list(range(PHRASES)))  # all kinds take turns
    return Text(list(held_out.source), list(held_out.target), f"{drawn[0]}, held out")


def _instead(checkpoint: Checkpoint, readable: bool) -> str:
    """Return how a model that isn't judged could be, in the words that follow."""
    config = checkpoint.config
    if config.architecture == "decoder":
        return (
            ": compare the perplexity of a text by `mlx-transformer evaluate`, of the checkpoint and of what is written"
        )
    if not readable:
        return ": the model has no tokenizer, and the quality gate compares texts"
    what = "its translations" if config.architecture == "encoder-decoder" else "the neighbours of its vectors"
    if config.architecture == "encoder" and config.head.kind in CHOOSING:
        what = "its best tokens" if config.head.kind == "vocabulary" else "its labels"
    return f"; --gate-source FILE would compare {what} with float32's"


def _corpus(file: Path) -> tuple[str, int, int] | None:
    """Return the corpus of a run's record as `built_in.build` takes it; None for one that isn't built in (any more).

    With another seed, phrases that the run learned from would be held out.
    """
    try:
        recipe = read_json(file)["recipe"]
        corpus, count, seed = recipe["data"]["corpus"], recipe["data"]["train_pairs"], recipe["training"]["seed"]
    except (UserError, LookupError, TypeError):
        return None
    return (corpus, count, seed) if corpus in built_in.NAMES else None


def judge(
    folder: Path,
    plain: Path,
    precisions: Sequence[str],
    text: Text,
    watch: Progress = no_progress,
    provider: str | None = None,
) -> list[Quality]:
    """Compare a package's precisions with float32.

    `folder`: the package; `plain`: the same model as a portable package with float32 and these precisions, whose graphs
    show logits, which those of other targets don't. `watch` is called with the share that is done, and the precision.
    `provider`: the execution provider that runs the package, default the CPU's.
    """
    from export.runtime import OnnxTransformer

    def done(finished: int, name: str) -> Callable[[float], None]:
        return lambda share: watch((finished + share) / (1 + len(precisions)), name)

    expected = Expected(OnnxTransformer(plain), text, done(0, "float32"))
    qualities = []
    for finished, precision in enumerate(cast("Sequence[PrecisionName]", precisions), start=1):
        shows = OnnxTransformer(plain, precision=precision)
        runs = OnnxTransformer(folder, precision=precision, providers=None if provider is None else [provider])
        qualities.append(expected.quality(precision, shows, runs, done(finished, precision)))
    return qualities


class Expected:
    """The outputs of a model in float32 for a text, to which lower precisions are held: its translations and best
    tokens, of a model alone the best tokens of the text itself."""

    def __init__(self, wide: OnnxTransformer, text: Text, done: Callable[[float], None] = lambda share: None):
        tokenizer = wide.tokenizer
        assert tokenizer is not None
        self.config, self.text, self.tokenizer = wide.config, text, tokenizer
        chooses = wide.config.architecture != "encoder" or wide.config.head.kind in CHOOSING
        self.embeds = wide.text_embedding is not None or not chooses
        self.rows = rows_of(self.config, tokenizer, text.source)
        self.outputs = wide.generate(self.rows, done=done) if self._translates else [[] for _ in self.rows]
        self.best = self._best(wide)

    @property
    def _translates(self) -> bool:
        return self.config.architecture == "encoder-decoder"

    def agreement(self, narrow: OnnxTransformer) -> float:
        """Return the share of positions whose best token is the same in another precision."""
        return float(np.concatenate(self._equal(narrow)).mean())

    def quality(
        self,
        precision: str,
        shows: OnnxTransformer,
        runs: OnnxTransformer,
        done: Callable[[float], None] = lambda share: None,
    ) -> Quality:
        """Compare one precision. `shows`: its graphs that show logits; `runs`: those of the package."""
        scores: dict[str, Any] = {"neighbours": True} if self.embeds else {}
        equal = self._equal(shows)
        if self._translates:
            got = runs.generate(self.rows, done=done)
            same = sum(a == b for a, b in zip(got, self.outputs, strict=True)) / len(self.rows)
            decoded = self.tokenizer.decode_batch
            scores = _scores(decoded(got), decoded(self.outputs), self.text.reference)
        else:
            same = sum(bool(each.all()) for each in equal) / len(self.rows)
        agreement = float(np.concatenate(equal).mean())
        return Quality(precision, self.text.origin, len(self.rows), agreement, same, **scores)

    def _equal(self, narrow: OnnxTransformer) -> list[Any]:
        both = zip(self.best, self._best(narrow), strict=True)
        return [np.isin(a, b) if self.embeds else a == b for a, b in both]

    def _best(self, model: OnnxTransformer) -> list[Any]:
        """Return what is compared for each row: its best tokens, or which rows are nearest to it."""
        if self.embeds:
            how = {} if model.text_embedding is not None else {"pooling": "mean"}
            return nearest(model.embed(self.text.source, **how))
        return _best_tokens(model, self.rows, self.outputs)


def nearest(vectors: np.ndarray, count: int = NEIGHBOURS) -> list[np.ndarray]:
    """Return for each vector (N, W) the numbers of the others to which it has the smallest angles."""
    if len(vectors) < 2:
        raise UserError("neighbours are compared of at least two texts: give more of them")
    x = vectors.astype(np.float64)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    ranks = []
    for i, row in enumerate(x):
        near = x @ row
        near[i] = -np.inf
        ranks.append(np.argsort(-near, kind="stable")[: min(count, len(x) - 1)])
    return ranks


def shared_neighbours(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> float:
    """Return the share of each vector's neighbours that are still among them."""
    return float(np.concatenate([np.isin(*pair) for pair in zip(before, after, strict=True)]).mean())


def rows_of(config: TransformerConfig, tokenizer: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    """Return each line as its model reads it, without what is longer than it takes."""
    if config.architecture == "decoder":
        rows = [[config.bos_id, *ids[:-1]] for ids in tokenizer.encode_batch(lines)]
    else:
        rows = tokenizer.source.encode_batch(lines)
    return [row[: config.max_positions] for row in rows]


def record(folder: Path, qualities: Sequence[Quality], layers: Mapping[str, Any] | None = None) -> None:
    """Write each quality into a package's mlx_transformer.json, beside its precision's suffix, and what int8 does in
    each layer."""
    values = read_json(folder / ONNX_CONFIG)
    for quality in qualities:
        values["precisions"][quality.precision]["quality"] = quality.to_dict()
    if layers is not None:
        values["precisions"]["int8"]["layers"] = layers
    (folder / ONNX_CONFIG).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def recorded(folder: Path) -> list[Quality]:
    """Return the qualities that `record` wrote into a package."""
    precisions = read_json(folder / ONNX_CONFIG)["precisions"]
    return [Quality(name, **entry["quality"]) for name, entry in precisions.items() if "quality" in entry]


def _best_tokens(model: OnnxTransformer, rows: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[Any]:
    """Return for each row the best token after the start token and after each further one of its output; of a model
    alone the best at each place of the row."""
    config = model.config
    tokens: list[Any] = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for begin in range(0, len(order), BATCH):
        chosen = order[begin : begin + BATCH]
        ids, mask = _padded([rows[i] for i in chosen], config, left=config.architecture == "decoder")
        if config.architecture != "encoder-decoder":
            best = model.logits(ids, mask).argmax(axis=-1)
            for i, row, real in zip(chosen, best, mask, strict=True):
                tokens[i] = row[real == 1]
            continue
        target, _ = _padded([[config.bos_id, *outputs[i]][: config.max_positions] for i in chosen], config)
        best = model.decode(target, model.encode(ids, mask), mask).argmax(axis=-1)
        for i, row in zip(chosen, best, strict=True):
            tokens[i] = row[: len(outputs[i]) + 1]
    return tokens


def _padded(
    rows: Sequence[Sequence[int]], config: TransformerConfig, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids (B, L), padded on one side, and their mask."""
    sources = Sources(config, {SOURCE_IDS.name: [np.asarray(row, np.int64) for row in rows]})
    arrays, mask = sources.padded(left=left)
    return arrays[SOURCE_IDS.name], mask


def _scores(got: list[str], expected: list[str], reference: list[str] | None) -> dict[str, float]:
    if reference is None:
        return {}
    from mlx_transformer.generation.evaluate import score

    narrow, wide = score(got, reference), score(expected, reference)
    return {
        "bleu": narrow["bleu"],
        "bleu_float32": wide["bleu"],
        "exact": narrow["exact_match"],
        "exact_float32": wide["exact_match"],
    }
