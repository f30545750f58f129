"""The built-in corpus: real localised phrases of Unicode CLDR in any two locales, from `babel`, without a download.

`build("cldr:en-de")` draws values (a date, an amount, names) and renders each in both locales, so every reference is
exact and exact match is a meaningful score.
"""

from .build import DEFAULT_KIND_WEIGHTS, KINDS, CldrCorpus, build, write
from .locales import parse_corpus

__all__ = ["DEFAULT_KIND_WEIGHTS", "KINDS", "CldrCorpus", "build", "parse_corpus", "write"]
