"""Small vocabularies of every family with three tokens that their maker added, and what `transformers` makes of text.

One token is special, one takes the spaces before it and is looked for in normalised text, one is neither; "odd" ones
have more, of all kinds. Each folder
of `golden_tokens/` holds what `save_pretrained` writes of a tokenizer, and texts.json: lines of many scripts and lines
with the tokens, their ids without the language's, their decoded texts, and the flags of all added tokens. Version 5
opens the folders of version 4 and saves them again, so run it where each is, with sentencepiece, in this order:

    python tests/mlx_transformer/families/make_golden_tokens.py     # transformers 4.57.6
    python tests/mlx_transformer/families/make_golden_tokens.py     # transformers 5.24.0

With a folder and a count it writes there, with so many lines in place of forty and a random model beside each
tokenizer (`tests/peers/test_folders.py`). A third folder holds others of the same names: it writes what these make of
the same texts and ids.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import make_golden
import make_golden_encoders
import numpy as np
import sentencepiece
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer

HERE = Path(__file__).parent
LINES = HERE.parents[1] / "peers" / "lines.world"
VERSION = transformers.__version__.partition(".")[0]
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "golden_tokens"
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 0
AGAIN = Path(sys.argv[3]) if len(sys.argv) > 3 else None
TOKENS = [
    AddedToken("[E1]", special=True, normalized=False),
    AddedToken("<hole>", lstrip=True, normalized=True),
    AddedToken("{NAME}", normalized=False),
]
MORE = [
    *TOKENS,
    AddedToken("COVID19", normalized=True),
    AddedToken("<r>", rstrip=True, normalized=False),
    AddedToken("cat", single_word=True, normalized=False),
    AddedToken("Dog", single_word=True, normalized=True),
    AddedToken("new york", normalized=False),
    AddedToken("<a", normalized=False),
    AddedToken("<ab", normalized=True),
    AddedToken("<abc>", lstrip=True, normalized=False),
    AddedToken("ar", normalized=False),  # also a piece
    AddedToken("\u4e2d\u56fd", normalized=True),
    AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("@USER", single_word=True, lstrip=True, normalized=True),
    AddedToken("\n", normalized=False),
    AddedToken(" lead", normalized=False),
]
KINDS = {
    "t5-odd": ("T5TokenizerFast", "t5"),
    "marian-odd": ("MarianTokenizer", "marian"),
    "bart-odd": ("BartTokenizerFast", "bart"),
    "t5": ("T5TokenizerFast", "t5"),
    "t5-slow": ("T5Tokenizer", "t5"),
    "t5-new": ("T5Tokenizer", "t5"),
    "mt5": ("MT5TokenizerFast", "mt5"),
    "umt5": ("T5TokenizerFast", "umt5"),
    "pegasus": ("PegasusTokenizerFast", "pegasus"),
    "nllb": ("NllbTokenizerFast", "m2m_100"),
    "mbart": ("MBartTokenizerFast", "mbart"),
    "m2m100": ("M2M100Tokenizer", "m2m_100"),
    "marian": ("MarianTokenizer", "marian"),
    "bart": ("BartTokenizerFast", "bart"),
    "roberta": ("RobertaTokenizerFast", "roberta"),
    "xlm-roberta": ("XLMRobertaTokenizerFast", "xlm-roberta"),
    "xlm-roberta-slow": ("XLMRobertaTokenizer", "xlm-roberta"),
    "bert": ("BertTokenizerFast", "bert"),
    "bert-slow": ("BertTokenizer", "bert"),
    "distilbert": ("DistilBertTokenizerFast", "distilbert"),
    "modernbert": ("PreTrainedTokenizerFast", "modernbert"),
}
ONCE = ("t5-slow", "t5-new", "xlm-roberta-slow", "bert-slow")
"""Of version 4 alone: version 5 has one class for each."""
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LANGUAGES = {"nllb": ("eng_Latn", "deu_Latn"), "mbart": ("en_XX", "de_DE"), "m2m100": ("en", "de")}
FEW = {"t5": {"extra_ids": 8}, "mt5": {"extra_ids": 0}, "umt5": {"extra_ids": 8}, "pegasus": {"offset": 7}}
# What a normaliser replaces, one letter each: there transformers and SentencePiece agree.
RULES = [(0xA0, " "), (0x3000, " "), (9, " "), *((code, chr(code - 0xFEE0)) for code in range(0xFF21, 0xFF5B))]


def pieces(path: Path, size: int = 600, **options) -> list[str]:
    file = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as rules:
        rules.write("".join(f"{code:X}\t{' '.join(f'{ord(c):X}' for c in text)}\n" for code, text in RULES))
        rules.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(few()),
            model_writer=file,
            **dict(vocab_size=size, character_coverage=0.98, minloglevel=2, hard_vocab_limit=False),
            normalization_rule_tsv=rules.name,
            **options,
        )
    path.write_bytes(file.getvalue())
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    return [model.id_to_piece(i) for i in range(len(model))]


def write_base(folder: Path, name: str) -> None:
    """The files that a family's makers ship."""
    if name.startswith("t5") or name in ("pegasus", "mt5", "umt5"):
        pieces(folder / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    elif name in LANGUAGES or name.startswith("xlm"):
        kind = "bpe" if name == "nllb" else "unigram"
        every = pieces(folder / "sentencepiece.bpe.model", model_type=kind)
        if name == "m2m100":
            tokens = ["<s>", "<pad>", "</s>", "<unk>", *every[3:]]
            write_json(folder / "vocab.json", {token: id for id, token in enumerate(tokens)})
    elif name.startswith("marian"):
        source, target = pieces(folder / "source.spm"), pieces(folder / "target.spm", 500)
        tokens = dict.fromkeys(["</s>", "<unk>", *source[3:], *target[3:], ">>deu<<", "<pad>"])
        write_json(folder / "vocab.json", {token: id for id, token in enumerate(tokens)})
        write_json(folder / "tokenizer_config.json", {"source_lang": "en", "target_lang": "de"})
    elif name in ("bart", "bart-odd", "roberta"):
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        special, alphabet = ["<s>", "<pad>", "</s>", "<unk>"], pre_tokenizers.ByteLevel.alphabet()
        train(backend, trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet))
        model = json.loads(backend.to_str())["model"]
        write_json(folder / "vocab.json", {**model["vocab"], "<mask>": len(model["vocab"])})
        (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(m)}\n" for m in model["merges"]))
    elif name == "modernbert":
        names = dict(zip(("pad", "unk", "cls", "sep", "mask"), WORDS, strict=True))
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer = tokenizers.normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        train(backend, trainers.BpeTrainer(vocab_size=500, special_tokens=WORDS, initial_alphabet=alphabet))
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B [SEP]",
            special_tokens=[(token, WORDS.index(token)) for token in ("[CLS]", "[SEP]")],
        )
        backend.add_special_tokens([AddedToken("[MASK]", special=True, normalized=False, lstrip=True)])
        backend.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", {f"{role}_token": token for role, token in names.items()})
    else:
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer, backend.pre_tokenizer = (
            tokenizers.normalizers.BertNormalizer(),
            pre_tokenizers.BertPreTokenizer(),
        )
        train(backend, trainers.WordPieceTrainer(vocab_size=900, special_tokens=WORDS))
        tokens = sorted(backend.get_vocab().items(), key=lambda each: each[1])
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in tokens), encoding="utf-8")


def train(backend: tokenizers.Tokenizer, trainer) -> None:
    backend.train_from_iterator(few(), trainer)


def write_json(path: Path, values) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def few() -> list[str]:
    """So few that their letters are."""
    short = [line for line in LINES.read_text(encoding="utf-8").splitlines() if len(line) < 60]
    return random.Random(7).sample(short, 60)


ODD = [
    f"{a}{space}{b}"
    for space in (" ", "  ", "\t", "\x85", "\xa0", "\u3000", "\u200b", "\u2028")
    for a, b in (("a", ""), ("", "a"), ("a", "b"))
]
"""White space of all kinds at the ends and within."""


def lines(tokens: list[AddedToken]) -> list[str]:
    plain = few()[20:]
    if COUNT:
        every = LINES.read_text(encoding="utf-8").splitlines()
        first, last = (random.Random(seed).choices(every, k=COUNT - len(every) - len(ODD)) for seed in (8, 9))
        mixed = [a[: len(a) // 2] + b[len(b) // 2 :] for a, b in zip(first, last, strict=True)]
        plain = [*every, *mixed, *ODD]
    found = [*plain, " two  spaces", "\uff21\uff22\u3000x"]
    for i, line in enumerate(plain):
        token, other = (tokens[j % len(tokens)].content for j in (i, i + 1))
        found += [f"{line} {token} {line}", f"{token}{line}", f"{line[:5]}{token}", f"x{token}{other} y {other}."]
    return [*found, *(form.format(t.content) for t in tokens[3:] for form in FORMS)]


FORMS = [
    "x{}",
    "{}x",
    "x {} y",
    "({})",
    "1{}2",
    "\xb2{}",
    "{}\u2160 b",
    "\t{0}\n{0}",
    "\u200d{}",
    "\u24d0{}",
    "\x85{}\x85a",
    "  {0}  {0}  ",
]


def make(name: str, folder: Path) -> None:
    kind, model_type = KINDS[name]
    tokens = MORE if name.endswith("-odd") else TOKENS
    if VERSION == "4":
        with tempfile.TemporaryDirectory() as base:
            write_base(Path(base), name)
            write_json(Path(base) / "config.json", {"model_type": model_type})
            options = dict(zip(("src_lang", "tgt_lang"), LANGUAGES.get(name, ()), strict=False))
            options |= {"additional_special_tokens": [*LANGUAGES[name]]} if name == "nllb" else {}
            options |= FEW.get(model_type, {})
            options |= {"legacy": False} if name == "t5-new" else {}
            tokenizer = getattr(transformers, kind).from_pretrained(base, **options)
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [tokens[0]]}, replace_additional_special_tokens=False
        )
        tokenizer.add_tokens(tokens[1:])
    else:
        tokenizer = AutoTokenizer.from_pretrained(OUT / "v4" / name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", {"model_type": model_type})
    for file in folder.glob("*.json"):  # without white space
        write_json(file, json.loads(file.read_text(encoding="utf-8")))
    answer(name, folder, lines(tokens))
    if COUNT:
        add_model(name, folder, len(tokenizer), tokenizer)


def answer(name: str, folder: Path, texts: list[str]) -> None:
    """Write what the tokenizer in a folder makes of texts."""
    judge = AutoTokenizer.from_pretrained(folder)
    source = getattr(judge, "src_lang", None) if name in LANGUAGES else None
    language = source and judge.convert_tokens_to_ids(f"__{source}__" if name == "m2m100" else source)
    ids = [[id for id in judge(line).input_ids if id != language] for line in texts]
    flags = [
        [id, t.content, t.special, t.normalized, t.lstrip, t.rstrip, t.single_word]
        for id, t in judge.added_tokens_decoder.items()
    ]
    decoded = [judge.decode(row, skip_special_tokens=True) for row in ids]
    special = {role: getattr(judge, f"{role}_token_id") for role in ("pad", "bos", "eos", "cls", "sep")}
    facts = {"size": len(judge), "special": special, "language": language, "flags": flags}
    facts |= {"texts": texts, "ids": ids, "decoded": decoded}
    write_json(folder / "texts.json", facts)


def add_model(name: str, folder: Path, size: int, tokenizer) -> None:
    """Write a random model of the tokenizer's size; version 5 saves that of version 4 again."""
    kind = KINDS[name][1]
    encoder = {"xlm-roberta": "xlm-r"}.get(kind, kind)
    encoders = make_golden_encoders.MODELS
    config = dict(encoders[encoder] if encoder in encoders else make_golden.MODELS[kind.replace("_", "")])
    config |= dict(vocab_size=size + 110, max_position_embeddings=150, pad_token_id=tokenizer.pad_token_id)
    roles = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "cls", "sep")}
    config |= {role: id for role, id in roles.items() if role in config}
    config = {key: value for key, value in config.items() if key not in ("pooler", "forced_bos_token_id")}
    if "decoder_start_token_id" in config and kind not in ("bart", "mbart", "m2m_100"):
        config["decoder_start_token_id"] = tokenizer.pad_token_id
    maker = make_golden_encoders if encoder in encoders else make_golden
    first = OUT / "v4" / name
    model = maker.random_model(config, *([] if encoder in encoders else [0])) if VERSION == "4" else opened(first)
    model.save_pretrained(folder)
    write_json(folder / "made_of.json", config)
    np.savez(folder / "answers.npz", **maker.answers(model, config))


def opened(folder: Path):
    [kind] = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, kind).from_pretrained(folder).eval()


def read_again(name: str, folder: Path, before: Path) -> None:
    """Write what a folder's tokenizer and model make of the texts and ids in another's answers."""
    answer(name, folder, json.loads((before / "texts.json").read_text(encoding="utf-8"))["texts"])
    config = json.loads((before / "made_of.json").read_text())
    maker = make_golden if "decoder_start_token_id" in config else make_golden_encoders
    np.savez(folder / "answers.npz", **maker.answers(opened(folder), config))


if __name__ == "__main__":
    for each in KINDS:
        here = OUT / f"v{VERSION}" / each
        if AGAIN and here.is_dir():
            read_again(each, here, AGAIN / f"v{VERSION}" / each)
        elif not AGAIN and (VERSION == "4" or each not in ONCE) and not (here / "answers.npz").exists():
            make(each, here)
