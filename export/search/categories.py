"""The categories of characters at which a text is split, for RE2, which knows Unicode 13; `tokenizers` knows 16.

Classes of regular expressions, without their brackets. A test compares both on every code point.
"""

from __future__ import annotations


def _ranges(text: str) -> str:
    """ "870-887 8b5" -> the same in a class of RE2."""
    parts = (part.partition("-") for part in text.split())
    return "".join(rf"\x{{{first}}}" + (rf"-\x{{{last}}}" if last else "") for first, _, last in parts)


LETTERS_AND_MARKS = r"\p{L}\p{M}" + _ranges(
    """
    870-887 889-88e 897-89f 8b5 8c8-8d2 c3c c5d cdd cf3 ece 170d 1715 171f 180f 1ac1-1ace 1b4c 1c89-1c8a 1dfa
    2c2f 2c5f 9ffd-9fff a7c0-a7c1 a7cb-a7cd a7d0-a7d1 a7d3 a7d5-a7dc a7f2-a7f4 10570-1057a 1057c-1058a
    1058c-10592 10594-10595 10597-105a1 105a3-105b1 105b3-105b9 105bb-105bc 105c0-105f3 10780-10785 10787-107b0
    107b2-107ba 10d4a-10d65 10d69-10d6d 10d6f-10d85 10ec2-10ec4 10efc-10eff 10f70-10f85 11070-11075 110c2
    1123f-11241 11380-11389 1138b 1138e 11390-113b5 113b7-113c0 113c2 113c5 113c7-113ca 113cc-113d3 113e1-113e2
    11740-11746 11ab0-11abf 11bc0-11be0 11f00-11f10 11f12-11f3a 11f3e-11f42 11f5a 12f90-12ff0 1342f 13440-13455
    13460-143fa 16100-1612f 16a70-16abe 16d40-16d6c 18cff 1aff0-1aff3 1aff5-1affb 1affd-1affe 1b11f-1b122 1b132
    1b155 1cf00-1cf2d 1cf30-1cf46 1df00-1df1e 1df25-1df2a 1e030-1e06d 1e08f 1e290-1e2ae 1e4d0-1e4ef 1e5d0-1e5f0
    1e7e0-1e7e6 1e7e8-1e7eb 1e7ed-1e7ee 1e7f0-1e7fe 2a6de-2a6df 2b735-2b739 2ebf0-2ee5d 31350-323af
    """
)
NUMBERS = r"\p{N}" + _ranges(
    """
    10d40-10d49 116d0-116e3 11bf0-11bf9 11f50-11f59 16130-16139 16ac0-16ac9 16d70-16d79 1ccf0-1ccf9 1d2c0-1d2d3
    1e4f0-1e4f9 1e5f1-1e5fa
    """
)
