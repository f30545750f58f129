"""Codes that people write, and those of published models."""

from __future__ import annotations

import pytest

from mlx_transformer.families.languages import M2M100, MBART_50, OF_NLLB, own_code, short_codes

NLLB = [*dict.fromkeys(OF_NLLB.values()), "ace_Arab", "ace_Latn", "azb_Arab", "kas_Arab"]
CASES = [
    ("en", NLLB, "eng_Latn"),
    ("eng_Latn", NLLB, "eng_Latn"),
    ("zh", NLLB, "zho_Hans"),
    ("zt", NLLB, "zho_Hant"),
    ("zh-Hant", NLLB, "zho_Hant"),
    ("zh_hans", NLLB, "zho_Hans"),
    ("nb", NLLB, "nob_Latn"),
    ("ks", NLLB, "kas_Deva"),
    ("ks-Arab", NLLB, "kas_Arab"),
    ("pt-BR", NLLB, "por_Latn"),
    ("ace", NLLB, None),
    ("xx", NLLB, None),
    ("de", MBART_50.split(), "de_DE"),
    ("en-GB", MBART_50.split(), "en_XX"),
    ("zt", MBART_50.split(), None),
    ("de", M2M100.split(), "de"),
    ("nb", M2M100.split(), "no"),
    ("zh-Hans", M2M100.split(), "zh"),
    ("ceb", M2M100.split(), "ceb"),
    ("", M2M100.split(), None),
]


@pytest.mark.parametrize(("code", "known", "own"), CASES, ids=[f"{case[0]}-{len(case[1])}" for case in CASES])
def test_a_code_is_the_models_own(code: str, known: list[str], own: str | None) -> None:
    assert own_code(code, known) == own


@pytest.mark.parametrize("known", [NLLB, MBART_50.split(), M2M100.split()], ids=len)
def test_every_language_has_one_short_code(known: list[str]) -> None:
    found = short_codes(known)
    assert sorted(found.values()) == sorted(known)
    assert all(own_code(short, known) == own for short, own in found.items())


def test_short_codes_are_iso_639s() -> None:
    assert short_codes(["eng_Latn", "zho_Hant", "ace_Arab", "ace_Latn"]) == {
        "en": "eng_Latn",
        "zh": "zho_Hant",
        "ace_Arab": "ace_Arab",
        "ace_Latn": "ace_Latn",
    }
