"""The quality gate: compare lower precisions with float32 before anybody gets the package.

The text is given (`Text`), or consists of held-out phrases if the model's run was trained on the built-in corpus.
Scores:

    agreement       share of positions with the same best token, teacher-forced on float32's translations
    same            share of sentences with exactly the same greedy translation
    neighbours      for text vectors, in place of agreement: share of each text's ten nearest still among them;
                    without pooling settings in the folder, vectors are the mean of the last layer
    kl, perplexity  for a decoder: mean divergence from float32's probabilities in nats, and perplexity, for both
    bleu, exact     sacreBLEU and exact match in percent, for both precisions, if there are references

Rounding moves some tokens in any model. The limits bound how many, and a decoder's divergence, since its best tokens
change where several are as good; a package beyond them is refused.
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
from mlx_transformer.generation.likelihood import divergence
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
"""Encoder heads that choose something at each token, e.g. a word or a label. For other heads vectors are compared."""


LIMITS: dict[str, Limits] = {name: row.limits for name, row in PRECISIONS.items() if row.limits is not None}


@dataclass(frozen=True)
class Text:
    """Sentences to translate, their references if there are any, and a name for their source."""

    source: list[str]
    reference: list[str] | None
    origin: str


@dataclass(frozen=True)
class Quality:
    """The scores of a precision on a text. BLEU and exact match are percentages, None without references."""

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
    """If true, `agreement` counts nearest neighbours, and `same` counts texts with all of them kept."""
    kl: float | None = None
    perplexity: float | None = None
    perplexity_float32: float | None = None

    @property
    def _counted(self) -> str:
        return "ten nearest neighbours" if self.neighbours else "best tokens"

    @property
    def problems(self) -> list[str]:
        """Messages for the scores beyond the limits."""
        limits, problems = LIMITS[self.precision], []
        if self.kl is not None:
            beyond = self.kl > limits.kl
            return [f"{self._divergence}, the limit is {limits.kl}"] if beyond else []
        if self.agreement < limits.agreement:
            problems.append(
                f"{self.agreement:.1%} of the {self._counted} are float32's, the limit is {limits.agreement:.0%}"
            )
        for (name, got, wide), points in zip(self._scores(), (limits.bleu, limits.exact), strict=False):
            limit = points * (1000 / self.sentences) ** 0.5
            if wide - got > limit:
                problems.append(f"{name} falls from {wide:.2f} to {got:.2f}, the limit is {limit:.2f} points")
        return problems

    @property
    def _divergence(self) -> str:
        return f"KL {self.kl:.4f} from float32, perplexity {self.perplexity:.2f} ({self.perplexity_float32:.2f})"

    def _scores(self) -> list[tuple[str, float, float]]:
        """(name, in this precision, in float32) of the scores against references."""
        pairs = (("BLEU", self.bleu, self.bleu_float32), ("exact match", self.exact, self.exact_float32))
        return [(name, got, wide) for name, got, wide in pairs if got is not None and wide is not None]

    def __str__(self) -> str:
        parts = [f"{self.agreement:.2%} of the {self._counted} and {self.same:.1%} of the sentences as in float32"]
        parts += [] if self.kl is None else [self._divergence]
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
    """Choose the text on which the precisions `judged` are compared with float32.

    It is the files `source` and `reference`, otherwise held-out phrases of the built-in corpus if the checkpoint's run
    was trained on it. None if there is neither, or nothing to judge; then `log` gets a line for each unjudged
    precision. vectors: the encoder reads vectors, not text. Raises UserError for unreadable files, and if the model
    can't use them.
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
    embeds = checkpoint.config.architecture == "encoder"
    if (source is not None or reference is not None) and not readable:
        raise UserError(f"{checkpoint.folder}: has no tokenizer, and the quality gate compares texts")
    if reference is not None and not translates:
        raise UserError("{}: only translations have a reference: give the texts alone, as {gate_source}", reference)
    if source is not None and reference is not None:
        text = read_parallel(source, reference)
        return Text(list(text.source), list(text.target), str(source))
    if source is not None:
        lines = [line for line in read_lines(source) if line.strip()]
        if not lines or (embeds and len(lines) == 1):  # a single text has no neighbours
            least = "two lines or more" if embeds else "lines"
            raise UserError(f"{source}: the quality gate compares texts: give {least} that aren't blank")
        return Text(lines, None, str(source))
    if reference is not None:
        raise UserError("a reference for the quality gate needs its source")
    drawn = _corpus(checkpoint.folder.parent / "run.json")
    if drawn is None or not translates:
        for precision in judged:
            log(f"{precision}: not judged{_instead(checkpoint, readable)}")
        return None
    held_out = built_in.build(*drawn).held_out.select(list(range(PHRASES)))  # the phrases' kinds take turns
    return Text(list(held_out.source), list(held_out.target), f"{drawn[0]}, held out")


def _instead(checkpoint: Checkpoint, readable: bool) -> str:
    """The rest of a "not judged" message: how this model could be judged."""
    config = checkpoint.config
    if not readable:
        return ": the model has no tokenizer, and the quality gate compares texts"
    kinds = {"encoder-decoder": "its translations", "decoder": "its probabilities"}
    what = kinds.get(config.architecture, "the neighbours of its vectors")
    if config.architecture == "encoder" and config.head.kind in CHOOSING:
        what = "its best tokens" if config.head.kind == "vocabulary" else "its labels"
    return f"; --gate-source FILE would compare {what} with float32's"


def _corpus(file: Path) -> tuple[str, int, int] | None:
    """The corpus of a run's record as arguments of `built_in.build`; None if it isn't a built-in corpus.

    The seed matters: with another seed, phrases from the run's training would count as held out.
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

    folder: the package. plain: the same model as a portable package with float32 and these precisions; its graphs
    return logits, which other targets' graphs may not. watch: called with the share done and the precision. provider:
    the execution provider that runs `folder`; None: the CPU.
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
    """A float32 model's outputs on a text, the yardstick for lower precisions.

    An encoder-decoder gives its translations and best tokens; other models the best tokens of the text, or its nearest
    neighbours.
    """

    def __init__(self, wide: OnnxTransformer, text: Text, done: Callable[[float], None] = lambda share: None):
        tokenizer = wide.tokenizer
        assert tokenizer is not None
        self.wide = wide
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
        """Share of positions with the same best token (or of neighbours kept) in another precision."""
        return float(np.concatenate(self._equal(narrow)).mean())

    def quality(
        self,
        precision: str,
        shows: OnnxTransformer,
        runs: OnnxTransformer,
        done: Callable[[float], None] = lambda share: None,
    ) -> Quality:
        """Compare a precision. shows: its graphs with logits as output; runs: the package's graphs."""
        if self.config.architecture == "decoder":
            return self._diverging(precision, shows, done)
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

    def _diverging(self, precision: str, shows: OnnxTransformer, done: Callable[[float], None]) -> Quality:
        texts = [(row[:-1], row[1:]) for row in self.rows if len(row) > 1]
        if not texts:
            raise UserError(f"{self.text.origin}: has no token that another precedes: give longer lines")

        def both(row: list[int]) -> tuple[np.ndarray, np.ndarray]:
            return self.wide.token_logits([row])[0], shows.token_logits([row])[0]

        lost = divergence(both, texts, done)
        counts = self.text.origin, lost.texts, lost.agreement, lost.same
        wide = lost.perplexity_wide
        return Quality(precision, *counts, kl=lost.kl, perplexity=lost.perplexity, perplexity_float32=wide)

    def _equal(self, narrow: OnnxTransformer) -> list[Any]:
        both = zip(self.best, self._best(narrow), strict=True)
        return [np.isin(a, b) if self.embeds else a == b for a, b in both]

    def _best(self, model: OnnxTransformer) -> list[Any]:
        """For each row its best tokens, or the indices of its nearest rows."""
        if self.embeds:
            how = {} if model.text_embedding is not None else {"pooling": "mean"}
            return nearest(model.embed(self.text.source, **how))
        return _best_tokens(model, self.rows, self.outputs)


def nearest(vectors: np.ndarray, count: int = NEIGHBOURS) -> list[np.ndarray]:
    """Return for each vector (N, W) the indices of its `count` nearest others by cosine, nearest first.

    Raises UserError for fewer than two vectors.
    """
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
    """Share of the neighbours `before` that are also among `after`."""
    return float(np.concatenate([np.isin(*pair) for pair in zip(before, after, strict=True)]).mean())


def rows_of(config: TransformerConfig, tokenizer: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    """Token ids of each line as the model reads it, cut at `max_positions`."""
    if config.architecture == "decoder":
        rows = tokenizer.prompts(lines)
    else:
        rows = tokenizer.source.encode_batch(lines)
    return [row[: config.max_positions] for row in rows]


def record(folder: Path, qualities: Sequence[Quality], layers: Mapping[str, Any] | None = None) -> None:
    """Write the qualities, and int8's effect per layer, into a package's mlx_transformer.json."""
    values = read_json(folder / ONNX_CONFIG)
    for quality in qualities:
        values["precisions"][quality.precision]["quality"] = quality.to_dict()
    if layers is not None:
        values["precisions"]["int8"]["layers"] = layers
    (folder / ONNX_CONFIG).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def recorded(folder: Path) -> list[Quality]:
    """Read back the qualities written by `record`."""
    precisions = read_json(folder / ONNX_CONFIG)["precisions"]
    return [Quality(name, **entry["quality"]) for name, entry in precisions.items() if "quality" in entry]


def _best_tokens(model: OnnxTransformer, rows: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[Any]:
    """Best token ids of each row.

    An encoder-decoder has a best token after the start token and after each token of `outputs`. Other models have a
    best token at each position of the row except padding.
    """
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
    """Ids and mask (B, L), padded on the right, or on the left."""
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
