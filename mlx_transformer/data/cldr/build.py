"""Draws the corpus: so many different phrases of each kind, and three sets of them with nothing in common."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mlx_transformer.core.outputs import claim
from mlx_transformer.data.corpus import TEXT, ParallelText, write_lines
from mlx_transformer.system.durable import Output
from mlx_transformer.system.errors import UserError

from . import measures, names, numbers, times
from .locales import Draw, Pair, Phrase, parse_corpus

# How often a kind comes in training. Names have hundreds of entries to learn by heart, numbers a few rules.
DEFAULT_KIND_WEIGHTS = {
    "date": 1.0,
    "time": 0.7,
    "interval": 1.0,
    "relative": 0.7,
    "number": 0.8,
    "unit": 1.5,
    "currency": 1.5,
    "list": 0.8,
    "territory": 1.7,
    "language": 2.8,
}
KINDS = tuple(DEFAULT_KIND_WEIGHTS)
NAME_SHARE = 3  # each name of a kind stands alone once in training, in at most a third of the kind's phrases
MOST_MISSED_DRAWS = 300  # draws without a new phrase after which a kind counts as exhausted


@dataclass(frozen=True)
class CldrCorpus:
    """`train`, `valid` and `held_out` share no source and no target; each has its `kinds`."""

    name: str
    source_name: str
    target_name: str
    train: ParallelText
    valid: ParallelText
    held_out: ParallelText


class _Pool:
    """Different phrases by kind, in the order in which they were drawn; a source has one target."""

    def __init__(self):
        self.kind_of: dict[Phrase, str] = {}
        self.count: Counter[str] = Counter()
        self._target_of: dict[str, str] = {}
        self._ambiguous: set[str] = set()

    def add(self, kind: str, phrase: Phrase | None) -> bool:
        """Add a phrase if it is new and usable, and say whether it was."""
        if phrase is None or phrase in self.kind_of or any("\n" in side or not side.strip() for side in phrase):
            return False
        if self._target_of.setdefault(phrase[0], phrase[1]) != phrase[1]:
            self._ambiguous.add(phrase[0])
            return False
        self.kind_of[phrase] = kind
        self.count[kind] += 1
        return True

    def phrases(self) -> list[Phrase]:
        """Return all phrases except those whose source was drawn with a second target."""
        return [phrase for phrase in self.kind_of if phrase[0] not in self._ambiguous]


def build(
    corpus_name: str = "cldr:en-de",
    train_pairs: int = 60_000,
    held_out_per_kind: int = 100,
    valid_per_kind: int = 50,
    seed: int = 1,
    kind_weights: dict[str, float] | None = None,
) -> CldrCorpus:
    """Build a corpus, named "cldr:en-de" for any two of babel's locales: `train_pairs` phrases to train on, and
    `held_out_per_kind` and `valid_per_kind` of each kind beside them, the kinds taking turns.

    One value is rendered in both locales, so the target is the exact reference. Every name of a territory or a
    language in a held-out phrase also stands alone in training. `kind_weights` replaces single weights of
    DEFAULT_KIND_WEIGHTS for training; weight 0 leaves a kind out everywhere. The same arguments and babel version
    give the same bytes on every platform.
    Raises UserError for an unknown locale, weights or numbers that make no sense, and more pairs than there are.
    """
    pair = parse_corpus(corpus_name)
    corpus_name = f"cldr:{pair.source_name}-{pair.target_name}"
    least_of = {"train_pairs": 1, "held_out_per_kind": 1, "valid_per_kind": 0}
    for (name, least), value in zip(least_of.items(), (train_pairs, held_out_per_kind, valid_per_kind), strict=True):
        if value < least:
            raise UserError(f"{name} is {value}; it must be at least {least}")
    quotas = _shares(train_pairs, _weights(kind_weights))
    used = _choose_names(pair, quotas, seed)
    draws = _draws(pair, used)
    pool = _Pool()
    for kind, phrases in (("territory", used.territories), ("language", used.languages)):
        for phrase in phrases:
            pool.add(kind, phrase)
    name_phrases = set(pool.kind_of)

    randoms = {kind: Random(f"{seed}:{kind}") for kind in quotas}
    sizes = {"valid": valid_per_kind, "held-out": held_out_per_kind}
    needed = {kind: quota + valid_per_kind + held_out_per_kind for kind, quota in quotas.items()}
    while True:
        for kind in quotas:
            missed = 0
            while pool.count[kind] < needed[kind] and missed < MOST_MISSED_DRAWS:
                missed = 0 if pool.add(kind, draws[kind](randoms[kind])) else missed + 1
        train, valid, held_out = _divide(pool, name_phrases, list(quotas), sizes, seed, corpus_name)
        missing = train_pairs - len(train)
        if missing <= 0:
            break
        # Kinds that are exhausted, and phrases that proved ambiguous, are made up for by the others.
        plentiful = {kind: quotas[kind] for kind in quotas if pool.count[kind] >= needed[kind]}
        if not plentiful:
            raise UserError(f"corpus {corpus_name}: only {len(train)} different training pairs exist; ask for fewer")
        for kind, more in _shares(missing, plentiful).items():
            needed[kind] = pool.count[kind] + more
    Random(f"{seed}:order").shuffle(train)
    sets = [
        ParallelText([s for s, _ in phrases], [t for _, t in phrases], [pool.kind_of[phrase] for phrase in phrases])
        for phrases in (train, valid, held_out)
    ]
    return CldrCorpus(corpus_name, pair.source_name, pair.target_name, *sets)


def write(corpus: CldrCorpus, folder: str | Path, force: bool = False) -> list[Path]:
    """Write `train`, `valid` and `heldout`, each as train.SRC, train.TGT and train.kinds; returns the paths. `force`
    replaces earlier ones."""
    folder, outputs = Path(folder), list[tuple[Output, list[str]]]()
    for name, text in (("train", corpus.train), ("valid", corpus.valid), ("heldout", corpus.held_out)):
        ends = ((corpus.source_name, text.source), (corpus.target_name, text.target), ("kinds", text.kinds or []))
        for end, lines in ends:
            outputs.append((claim(folder / f"{name}.{end}", TEXT, force), lines))
    for output, lines in outputs:
        write_lines(output, lines)
    return [output.path for output, _ in outputs]


def _draws(pair: Pair, used: names.Names) -> dict[str, Draw]:
    """Return {kind: the function that draws a phrase of it}."""
    return {
        "date": times.dates(pair),
        "time": times.times(pair),
        "interval": times.intervals(pair),
        "relative": measures.spans(pair),
        "number": numbers.numbers(pair),
        "unit": measures.measures(pair),
        "currency": numbers.money(pair),
        "list": names.lists(pair),
        "territory": names.territories(pair, used),
        "language": names.languages(pair, used),
    }


def _weights(changes: dict[str, float] | None) -> dict[str, float]:
    """Return the default weights with `changes`, without the kinds of weight 0."""
    unknown = sorted(set(changes or ()) - set(KINDS))
    if unknown:
        raise UserError(f"kind_weights: no kind {', '.join(map(repr, unknown))}; there are {', '.join(KINDS)}")
    weights = DEFAULT_KIND_WEIGHTS | (changes or {})
    wrong = [f"{kind} {weight}" for kind, weight in weights.items() if not 0 <= weight < float("inf")]
    if wrong or not any(weights.values()):
        raise UserError(f"kind_weights: {', '.join(wrong) or 'all are 0'}; give numbers from 0 up, not all 0")
    return {kind: weight for kind, weight in weights.items() if weight}


def _shares(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Divide `total` by weight into whole numbers (the largest remainders are rounded up)."""
    exact = {kind: total * weight / sum(weights.values()) for kind, weight in weights.items()}
    shares = {kind: int(value) for kind, value in exact.items()}
    for kind in sorted(exact, key=lambda kind: shares[kind] - exact[kind])[: total - sum(shares.values())]:
        shares[kind] += 1
    return shares


def _choose_names(pair: Pair, quotas: dict[str, int], seed: int) -> names.Names:
    """Choose as many names as can stand alone in training and still be met in other phrases."""
    every = names.all_names(pair)

    def some(kind: str, phrases: list[Phrase]) -> list[Phrase]:
        if len(phrases) < 10 and kind in quotas:
            raise UserError(
                f"corpus cldr:{pair.source_name}-{pair.target_name}: both locales name only {len(phrases)} of kind "
                f"{kind}, at least 10 are needed; take other locales or give {kind} the weight 0"
            )
        count = min(len(phrases), quotas.get(kind, 0) // NAME_SHARE)
        return Random(f"{seed}:names:{kind}").sample(phrases, count)

    return names.Names(some("territory", every.territories), some("language", every.languages))


def _divide(
    pool: _Pool, name_phrases: set[Phrase], kinds: list[str], sizes: dict[str, int], seed: int, corpus: str
) -> tuple[list[Phrase], list[Phrase], list[Phrase]]:
    """Return train, valid and held-out phrases, the last two with as many of each kind, kinds taking turns.

    A phrase may be set aside when no other has its target, and when it isn't a name alone.
    """
    phrases = pool.phrases()
    targets = Counter(target for _, target in phrases)
    candidates: dict[str, list[Phrase]] = {kind: [] for kind in kinds}
    for phrase in phrases:
        if targets[phrase[1]] == 1 and phrase not in name_phrases:
            candidates[pool.kind_of[phrase]].append(phrase)
    total = sum(sizes.values())
    for kind, phrases_of_kind in candidates.items():
        if len(phrases_of_kind) < total:
            raise UserError(
                f"corpus {corpus}: kind {kind} has {len(phrases_of_kind)} different phrases to set aside, "
                f"{total} are needed; ask for fewer or give {kind} the weight 0"
            )
        Random(f"{seed}:aside:{kind}").shuffle(phrases_of_kind)
    turns = [candidates[kind][turn] for turn in range(total) for kind in kinds]
    valid, held_out = turns[: sizes["valid"] * len(kinds)], turns[sizes["valid"] * len(kinds) :]
    set_aside = set(turns)
    return [phrase for phrase in phrases if phrase not in set_aside], valid, held_out
