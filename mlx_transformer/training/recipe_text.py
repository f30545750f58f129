"""What keys of [data] must not be together: where the text of a run comes from, and its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transformer.data.pair_files import language_pair
from mlx_transformer.spec.errors import UserError

from .options import CorpusOptions, DataOptions


def text_problems(d: DataOptions) -> Iterator[str]:
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
    if d.tokenizer is not None and (d.vocab_size != DataOptions.vocab_size or d.vocab_lines is not None):
        yield "tokenizer is a vocabulary that is there: leave out vocab_size and vocab_lines"
    if d.bpe_dropout and d.cache is not None:
        yield "bpe_dropout makes other tokens in every epoch, cache keeps them: leave one out"


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
