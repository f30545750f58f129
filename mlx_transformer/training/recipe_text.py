"""What keys of [data] must not be together: where the text of a run comes from, and its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transformer.data.pair_files import language_pair
from mlx_transformer.system.errors import UserError

from .options import CorpusOptions, DataOptions, TrainingOptions

PAIRS = ("corpus", "source", "target", "pairs", "valid_source", "valid_target", "valid_pairs", "languages")
SCORES = ("bleu", "chrf", "exact_match")
"""Of translations."""


def document_problems(d: DataOptions, t: TrainingOptions) -> Iterator[str]:
    """What a model of plain text can't have."""
    given = [name for name in PAIRS if getattr(d, name) is not None] + ["corpora"] * bool(d.corpora)
    if given:
        yield f"data.{given[0]} is for translation: a {t.objective} is trained on text"
    if d.text is None:
        yield f"a {t.objective} is trained on plain text: set text to a file, a folder or a pattern"
    if t.best in SCORES:
        yield f"best = {t.best!r} is a score of translations: take loss or perplexity"
    if d.max_length < 2:
        yield "max_length: a document needs two tokens"
    names = ("bpe_dropout", "cache", "separate_vocabularies")
    if others := [name for name in names if getattr(d, name) != getattr(DataOptions, name)]:
        yield f"{others[0]} is for translation: leave it out"
    yield from _vocabulary_problems(d)


def text_problems(d: DataOptions) -> Iterator[str]:
    if d.text is not None or d.valid_text is not None:
        yield "text is what a language-model, masked-language-model or denoising is trained on: set objective"
        return
    given = [d.corpus is not None, d.source is not None or d.target is not None, d.pairs is not None, bool(d.corpora)]
    if sum(given) != 1:
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
    if (d.valid_source is None) != (d.valid_target is None):
        yield "valid_source and valid_target files go together"
    if d.valid_source is not None and d.valid_pairs is not None:
        yield "valid_source and valid_pairs exclude each other"
    if d.corpus is not None and (d.valid_source is not None or d.valid_pairs is not None):
        yield f"corpus {d.corpus} brings its own validation text: leave out valid_source, valid_target and valid_pairs"
    yield from _vocabulary_problems(d)
    if d.bpe_dropout and d.cache is not None:
        yield "bpe_dropout makes other tokens in every epoch, cache keeps them: leave one out"


def _vocabulary_problems(d: DataOptions) -> Iterator[str]:
    if d.tokenizer is not None and (d.vocab_size != DataOptions.vocab_size or d.vocab_lines is not None):
        yield "tokenizer is a vocabulary that is there: leave out vocab_size and vocab_lines"
    if d.tokenizer is not None and d.separate_vocabularies:
        yield "tokenizer is a vocabulary that is there, its folder says whether of each language: leave out one of both"


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
