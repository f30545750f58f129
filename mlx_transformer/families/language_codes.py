"""Languages by the codes that people write, ISO 639-1's, in models that have codes of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
"""ISO 639-1's code and NLLB's (2022), for a macro-language that of its main part; zt: LibreTranslate's for Chinese in
its traditional script."""
OF_NLLB: dict[str, str] = dict(zip(NLLB[::2], NLLB[1::2], strict=True))
OTHERS = {"nb": "no", "no": "nb", "tl": "fil"}
"""Other codes of the same languages."""


def own_code(code: str, known: Collection[str]) -> str | None:
    """Return the model's own code of a language, one of `known`: de, de_DE and deu_Latn are German; None if there is
    none.

    code: ISO 639-1's, with a script or a country where that tells two apart (zh-Hant), or the model's own.
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
    """Return {ISO 639-1's code, or where there is none the model's own: the model's own}."""
    known = list(known)
    codes: dict[str, str] = {}
    for code in dict.fromkeys([*OF_NLLB, *(each.partition("_")[0] for each in known)]):
        own = own_code(code, known)
        if own is not None and own not in codes.values():
            codes[code] = own
    return codes | {each: each for each in known if each not in codes.values()}
