"""The built-in corpora by name, e.g. `cldr:en-de`, `sentences:en-de`, or one language as plain text, `sentences:en`.

Those of `cldr` are phrases of Unicode CLDR, e.g. dates, times, numbers, units, currencies, lists and names of
territories and languages. The source determines the target, so exact match is a meaningful score.
tests/mlx_transformer/data/make_cldr.py wrote the files in `cldr_phrases`. They have rows of kind, source and target, in
three sets (training, validation, test) separated by an empty line.

Those of `sentences` are short English sentences and their German translations, which a small model learns in minutes.
There are eight patterns. Often a word's translation depends on another word far away:

killing     The lion kills the deer        who kills whom: cases
crossing    ... it was too tired, wide     the noun that "it" refers to: es, er, sie
banks       On the river bank              Ufer or Bank, by the word before; as a phrase and in a sentence
your cat    YOUR CAT IS A LOVELY CAT       the gender of a noun that comes later
sitting     The cat sat on the mat         who sat on whom: dative
defeating   The Avengers defeated Thanos   the number of the verb
food        My fried chicken was very good gender, adjectives
thinking    Thinking Machines

The English sentence determines the German one.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from random import Random

from mlx_transformer.system.errors import UserError

from .corpus import BuiltInCorpus
from .documents import Documents

LANGUAGES = {"sentences:en-de": (0, 1), "sentences:en": (0,), "sentences:de": (1,)}
"""The sides of each corpus: English (0) and German (1), or one of them."""
FOLDER, SUFFIX = Path(__file__).parent / "cldr_phrases", ".tsv.gz"
CLDR = tuple(sorted(f"cldr:{path.name.removesuffix(SUFFIX)}" for path in FOLDER.glob(f"*{SUFFIX}")))
NAMES = (*CLDR, *LANGUAGES)
HELD_OUT, VALID = 1000, 300
UNSEEN = "On the river bank"
"""A phrase of `NOTES` that is never trained on."""
NOTES = {
    "On the river bank": "Am Ufer des Flusses",
    "On the city bank": "In der Bank der Stadt",
    "On the bank": "In der Bank",
    "The animal didn't cross the street because it was too tired": (
        "Das Tier überquerte die Straße nicht, weil es zu müde war"
    ),
    "The animal didn't cross the street because it was too wide": (
        "Das Tier überquerte die Straße nicht, weil sie zu breit war"
    ),
    "YOUR CAT IS A LOVELY CAT": "DEINE KATZE IST EINE LIEBE KATZE",
    "Lion kills deer": "Löwe tötet Hirsch",
    "Deer kills lion": "Hirsch tötet Löwen",
    "The cat sat on the mat": "Die Katze saß auf der Matte",
    "The mat sat on the cat": "Die Matte saß auf der Katze",
    "The cat sat": "Die Katze saß",
    "The Avengers defeated Thanos": "Die Avengers besiegten Thanos",
    "Thanos defeated the Avengers": "Thanos besiegte die Avengers",
    "My fried chicken was very good": "Mein gebratenes Huhn war sehr gut",
    "Thinking Machines": "Denkende Maschinen",
}
"""Sentences with which the Transformer is often explained, and their translations."""

Phrase = tuple[str, str]


@dataclass(frozen=True)
class Noun:
    """A noun in both languages. gender: m, f or n; oblique: the German accusative and dative."""

    english: str
    gender: str
    german: str
    oblique: str


def _nouns(text: str) -> list[Noun]:
    """Parse "lion m Löwe Löwen; cat f Katze" into nouns."""
    split = [each.split() for each in text.split(";")]
    return [Noun(english, gender, german[0], german[-1]) for english, gender, *german in split]


def _words(text: str) -> list[list[str]]:
    """Split "tired müde; hungry hungrig" into [["tired", "müde"], ["hungry", "hungrig"]]."""
    return [each.split() for each in text.split(";")]


ANIMALS = _nouns(
    "animal n Tier; lion m Löwe Löwen; deer m Hirsch; cat f Katze; dog m Hund; bear m Bär Bären; mouse f Maus;"
    "horse n Pferd; sheep n Schaf; bird m Vogel; wolf m Wolf; rabbit n Kaninchen; cow f Kuh; goat f Ziege;"
    "chicken n Huhn; duck f Ente; pig n Schwein; fox m Fuchs"
)
PEOPLE = _nouns("man m Mann; woman f Frau; child n Kind; boy m Junge Jungen; girl n Mädchen")
THINGS = _nouns("mat f Matte; chair m Stuhl; table m Tisch; bed n Bett; roof n Dach; wall f Mauer; box f Kiste")
PLACES = _nouns(
    "street f Straße; river m Fluss; bridge f Brücke; field n Feld; path m Weg; lake m See; valley n Tal;"
    "desert f Wüste; forest m Wald; ice n Eis"
)
FOODS = _nouns(
    "chicken n Huhn; fish m Fisch; egg n Ei; rice m Reis; meat n Fleisch; sausage f Wurst; cheese m Käse;"
    "potato f Kartoffel; duck f Ente"
)
OWNERS = _words("My Mein; Your Dein; His Sein; Her Ihr; Our Unser; Their Ihr")
OF_ANIMALS = _words("tired müde; hungry hungrig; old alt; sick krank; slow langsam; lazy faul; weak schwach; shy scheu")
OF_PLACES = _words("wide breit; deep tief; long lang; dark dunkel; cold kalt; wet nass; steep steil; rough rau")
OF_FOOD = _words("good gut; hot heiß; cold kalt; salty salzig; bad schlecht; cheap billig; soft weich; dry trocken")
PREPARED = _words("fried gebraten; boiled gekocht; baked gebacken; fresh frisch; grilled gegrillt; smoked geräuchert")
PRAISE = _words("lovely lieb; young jung; clever klug; big gross; small klein; fast schnell; wild wild; pretty schön")
KILLS = _words("kills tötet; hunts jagt; sees sieht; hears hört; loves liebt; fears fürchtet")
SAT = _words("sat saß; slept schlief; lay lag; stood stand")
DEFEATED = _words("defeated besiegte; saw sah; feared fürchtete; called rief")
HEROES = ("Thanos", "Loki", "Thor", "Anna", "Peter", "Maria", "Robin", "Zorro")
CROWDS = _words(
    "Avengers Avengers; Romans Römer; Greeks Griechen; knights Ritter; pirates Piraten; giants Riesen; robots Roboter;"
    "Vikings Wikinger"
)
WATERS = _words(
    "river Flusses; lake Sees; canal Kanals; stream Baches; pond Teiches; sea Meeres; ocean Ozeans; fjord Fjords;"
    "gulf Golfs; marsh Moores; pool Beckens; moat Grabens"
)
TOWNS = _words(
    "city der Stadt; village des Dorfes; state des Staates; country des Landes; town der Gemeinde; port des Hafens;"
    "church der Kirche; company der Firma; district des Kreises; people des Volkes"
)
WHERE = (
    ("On", {"Ufer": "Am", "Bank": "In der"}),
    ("Near", {"Ufer": "Nahe dem", "Bank": "Nahe der"}),
    ("Behind", {"Ufer": "Hinter dem", "Bank": "Hinter der"}),
    ("From", {"Ufer": "Vom", "Bank": "Von der"}),
    ("To", {"Ufer": "Zum", "Bank": "Zur"}),
)
ALONE = tuple(f"{where} the " for where, _ in WHERE)
DOING = _words(
    "Thinking Denkende; Sleeping Schlafende; Singing Singende; Dancing Tanzende; Running Laufende; Flying Fliegende;"
    "Talking Sprechende; Working Arbeitende"
)
MANY = _words(
    "Machines Maschinen; Cats Katzen; Dogs Hunde; Birds Vögel; Children Kinder; Women Frauen; Men Männer; Lions Löwen;"
    "Bears Bären; Horses Pferde; Robots Roboter; Giants Riesen; Pirates Piraten; Wolves Wölfe"
)
SUBJECT = {"m": "der", "f": "die", "n": "das"}
OBJECT = {"m": "den", "f": "die", "n": "das"}
DATIVE = {"m": "dem", "f": "der", "n": "dem"}
PRONOUN = {"m": "er", "f": "sie", "n": "es"}
ENDING = {"m": "", "f": "e", "n": ""}
"""Endings of ein, mein, dein."""
STRONG = {"m": "er", "f": "e", "n": "es"}
"""Endings of an adjective after ein, mein, dein."""


def _killing() -> Iterator[Phrase]:
    for (a, b), (kills, german) in product(permutations(ANIMALS, 2), KILLS):
        yield f"{a.english.capitalize()} {kills} {b.english}", f"{a.german} {german} {b.oblique}"
        subject, object = SUBJECT[a.gender].capitalize(), OBJECT[b.gender]
        yield f"The {a.english} {kills} the {b.english}", f"{subject} {a.german} {german} {object} {b.oblique}"


def _crossing() -> Iterator[Phrase]:
    for a, place, (adjective, german) in product(ANIMALS, PLACES, OF_ANIMALS + OF_PLACES):
        meant = a if [adjective, german] in OF_ANIMALS else place
        crossed = f"{SUBJECT[a.gender].capitalize()} {a.german} überquerte {OBJECT[place.gender]} {place.german} nicht"
        yield (
            f"The {a.english} didn't cross the {place.english} because it was too {adjective}",
            f"{crossed}, weil {PRONOUN[meant.gender]} zu {german} war",
        )


def _banks() -> Iterator[Phrase]:
    places = [(f"the {of} bank", "Ufer", f" des {german}") for of, german in WATERS]
    places += [(f"the {of} bank", "Bank", f" {the} {german}") for of, the, german in TOWNS]
    places += [("the bank", "Bank", "")]
    for place, bank, whose in places:
        for where, german in WHERE:
            yield f"{where} {place}", f"{german[bank]} {bank}{whose}"
        on = f"{WHERE[0][1][bank].lower()} {bank}{whose}"
        for a, (sat, saß) in product(ANIMALS + PEOPLE, SAT):
            subject = f"{SUBJECT[a.gender].capitalize()} {a.german}"
            yield f"The {a.english} {sat} on {place}", f"{subject} {saß} {on}"


def _your_cat() -> Iterator[Phrase]:
    for a, (owner, german), (adjective, lieb) in product(ANIMALS + PEOPLE, OWNERS, PRAISE):
        ending, strong = ENDING[a.gender], STRONG[a.gender]
        praised = f"{german}{ending} {a.german} ist ein{ending} {lieb}{strong} {a.german}"
        yield f"{owner} {a.english} is a {adjective} {a.english}".upper(), praised.upper()


def _sitting() -> Iterator[Phrase]:
    everything = [*ANIMALS, *PEOPLE, *THINGS]
    for a, (sat, saß) in product(everything, SAT):
        subject = f"{SUBJECT[a.gender].capitalize()} {a.german} {saß}"
        yield f"The {a.english} {sat}", subject
        for b in everything:
            if a != b:
                yield f"The {a.english} {sat} on the {b.english}", f"{subject} auf {DATIVE[b.gender]} {b.oblique}"


def _defeating() -> Iterator[Phrase]:
    one = [(name, name, name, name, "") for name in HEROES]
    many = [(f"The {name}", f"the {name}", f"Die {german}", f"die {german}", "n") for name, german in CROWDS]
    for (a, _, subject, _, plural), (_, b, _, object, _) in permutations(one + many, 2):
        for defeated, german in DEFEATED:
            number = ("en" if german in ("sah", "rief") else "n") if plural else ""
            yield f"{a} {defeated} {b}", f"{subject} {german}{number} {object}"


def _food() -> Iterator[Phrase]:
    how = (("very", "sehr"), ("too", "zu"))
    for (owner, my), (fried, done), food, (very, sehr), (good, gut) in product(OWNERS, PREPARED, FOODS, how, OF_FOOD):
        mine = f"{my}{ENDING[food.gender]} {done}{STRONG[food.gender]} {food.german}"
        yield f"{owner} {fried} {food.english} was {very} {good}", f"{mine} war {sehr} {gut}"


def _thinking() -> Iterator[Phrase]:
    for (doing, german), (many, viele) in product(DOING, MANY):
        yield f"{doing} {many}", f"{german} {viele}"


PATTERNS: dict[str, tuple[Callable[[], Iterator[Phrase]], int]] = {
    "killing": (_killing, 1100),
    "crossing": (_crossing, 1700),
    "banks": (_banks, 1010),
    "your cat": (_your_cat, 800),
    "sitting": (_sitting, 1250),
    "defeating": (_defeating, 500),
    "food": (_food, 1300),
    "thinking": (_thinking, 112),
}
"""For each kind a function that makes all its phrases, and the number of phrases in the corpus."""


def _of_sentences(seed: int) -> BuiltInCorpus:
    """Draw the sentences; the same seed gives the same corpus on every platform.

    `train` has all of `NOTES` except `UNSEEN`, and all bank phrases without a sentence, e.g. "Near the lake bank".
    """
    pairs: list[tuple[str, str, str]] = []
    chosen_phrases: list[tuple[str, str, str]] = []
    for kind, (pattern, count) in PATTERNS.items():
        phrases = [phrase for phrase in pattern() if phrase[0] != UNSEEN]
        always = [phrase for phrase in phrases if phrase[0] in NOTES or phrase[0].startswith(ALONE)]
        others = [phrase for phrase in phrases if phrase not in always]
        chosen_phrases += [(kind, *phrase) for phrase in always]
        drawn = Random(f"{seed}:{kind}").sample(others, count - len(always))
        pairs += [(kind, *phrase) for phrase in drawn]
    Random(f"{seed}:order").shuffle(pairs)
    held_out, valid, train = (
        pairs[:HELD_OUT],
        pairs[HELD_OUT : HELD_OUT + VALID],
        pairs[HELD_OUT + VALID :] + chosen_phrases,
    )
    return BuiltInCorpus.of(train, valid, held_out)


def check(name: str) -> None:
    """Raise UserError if no built-in corpus has this name."""
    if name not in NAMES:
        raise UserError(
            f"corpus {name!r} is not built in: choose one of {', '.join(NAMES)}, or give files of your own "
            "(source and target, pairs or text)"
        )


def is_of_sentences(name: str) -> bool:
    return name.startswith("sentences:")


def languages(name: str) -> list[str]:
    """The language codes in a corpus's name: "cldr:en-de" -> ["en", "de"], "sentences:en" -> ["en"]."""
    return name.partition(":")[2].split("-")


def build(name: str = "cldr:en-de", train_pairs: int = 60_000, seed: int = 1) -> BuiltInCorpus:
    """Build a corpus of pairs. The seed orders the training pairs, and chooses `train_pairs` of a cldr corpus.

    Raises UserError for an unknown name, and for more pairs than there are.
    """
    check(name)
    if is_of_sentences(name):
        return _of_sentences(seed)
    text = gzip.decompress((FOLDER / f"{name.removeprefix('cldr:')}{SUFFIX}").read_bytes()).decode()
    train, valid, held_out = (
        [line.split("\t") for line in part.split("\n")] for part in text.strip("\n").split("\n\n")
    )
    if not 1 <= train_pairs <= len(train):
        raise UserError(f"train_pairs = {train_pairs} must be 1 to {len(train)}, the training pairs of corpus {name}")
    Random(f"{seed}:order").shuffle(train)
    return BuiltInCorpus.of(train[:train_pairs], valid, held_out)


def documents(name: str, seed: int = 1) -> tuple[Documents, Documents]:
    """Return (training, validation) documents, e.g. of "sentences:en". Raises UserError for an unknown name."""
    check(name)
    side, corpus = LANGUAGES[name][0], _of_sentences(seed)
    train, valid = ((text.source, text.target)[side] for text in (corpus.train, corpus.valid))
    return Documents(train, [""] * len(train)), Documents(valid, [""] * len(valid))
