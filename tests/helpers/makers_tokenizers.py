"""Small tokenizer.json files with the components of published decoders' ones, as their makers configure them.

GPT-2; Llama 2 (SentencePiece's BPE, bytes for letters that it lacks), its later form, and Phi-3 (tokens that take the
white space behind them); Llama 3 (an own pattern, whole words first, a start token); Qwen2 (NFC); Gemma; SmolLM2
(single digits); Mistral's tekken. Trained on a few lines here: the same bytes wherever it is done.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "the cat sat on the mat, and the hat is in the house",
    "They're here: we've 12345 things, it's 2024!",
    "größer Straße naïve café été",
    "def add(x, y):\n    return x + y\n\n\nprint(add(1, 2))",
    "Привет мир, 東京 タワー",
]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA, CHAT_ML = ["<unk>", "<s>", "</s>"], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL: dict[str, list[str]] = {
    "gpt2": ["<|endoftext|>"],
    "llama2": LLAMA,
    "llama2-metaspace": LLAMA,
    "phi3": LLAMA,
    "llama3": HEADERS,
    "qwen2": CHAT_ML,
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    "smollm2": CHAT_ML,
    "tekken": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
}
"""{kind: its control tokens}, in the order of their ids; Qwen's and Llama 3's stand behind the pieces."""
START = {
    "llama2": "<s>",
    "llama2-metaspace": "<s>",
    "phi3": "<s>",
    "llama3": HEADERS[0],
    "gemma": "<bos>",
    "tekken": "<s>",
}
"""The token that the file's own post-processor puts before a text."""

TEXTS = [
    "",
    " ",
    "the cat sat on the mat",
    "  two leading spaces and trailing  ",
    "tabs\tand\nnewlines\r\n\r\nend\n\n\n",
    "They're 12345 things; WE'VE 3.14 x 10^-7",
    "naïve café été, Привет мир, 東京タワー",
    "e\u0301 and \u1e9b\u0323, \u0915\u094d\u0937\u093f",
    "👩‍👩‍👧‍👦 🎉\u200b\u00a0\u3000.",
    "def add(x, y):\n    return x + y",
    "\x00\x7f\ufeff",
    "a{0} b {0}c{1}\n{1} d{2}",
    "<think>\nthe cat\n</think>\n\nhat",
]
"""In the last but one stand control tokens of the vocabulary."""


@cache
def makers_json(kind: str) -> str:
    """Return the text of a tokenizer.json."""
    pieces = kind in ("llama2", "llama2-metaspace", "phi3", "gemma")
    behind = kind in ("llama3", "qwen2", "gpt2")
    backend = tokenizers.Tokenizer(models.BPE())
    if pieces:
        backend.normalizer = normalizers.Replace(" ", "▁")
        alphabet = list("▁.,!?")
    else:
        backend.pre_tokenizer = _splits(kind)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    first = [] if behind else [*SPECIAL[kind], *([f"<0x{i:02X}>" for i in range(256)] if pieces else ())]
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 120 + 256 * (not pieces),
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=60 if pieces else 1000,
        show_progress=False,
    )
    backend.train_from_iterator(sorted({word for line in LINES for word in _words(line)}) if pieces else LINES, trainer)
    trained = json.loads(backend.to_str())["model"]
    unknown = "<unk>" if pieces or kind == "tekken" else None
    model = models.BPE(
        trained["vocab"],
        [tuple(pair) for pair in trained["merges"]],
        unk_token=unknown,
        fuse_unk=pieces,
        byte_fallback=pieces,
        ignore_merges=kind in ("llama3", "tekken"),
    )
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL[kind]])
    _configure(made, kind)
    return json.dumps(json.loads(made.to_str()), ensure_ascii=False, indent=2)  # without an end of line, as of theirs


def _words(line: str) -> list[str]:
    return [f" {word}" for word in line.split()]


def _splits(kind: str) -> Any:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm2":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    pattern = {"llama3": WORDS % "{1,3}", "qwen2": WORDS % "", "tekken": TEKKEN}[kind]
    return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), bytes_only])


def _configure(made: tokenizers.Tokenizer, kind: str) -> None:
    if kind in ("llama2", "phi3"):
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "llama2-metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    elif kind == "gemma":
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        made.pre_tokenizer = _splits(kind)
        made.normalizer = normalizers.NFC() if kind == "qwen2" else None
    if kind in ("llama2", "llama2-metaspace", "phi3", "gemma"):
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence(parts if kind == "gemma" else [*parts, decoders.Strip(" ", 1, 0)])
    else:
        made.decoder = decoders.ByteLevel()
    if kind == "phi3":
        tokens = ["<|user|>", "<|end|>", "<|assistant|>"]
        made.add_special_tokens([AddedToken(text, rstrip=True, normalized=False, special=True) for text in tokens])
    if kind == "qwen2":
        made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if kind == "gemma":
        made.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("\t\t", normalized=False)])
    if start := START.get(kind):
        id = made.token_to_id(start)
        template = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, id)]
        )
        made.post_processor = template
        if kind == "llama3":
            made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    elif kind != "llama2":
        made.post_processor = processors.ByteLevel(trim_offsets=False)


def hard_texts(kind: str) -> list[str]:
    names = SPECIAL[kind]
    return [text.format(names[-1], names[0], names[len(names) // 2]) if "{0}" in text else text for text in TEXTS]
