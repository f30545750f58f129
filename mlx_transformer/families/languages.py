"""Tokens of languages in published vocabularies, of the files that name them, or in the order that they all have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OF_LANGUAGES = ("m2m_100", "mbart")
"""Families whose models are told languages by tokens of their own, which no text holds."""
LANGUAGE = re.compile(r"__([a-z]{2,3})__|([a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2})")
"""The names that M2M100, and that NLLB and mBART have for the token of a language, by its code."""
M2M100 = """
af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu
hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt
ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
"""
"""Codes of M2M100 and SMaLL-100 (Fan et al. 2020), in the order of their ids."""
MBART_50 = """
ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP
nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN
mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
"""
"""Codes of mBART-50 (Tang et al. 2020), in the order of their ids."""
MBART_25 = " ".join(MBART_50.split()[:25])
"""Codes of mBART (Liu et al. 2020)."""


def codes_of(tokens: Mapping[Any, Any], rows: int) -> dict[str, int]:
    """Return {code: id} of the tokens that are a language's, of {token: id}."""
    known = {token: id for token, id in tokens.items() if type(id) is int and 0 <= id < rows}
    matches = {LANGUAGE.fullmatch(str(token)): id for token, id in known.items()}
    return {match[1] or match[2]: id for match, id in matches.items() if match is not None}


def added_tokens(settings: Mapping[str, Any], added: Mapping[str, Any], first: int, usual: str) -> dict[str, int]:
    """Return {token: id} of languages and <mask>.

    Ids stand in tokenizer_config.json (`added_tokens_decoder`) or added_tokens.json; of a bare list, or where there is
    none, of `usual` codes, they begin with `first`.
    """
    decoder = settings.get("added_tokens_decoder")
    numbered = decoder.items() if isinstance(decoder, dict) else ()
    numbered = [(int(id), token) for id, token in numbered if id.isdecimal() and len(id) < 10]
    if languages := _languages({content_of(token): id for id, token in numbered}):
        return languages
    if languages := _languages(added):
        return languages
    listed = settings.get("additional_special_tokens")
    tokens = [content_of(each) for each in listed] if isinstance(listed, list) else []
    named = [token for token in tokens if LANGUAGE.fullmatch(token)] or usual.split()
    return {token: first + i for i, token in enumerate(named)}


def listed_tokens(specification: Mapping[str, Any]) -> dict[str, int]:
    """Return {token: id} of a parsed tokenizer.json's added_tokens; entries that are no token are left out."""
    added = specification.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    pairs = [(entry.get("content"), entry.get("id")) for entry in entries]
    return {text: id for text, id in pairs if isinstance(text, str) and type(id) is int}


def _languages(tokens: Mapping[Any, Any]) -> dict[str, int]:
    """Return {} if no token is a language code."""
    ids = {str(text): id for text, id in tokens.items() if LANGUAGE.fullmatch(str(text)) or text == "<mask>"}
    return {} if not ids.keys() - {"<mask>"} else ids


def content_of(token: Any) -> str:
    """Return the text of a special token, which stands alone or in an object."""
    return str(token.get("content") if isinstance(token, dict) else token)
