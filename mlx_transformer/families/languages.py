"""Languages of published models: their tokens in the vocabulary, and the codes people write for them (ISO 639-1).

The folder's files name the tokens, or the family's code has them in the order of their ids.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

NLLB = """
af afr_Latn am amh_Ethi ar arb_Arab as asm_Beng ay ayr_Latn az azj_Latn ba bak_Cyrl be bel_Cyrl bg bul_Cyrl bm bam_Latn
bn ben_Beng bo bod_Tibt bs bos_Latn ca cat_Latn cs ces_Latn cy cym_Latn da dan_Latn de deu_Latn dz dzo_Tibt ee ewe_Latn
el ell_Grek en eng_Latn eo epo_Latn es spa_Latn et est_Latn eu eus_Latn fa pes_Arab fi fin_Latn fj fij_Latn fo fao_Latn
fr fra_Latn ga gle_Latn gd gla_Latn gl glg_Latn gn grn_Latn gu guj_Gujr ha hau_Latn he heb_Hebr hi hin_Deva hr hrv_Latn
ht hat_Latn hu hun_Latn hy hye_Armn id ind_Latn ig ibo_Latn is isl_Latn it ita_Latn ja jpn_Jpan jv jav_Latn ka kat_Geor
kg kon_Latn ki kik_Latn kk kaz_Cyrl km khm_Khmr kn kan_Knda ko kor_Hang ks kas_Deva ku kmr_Latn ky kir_Cyrl lb ltz_Latn
lg lug_Latn li lim_Latn ln lin_Latn lo lao_Laoo lt lit_Latn lv lvs_Latn mg plt_Latn mi mri_Latn mk mkd_Cyrl ml mal_Mlym
mn khk_Cyrl mr mar_Deva ms zsm_Latn mt mlt_Latn my mya_Mymr nb nob_Latn ne npi_Deva nl nld_Latn nn nno_Latn no nob_Latn
ny nya_Latn oc oci_Latn om gaz_Latn or ory_Orya pa pan_Guru pl pol_Latn ps pbt_Arab pt por_Latn qu quy_Latn rn run_Latn
ro ron_Latn ru rus_Cyrl rw kin_Latn sa san_Deva sc srd_Latn sd snd_Arab sg sag_Latn si sin_Sinh sk slk_Latn sl slv_Latn
sm smo_Latn sn sna_Latn so som_Latn sq als_Latn sr srp_Cyrl ss ssw_Latn st sot_Latn su sun_Latn sv swe_Latn sw swh_Latn
ta tam_Taml te tel_Telu tg tgk_Cyrl th tha_Thai ti tir_Ethi tk tuk_Latn tl tgl_Latn tn tsn_Latn tr tur_Latn ts tso_Latn
tt tat_Cyrl tw twi_Latn ug uig_Arab uk ukr_Cyrl ur urd_Arab uz uzn_Latn vi vie_Latn wo wol_Latn xh xho_Latn yi ydd_Hebr
yo yor_Latn zh zho_Hans zt zho_Hant zu zul_Latn
""".split()
"""ISO 639-1 codes, each followed by NLLB's code (2022); a macro-language has the code of its main language. zt is
LibreTranslate's code for traditional Chinese."""
OF_NLLB: dict[str, str] = dict(zip(NLLB[::2], NLLB[1::2], strict=True))
OTHERS = {"nb": "no", "no": "nb", "tl": "fil"}
"""{code: another code of the same language}"""


def own_code(code: str, known: Collection[str]) -> str | None:
    """Find the model's own code of a language; None if it doesn't have the language.

    code: from ISO 639-1, with a script or country if needed (zh-Hant), or the model's own. known: the model's codes.

    >>> own_code("de", ["eng_Latn", "deu_Latn"])
    'deu_Latn'
    """
    if code in known:
        return code
    base, _, part = code.replace("_", "-").lower().partition("-")
    full = OF_NLLB.get(base, "")
    names = {base, OTHERS.get(base, base), full.partition("_")[0]}
    codes = [each for each in known if each.partition("_")[0] in names]
    exact = [each for each in codes if part and each.partition("_")[2].lower() == part]
    if exact or full in codes:
        return exact[0] if exact else full
    return codes[0] if len(codes) == 1 else None


def short_codes(known: Iterable[str]) -> dict[str, str]:
    """{ISO 639-1 code: the model's own code}; a language without an ISO code keeps its own."""
    known = list(known)
    codes: dict[str, str] = {}
    for code in dict.fromkeys([*OF_NLLB, *(each.partition("_")[0] for each in known)]):
        own = own_code(code, known)
        if own is not None and own not in codes.values():
            codes[code] = own
    return codes | {each: each for each in known if each not in codes.values()}


OF_LANGUAGES = ("m2m_100", "mbart")
"""Families with language tokens; no text contains these."""
LANGUAGE = re.compile(r"__([a-z]{2,3})__|([a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2})|>>([a-z]{2,3}[\w.+-]*)<<")
"""Language tokens: __de__ in M2M100, deu_Latn in NLLB, de_DE in mBART, >>deu<< in Opus-MT."""
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
    """{code: id} of the language tokens in {token: id}, without ids beyond the model's `rows`."""
    known = {token: id for token, id in tokens.items() if type(id) is int and 0 <= id < rows}
    matches = {LANGUAGE.fullmatch(str(token)): id for token, id in known.items()}
    return {match[match.lastindex or 0]: id for match, id in matches.items() if match is not None}


def language_tokens(settings: Mapping[str, Any], added: Mapping[str, Any], first: int, usual: str) -> dict[str, int]:
    """{token: id} of languages and <mask>.

    Ids are in tokenizer_config.json (`added_tokens_decoder`) or in added_tokens.json. If there is only a list of
    tokens, or no list (then `usual`), ids are counted from `first`.
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
    """{token: id} from added_tokens of a parsed tokenizer.json, without malformed entries."""
    added = specification.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    pairs = [(entry.get("content"), entry.get("id")) for entry in entries]
    return {text: id for text, id in pairs if isinstance(text, str) and type(id) is int}


def _languages(tokens: Mapping[Any, Any]) -> dict[str, int]:
    """The language tokens and <mask>; {} without any language token."""
    ids = {str(text): id for text, id in tokens.items() if LANGUAGE.fullmatch(str(text)) or text == "<mask>"}
    return {} if not ids.keys() - {"<mask>"} else ids


def content_of(token: Any) -> str:
    """The spelling of a special token in a file, where it is a string or an object with "content"."""
    return str(token.get("content") if isinstance(token, dict) else token)
