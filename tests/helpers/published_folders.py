"""The same folders imported: a checkpoint of each kind of published vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
import tokenizers
from published_text import STACKS, T5, judge_of, text_pieces, trained, two_languages, write_model

from mlx_transformer.convert import import_huggingface

FAIRSEQ = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)
CODES = {"m2m_100": ["__de__", "__ceb__", "__zh__"], "nllb": ["deu_Latn", "zho_Hans"], "mbart": ["de_DE", "en_XX"]}
LANGUAGES = [">>deu<<", ">>fra<<"]


def t5_config(judge: sentencepiece.SentencePieceProcessor, more: int, **ids) -> dict:
    kinds = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    return {"model_type": "t5", **T5, **kinds, **ids, "vocab_size": len(judge) + more + 28}


def named(how: str, codes: list[str], first: int) -> dict:
    """The files that say which ids the languages have."""
    ids = {code: first + i for i, code in enumerate(codes)}
    entries = {str(id): {"content": code, "special": True} for code, id in ids.items()}
    return {
        "numbered": {"tokenizer_config__json": {"added_tokens_decoder": {"0": {"content": "<s>"}, **entries}}},
        "added": {"added_tokens__json": ids},
        "listed": {"special_tokens_map__json": {"additional_special_tokens": codes}},
        "usual": {},
    }[how]


def of_many_languages(folder: Path, model: bytes, model_type: str, codes: list[str], how: str, **files) -> int:
    """The id of the first language."""
    first = len(files.get("vocab__json", ())) or len(judge_of(model)) + 1
    config = {"model_type": model_type, **STACKS, **FAIRSEQ, "vocab_size": first + 110}
    config |= {"tokenizer_class": "MBart50Tokenizer"} if model_type == "mbart" else {}
    write_model(folder / "theirs", config, sentencepiece__bpe__model=model, **files, **named(how, codes, first))
    values = json.loads((folder / "theirs" / "config.json").read_text())
    (folder / "theirs" / "config.json").write_text(json.dumps({**values, **config}))
    assert left_behind(import_huggingface(folder / "theirs", folder / "ours")) == []
    return first


def bytes_trained(space: bool) -> tokenizers.Tokenizer:
    """As `transformers` has BART's: by the library's own trainer and components, with BART's first ids."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=space)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special, alphabet = ["<s>", "<pad>", "</s>", "<unk>"], tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(two_languages()[0], trainer)
    backend.encode_special_tokens = True
    return backend


def bart_files(space: bool) -> tuple[tokenizers.Tokenizer, dict]:
    backend = bytes_trained(space)
    model = json.loads(backend.to_str())["model"]
    merges = "#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in model["merges"])
    return backend, dict(vocab__json={**model["vocab"], "<mask>": len(model["vocab"])}, merges__txt=merges)


def joint_vocabulary(source: bytes, target: bytes, without: int = 23) -> dict[str, int]:
    """As Marian counts it: the target's pieces too, and not all of the source's."""
    pieces = [piece for i, piece in enumerate(text_pieces(source)) if i % without != 5]
    tokens = dict.fromkeys(["</s>", "<unk>", *pieces, *text_pieces(target), *LANGUAGES, "<pad>"])
    return {token: id for id, token in enumerate(tokens)}


def marian_config(vocabulary: dict[str, int], **more) -> dict:
    ids = dict(pad_token_id=vocabulary["<pad>"], decoder_start_token_id=vocabulary["<pad>"], eos_token_id=0)
    return {"model_type": "marian", **STACKS, **ids, "vocab_size": len(vocabulary), **more}


KINDS = ("t5", "madlad", "nllb", "nllb of BPE", "m2m100", "marian", "marian apart", "bart", "bart, space first")


def checkpoint(kind: str, folder: Path) -> Path:
    """A checkpoint of one of `KINDS`, below `folder`."""
    theirs, ours = folder / "theirs", folder / "ours"
    first, second = two_languages()
    if kind == "t5":
        model = trained(first, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
        ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
        write_model(theirs, t5_config(judge_of(model), 100, **ids), spiece__model=model)
    elif kind == "madlad":
        model = trained(first, user_defined_symbols=["<2de>", "<2fr>"], byte_fallback=True)
        ids = dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=0)
        settings = {"extra_ids": 0, "pad_token": {"content": "<s>"}}
        write_model(theirs, t5_config(judge_of(model), 0, **ids), spiece__model=model, tokenizer_config__json=settings)
    elif kind.startswith("nllb"):
        model = trained(first, model_type="bpe" if kind.endswith("BPE") else "unigram")
        of_many_languages(folder, model, "m2m_100", CODES["nllb"], "numbered")
        return ours
    elif kind == "m2m100":
        model = trained(first)
        pieces = [piece for i, piece in enumerate(text_pieces(model)) if i % 23 != 5]
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "\u4e2d"]
        vocabulary = {token: id for id, token in enumerate(tokens)}
        of_many_languages(folder, model, "m2m_100", CODES["m2m_100"], "numbered", vocab__json=vocabulary)
        return ours
    elif kind.startswith("marian"):
        _marian(theirs, trained(first), trained(second), apart=kind.endswith("apart"))
    else:
        _, files = bart_files(space := kind.endswith("first"))
        config = {"model_type": "bart", **STACKS, **FAIRSEQ, "vocab_size": len(files["vocab__json"]) + 2}
        write_model(theirs, config, **files, tokenizer_config__json={"add_prefix_space": space})
    assert left_behind(import_huggingface(theirs, ours)) == []
    return ours


def _marian(folder: Path, source: bytes, target: bytes, apart: bool) -> None:
    if not apart:
        vocabulary = joint_vocabulary(source, target)
        files = dict(source__spm=source, target__spm=target, vocab__json=vocabulary)
        write_model(folder, marian_config(vocabulary), **files)
        return
    first, second = ({t: i for i, t in enumerate(["</s>", "<unk>", *text_pieces(side)])} for side in (source, target))
    size = max(len(first), len(second)) + 1
    for each in (first, second):
        each |= {f"<filler {i}>": i for i in range(len(each), size - 1)} | {"<pad>": size - 1}
    separate = dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=len(second))
    files = dict(source__spm=source, target__spm=target, vocab__json=first, target_vocab__json=second)
    settings = {"separate_vocabs": True}
    write_model(folder, marian_config(first, **separate), **files, tokenizer_config__json=settings)


def left_behind(notes: list[str]) -> list[str]:
    """Notes of an import but those on rows of the table that no token names, and on the languages that Marian's texts
    begin with, which small models here often have."""
    usual = ("rows of the table have no token", "languages: name one, or begin each text")
    return [note for note in notes if not any(words in note for words in usual)]
