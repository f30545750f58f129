"""The faults of the text that a recipe names: keys that are right by themselves and wrong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mlx_transformer.data.built_in import NAMES, check, is_of_sentences, languages
from mlx_transformer.data.pair_files import language_pair
from mlx_transformer.system.errors import Text, UserError

from .options import CorpusOptions, DataOptions, TrainingOptions

Reads = Literal["pairs", "documents", "matches", "labelled"]
FOR = {
    "data": {
        **dict.fromkeys(("source_prompt", "target_prompt", "batch_pairs"), ("contrastive",)),
        **dict.fromkeys(("labelled", "valid_labelled"), ("classification",)),
    },
    "training": {
        **dict.fromkeys(("temperature", "symmetric", "chunk"), ("contrastive",)),
        "teacher": ("distillation",),
        "pooling": ("contrastive", "distillation"),
    },
}
"""The objectives that a key is for, where it isn't for all of them."""
PAIRS = ("corpus", "source", "target", "pairs", "valid_source", "valid_target", "valid_pairs", "languages")
SCORES = ("bleu", "chrf", "exact_match")
"""The scores that only translations have."""


def data_problems(d: DataOptions, t: TrainingOptions, reads: Reads) -> Iterator[str]:
    """List what is wrong with the text of a recipe, whose objective reads such text."""
    for options in (d, t):
        table = "data" if options is d else "training"
        for name, objectives in FOR[table].items():
            if t.objective not in objectives and getattr(options, name) != getattr(type(options), name):
                yield f"{table}.{name} is for {' and '.join(objectives)}: leave it out of {t.objective}"
    if reads == "pairs":
        yield from _translation_problems(d)
        return
    if t.best in SCORES:
        yield f"best = {t.best!r} is a score of translations: take loss or another one"
    if d.max_length < 2:
        yield Text("{max_length}: a text needs two tokens")
    names = ("bpe_dropout", "cache", "separate_vocabularies", "vocab_model")
    if others := [name for name in names if getattr(d, name) != getattr(DataOptions, name)]:
        yield f"{others[0]} is for translation: leave it out"
    yield from {"documents": _document_problems, "matches": _match_problems, "labelled": _label_problems}[reads](d, t)
    yield from _vocabulary_problems(d)


def _document_problems(d: DataOptions, t: TrainingOptions) -> Iterator[str]:
    """List the keys that a model of plain text can't have."""
    one_language = d.corpus is not None and len(languages(d.corpus)) == 1
    names = [name for name in PAIRS if name != "corpus" or not one_language]
    for_pairs = [name for name in names if getattr(d, name) is not None] + ["corpora"] * bool(d.corpora)
    if for_pairs:
        yield f"data.{for_pairs[0]} is for translation: a {t.objective} is trained on text"
    yield from _corpus_problems(d)
    if one_language and (d.text is not None or d.valid_text is not None):
        yield Text("corpus {} is a text and brings its own for validation: leave out text and {valid_text}", d.corpus)
    if d.text is None and not one_language:
        yield f"a {t.objective} is trained on plain text: set text to a file, a folder or a pattern"
    if t.objective == "distillation" and t.teacher is None:
        yield "distillation learns the vectors of another encoder: say of which by teacher"


def _match_problems(d: DataOptions, t: TrainingOptions) -> Iterator[str]:
    """List the keys that are wrong for pairs of texts that belong together."""
    if others := [name for name in ("corpus", "text", "valid_text") if getattr(d, name) is not None]:
        yield f"data.{others[0]}: contrastive learning reads pairs: set pairs, or source and target"
    elif d.corpora or (d.pairs is None) == (d.source is None and d.target is None):
        yield "contrastive learning reads one file of pairs, or source and target files: give one of them"
    if d.batch_tokens is not None:
        yield Text("{batch_tokens}: contrastive learning takes a number of pairs a batch: set {batch_pairs}")
    if t.memory is not None:
        yield "memory: a batch of contrastive learning is one whole: set chunk, the texts computed at a time"
    yield from _file_problems(d, "")
    yield from _valid_problems(d)


def _label_problems(d: DataOptions, t: TrainingOptions) -> Iterator[str]:
    """List the keys that are wrong for labelled text."""
    others = [name for name in (*PAIRS, "text", "valid_text") if getattr(d, name) is not None] + ["corpora"] * bool(
        d.corpora
    )
    if others:
        yield f"data.{others[0]}: classification reads labelled text: set labelled"
    if d.labelled is None:
        yield "classification reads labelled text: set labelled to a file"


def _translation_problems(d: DataOptions) -> Iterator[str]:
    """List the keys of parallel text that are wrong together."""
    if d.text is not None or d.valid_text is not None:
        yield "text is what a language-model, masked-language-model or denoising is trained on: set objective"
        return
    places = [d.corpus is not None, d.source is not None or d.target is not None, d.pairs is not None, bool(d.corpora)]
    if sum(places) != 1:
        yield (
            "give either a corpus (such as cldr:en-de) or source and target files, or one file of pairs, or tables "
            "[[data.corpora]]"
        )
    yield from _file_problems(d, "")
    for i, corpus in enumerate(d.corpora):
        where = f"data.corpora[{i}]: "
        if (corpus.pairs is None) == (corpus.source is None and corpus.target is None):
            yield f"{where}give either source and target files or one file of pairs"
        yield from _file_problems(corpus, where)
    if len({corpus.weight is None for corpus in d.corpora}) > 1:
        yield "data.corpora: give all tables a weight, or none"
    yield from _corpus_problems(d)
    if d.corpus in NAMES and len(languages(d.corpus)) == 1:
        yield f"corpus {d.corpus} has one language: translation learns two, as in sentences:en-de"
    yield from _valid_problems(d)
    if d.corpus is not None and (d.valid_source is not None or d.valid_pairs is not None):
        yield Text(
            "corpus {} brings its own validation text: leave out {valid_source}, {valid_target} and {valid_pairs}",
            d.corpus,
        )
    yield from _vocabulary_problems(d)
    if d.bpe_dropout and d.cache is not None:
        yield Text("{bpe_dropout} makes other tokens in every epoch, cache keeps them: leave one out")


def _valid_problems(d: DataOptions) -> Iterator[str]:
    if (d.valid_source is None) != (d.valid_target is None):
        yield Text("{valid_source} and {valid_target} files go together")
    if d.valid_source is not None and d.valid_pairs is not None:
        yield Text("{valid_source} and {valid_pairs} exclude each other")


def _corpus_problems(d: DataOptions) -> Iterator[str]:
    if d.corpus is None:
        return
    try:
        check(d.corpus)
    except UserError as error:
        yield str(error)
    if is_of_sentences(d.corpus) and d.train_pairs != DataOptions.train_pairs:
        yield Text("corpus {} has pairs enough for itself: leave out {train_pairs}", d.corpus)


def _vocabulary_problems(d: DataOptions) -> Iterator[str]:
    if d.tokenizer is not None and (d.vocab_size != DataOptions.vocab_size or d.vocab_lines is not None):
        yield Text("tokenizer is a vocabulary that is there: leave out {vocab_size} and {vocab_lines}")
    if d.tokenizer is not None and d.separate_vocabularies:
        yield "tokenizer is a vocabulary that is there, its folder says whether of each language: leave out one of both"
    if d.vocab_model != DataOptions.vocab_model and d.tokenizer is not None:
        yield Text("tokenizer is a vocabulary that is there: leave out {vocab_model}")
    if d.vocab_model != DataOptions.vocab_model and d.separate_vocabularies:
        yield Text(
            "{vocab_model} = {!r} makes one vocabulary of both languages: leave out {separate_vocabularies}",
            d.vocab_model,
        )
    if d.vocab_model != DataOptions.vocab_model and d.bpe_dropout:
        yield Text(
            "{bpe_dropout} leaves out merges, of which {vocab_model} = {!r} has none: leave out one of both",
            d.vocab_model,
        )


def _file_problems(files: DataOptions | CorpusOptions, where: str) -> Iterator[str]:
    if (files.source is None) != (files.target is None):
        yield f"{where}source and target files go together"
    if files.languages is None:
        return
    if files.pairs is None and getattr(files, "valid_pairs", None) is None:
        yield f"{where}languages names columns of pairs: leave it out"
    try:
        language_pair(files.languages)
    except UserError as error:
        yield f"{where}{error}"
