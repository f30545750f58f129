"""Text to token ids and back: byte-level BPE that this project trains, and the tokenizers of published models.

Trained here: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units" (BPE), over UTF-8
bytes (Radford et al. 2019, section 2.2), so that every string has ids and `decode(encode(s)) == s` byte for byte. The
vocabulary is joint, or separate for each language.

    0 to 3       <pad>, <s>, </s>, <unk> (never produced, but other programs expect it)
    4 to 259     the 256 bytes
    260 ...      merges, in the order in which they were learned
    last         <mask>, if the model restores hidden text

The file has only standard components (Split, ByteLevel, BPE, TemplateProcessing), so that `transformers` and
`transformers.js` give the same ids. There, `clean_up_tokenization_spaces` must be off, and `split_special_tokens` on if
"</s>" in a text should be text.

Published decoders (byte-level BPE or SentencePiece's BPE): their tokenizer.json is kept byte for byte and splits and
decodes text. The ids of end tokens are in the config.

Other published models: `sentencepiece_tokenizer` writes the file, with SentencePiece's pieces and the model's ids.
Decoded text may differ from the original, as the normalizer drops some characters. Encoders, e.g. with WordPiece, keep
the components of their own file (`families/encoder_text.py`).
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mlx_transformer.core.tokenizer_files import (
    DAMAGED,
    JOINT,
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    join_texts,
    read_tokenizer,
    side_texts,
    tokenizer_path,
)
from mlx_transformer.system.errors import UserError, error_line
from mlx_transformer.system.files import check_name, parse_json
from mlx_transformer.system.process import is_panic

from .added_tokens import SILENT, WHOLE, AddedToken, added_tokens, silent_contents, silent_pattern
from .pairs import Located, Pair, PairForm
from .published_ids import problem_of, roles_of, target_of, without_target
from .sentencepiece import is_whole
from .sentencepiece_tokenizer import (
    INNER_SPACES_PATTERN,
    OF_SPACES,
    ExactText,
    is_sentencepiece,
)

if TYPE_CHECKING:
    from mlx_transformer.core.checkpoint import Checkpoint
    from mlx_transformer.core.config import TransformerConfig
    from mlx_transformer.system.durable import Target

PAD, BOS, EOS, UNK = range(4)
MASK_TOKEN = "<mask>"

# Merges stay inside a match: a single digit, so that a number is copied digit by digit; a separator and the word or the
# punctuation after it; a run of separators. The caps of 32 keep the time linear for a word of a megabyte. Only classes
# that Oniguruma (Rust) and JavaScript define alike are used, so not `\s`.
SPLIT_PATTERN = (
    r"\p{N}"
    r"|\p{Z}?[\p{L}\p{M}]{1,32}"
    r"|\p{Z}?[^\p{L}\p{M}\p{N}\p{Z}]{1,32}"
    r"|\p{Z}{1,32}"
)
# Oniguruma backtracks, so that a hostile expression could take exponential time: only these are accepted. Published
# decoders have their own expressions; for those Oniguruma gives up after ten million steps.
TRUSTED_PATTERNS = frozenset({SPLIT_PATTERN, INNER_SPACES_PATTERN, *(each for x in OF_SPACES.values() for each in x)})
# Refused settings of a model: with the first two, some files make the library panic; the third makes encoding random.
FOREIGN = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")


class Tokenizer:
    """A tokenizer with a joint vocabulary, or with one for each language; made by `train`, `load` or `pair`.

    `source` tokenizes the input of a translator's encoder; all other methods are for the target, or for both.

    >>> tokenizer = Tokenizer.load("runs/mine")
    >>> tokenizer.decode(tokenizer.encode("Hello!"))
    'Hello!'
    """

    source: "Tokenizer"
    """The source language's tokenizer; this tokenizer itself if the vocabulary is joint."""

    pad_id: int
    bos_id: int
    """The decoder's start token; in a vocabulary without <s> the padding token."""
    eos_id: int
    unk_id: int
    is_makers: bool = False
    """Whether the file is a published decoder's own. `check_fits` then takes the ids of pad, bos and eos from the
    config."""

    def __init__(self, specification: str, origin: str = "tokenizer.json"):
        """specification: the text of a `tokenizer.json`, or of two joined by `tokenizer_files.join_texts`. origin: the
        file's name in errors. Raises UserError if it is damaged or not supported."""
        sides = side_texts(specification, origin)
        self.source = self
        if sides is not None:
            specification = sides["target"]
            self.source = Tokenizer(sides["source"], f"{origin}: source")
        self._text, self._specification = specification, _parse(specification, origin)
        self.is_makers = is_makers(self._specification)
        self._backend = read_backend(lambda: _untypable(self._specification) or specification, origin)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True  # "</s>" typed by a user is four characters, not an id
        roles = roles_of(self._specification)
        of_pieces = is_sentencepiece(self._specification) and not roles.get("as_written") and not self.is_makers
        self._mask = roles.get("mask")
        # <mask> takes the space before it, unless a published vocabulary has no lstrip for it.
        flags = {entry.get("id"): entry.get("lstrip") for entry in self._specification.get("added_tokens") or ()}
        self.mask_takes_space = not roles.get("as_written") or bool(flags.get(self._mask))
        self._published = of_pieces or bool(roles) or self.is_makers
        self._read_added(roles)
        if self.is_makers:
            if not self._backend.get_vocab():
                raise UserError(f"{origin}: its vocabulary is empty; download it again")
            self._exact = None
            self.pad_id = self.bos_id = self.eos_id = -1
            unknown = self._specification["model"].get("unk_token")
            known = None if unknown is None else self._backend.token_to_id(unknown)
            self.unk_id = -1 if known is None else known
            return
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = (
            _listed_ids(self._backend, roles, origin) if roles else _special_ids(self._backend, of_pieces, origin)
        )
        _check(self._backend, self.eos_id, origin)
        self._exact = ExactText(self._specification) if of_pieces else None
        if (target := target_of(self._specification)) is not None:
            self.source = Tokenizer(json.dumps(without_target(self._specification)), origin)
            self._exact = Tokenizer(json.dumps(target), f"{origin}: target")._cutter(self, origin)

    def _read_added(self, roles: Mapping[str, Any]) -> None:
        """Read which added tokens are dropped from decoded text, and which are surrounded by spaces."""
        self._silent = frozenset(roles.get(SILENT, ()))
        spoken = {*roles.get(WHOLE, ())} - self._silent
        self._apart, self._strips = frozenset(spoken if roles.get("apart") else ()), roles.get("strips") is True
        pieces = self._specification["model"].get("vocab")
        own = roles.get("as_written") and isinstance(pieces, list)
        control = [token.id for token in added_tokens(self._specification) if token.special and own]
        self._roles_in_pieces = frozenset(id for id in control if id < len(pieces or ()))

    def _cutter(self, whole: "Tokenizer", origin: str) -> ExactText:
        """The encoder of the target's text. Raises `UserError` if its vocabulary differs from that of `whole`."""
        if self._exact is None or (self.vocab_size, self.eos_id) != (whole.vocab_size, whole.eos_id):
            raise UserError(f"{origin}: the target's pieces don't fit its vocabulary; import the model again")
        return self._exact

    @classmethod
    def train(
        cls, lines: Iterable[str], vocab_size: int = 8000, min_frequency: int = 2, mask: bool = False
    ) -> "Tokenizer":
        """Learn merges from `lines` (both languages together) until there are `vocab_size` ids.

        The same lines in any order, on any machine, give the same tokenizer. It has fewer ids if no more pair of tokens
        occurs `min_frequency` times. mask: add <mask> as the last id. Raises UserError for a `vocab_size` below 260 (4
        special tokens and 256 bytes) and for text that isn't Unicode.
        """
        if vocab_size < MIN_VOCAB_SIZE:
            raise UserError(
                "{vocab_size} is {}; at least {} are needed (4 special, 256 bytes)", vocab_size, MIN_VOCAB_SIZE
            )
        backend = tokenizers.Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[UNK]))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=max(MIN_VOCAB_SIZE, vocab_size - mask),
            min_frequency=min_frequency,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(unicode_texts(lines), trainer)
        if mask:
            backend.add_special_tokens([tokenizers.AddedToken(MASK_TOKEN, special=True, normalized=False)])
        return cls(backend.to_str(), origin="trained tokenizer")

    @classmethod
    def pair(cls, source: "Tokenizer", target: "Tokenizer") -> "Tokenizer":
        """Make a tokenizer with separate vocabularies from one of each language."""
        return cls(join_texts(source.own_json(), target.own_json()), origin="tokenizers")

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a `tokenizer.json`, or a folder's tokenizer files. Raises UserError if missing, damaged or
        unsupported."""
        check_name(path := Path(path))
        if path.is_dir():
            path = tokenizer_path(path) or path / JOINT
        if not path.exists():
            raise UserError(f"{path}: no such tokenizer file; give a tokenizer.json or a folder that has one")
        return cls(read_tokenizer(path), origin=str(path))

    def save(self, path: "Target", force: bool = False) -> None:
        """Write `tokenizer.json` to the file `path`; `force` replaces an earlier file. Equal tokenizers give equal
        bytes."""
        from mlx_transformer.core.outputs import Kind, claim, holds_object
        from mlx_transformer.system.durable import write_text  # lazy: not needed to run a model

        write_text(claim(path, Kind("tokenizer", holds_object("model")), force), self.to_json())

    def to_json(self) -> str:
        """The text that `save` writes; separate vocabularies are joined in it."""
        return join_texts(self.source.own_json(), self.own_json()) if self.separate else self.own_json()

    def own_json(self) -> str:
        """The text of `tokenizer.json`; with separate vocabularies only the target's."""
        if self.is_makers:
            return self._text
        return json.dumps(self._specification, ensure_ascii=False, indent=1) + "\n"

    @property
    def separate(self) -> bool:
        """Whether source and target have separate vocabularies. (A joint vocabulary may have two SentencePiece
        models.)"""
        return self.source is not self and target_of(self._specification) is None

    def encode(self, text: str) -> list[int]:
        """Tokenize a text. The ids end with `eos_id` and have no `bos_id`.

        A published decoder's file may add other tokens, e.g. a start token, or none. Its control tokens, e.g.
        <|im_end|>, are split like any text (see `encode_control`). Raises UserError for text that isn't Unicode.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts in parallel, each as `encode` does."""
        try:
            if not all(isinstance(text, str) for text in texts):  # the library takes a tuple for a pair of texts
                raise TypeError
            if self._exact is not None:
                return [encoding.ids for encoding in self._exact.encodings(texts)]
            with _giving_up():
                return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]
        except (UnicodeEncodeError, TypeError):
            for _ in unicode_texts(texts):  # raises an error with the text's number
                pass
            raise

    def prompts(self, texts: Sequence[str], control: bool = False) -> list[list[int]]:
        """Tokenize prompts for a decoder: without an end token, with a start token if the vocabulary uses one. An empty
        text becomes the start token.

        control: spelled control tokens become tokens; a start token at the beginning of a text isn't doubled.
        """
        if control:
            plain, start = [self.encode_control(text) for text in texts], self.start
            return [ids if start and ids[: len(start)] == start else [*start, *ids] or [self.bos_id] for ids in plain]
        rows = self.encode_batch(texts)
        if not self.is_makers:
            return [[self.bos_id, *ids[:-1]] for ids in rows]
        behind = len(self.ends[1])
        return [ids[: len(ids) - behind] or [self.bos_id] for ids in rows]

    @property
    def start(self) -> list[int]:
        """The start token before a decoder's texts, as a list; [] if a published vocabulary adds none."""
        return self.ends[0] if self.is_makers else [self.bos_id]

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts to train a decoder on: no start token, and an end token."""
        rows = self.encode_batch(texts)
        if not self.is_makers:
            return rows
        before, behind = map(len, self.ends)
        return [[*ids[before : len(ids) - behind], self.eos_id] for ids in rows]

    @cached_property
    def control_tokens(self) -> list[str]:
        """Spellings of the control tokens, e.g. <|im_end|>."""
        return [token.content for token in added_tokens(self._specification) if token.special]

    def encode_control(self, text: str, mark: str = "") -> list[int]:
        """Tokenize a text in which spelled control tokens become tokens; adds no start or end token.

        mark: a control token with this character after its first stays text; the mark is removed.
        """
        backend, ids, nonce = self._control
        places = {token: i for i, token in enumerate(self.control_tokens)}
        pattern = "|".join(map(re.escape, sorted(places, key=len, reverse=True))) or r"(?!)"
        text = re.sub(pattern, lambda found: f"{nonce}{places[found[0]]}{nonce}", text)
        [plain] = unicode_texts([text.replace(mark, "") if mark else text])
        with _giving_up():
            return [ids.get(id, id) for id in backend.encode(plain, add_special_tokens=False).ids]

    @cached_property
    def _control(self) -> tuple[tokenizers.Tokenizer, dict[int, int], str]:
        """(a tokenizer whose control tokens have random spellings, so that no text has them by chance; {its id: id};
        the random string around each spelling)."""
        if self._exact is not None:
            raise UserError("control tokens in a text are not supported for SentencePiece vocabularies of translators")
        backend, nonce = tokenizers.Tokenizer.from_str(self.own_json()), f"\U0010fffd{secrets.token_hex(16)}"
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        tokens = [token for token in added_tokens(self._specification) if token.special]
        others = [
            tokenizers.AddedToken(
                f"{nonce}{i}{nonce}",
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for i, token in enumerate(tokens)
        ]
        backend.add_tokens(others)
        places = backend.get_vocab(with_added_tokens=True)
        ids = {places[other.content]: token.id for other, token in zip(others, tokens, strict=True)}
        return backend, ids, nonce

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after each text."""
        whole, plain = (self._backend.encode("a", add_special_tokens=special).ids for special in (True, False))
        first = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:first], whole[first + len(plain) :]

    def encode_places(self, texts: Sequence[str]) -> list[Located]:
        """Tokenize texts as `encode_batch` does, with the place of each token in its text."""
        plain = list(unicode_texts(texts))
        if self._exact is not None:
            return self._exact.located(plain)
        return [Located.of(encoding) for encoding in self._backend.encode_batch(plain)]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_length: int | None = None) -> list[Pair]:
        """Tokenize pairs of texts, each to a row of at most `max_length` tokens by the tokenizer's template for pairs.

        Raises UserError for a tokenizer without this template."""
        form = self.pair_form(max_length)
        texts = list(unicode_texts(text for pair in pairs for text in pair))
        if self._exact is None:
            ids = [each.ids for each in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            ids = [each.alone().ids for each in self._exact.located(texts)]
        return [form.row(*both) for both in zip(ids[::2], ids[1::2], strict=True)]

    def pair_form(self, max_length: int | None = None) -> PairForm:
        """The template for pairs of texts, for rows of at most `max_length` tokens. Raises `UserError` without one."""
        return PairForm(self._specification, max_length)

    def encode_words(self, texts: Sequence[str]) -> list[list[int]]:
        """The number of the word of each token of `encode_batch(texts)`; eos counts as a word."""
        encodings = self._backend.encode_batch(list(texts)) if self._exact is None else self._exact.encodings(texts)
        return [[last if word is None else word for word in e.word_ids] for e in encodings for last in [len(e.ids)]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Special tokens and <unk> are left out; invalid UTF-8 becomes U+FFFD."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Decode many sequences in parallel, each as `decode` does."""
        unsaid = self._silent | self._roles_in_pieces
        rows = [[id for id in ids if id not in unsaid] if unsaid else list(ids) for ids in batch]
        texts = self._backend.decode_batch(rows, skip_special_tokens=True)
        texts = [text.strip() for text in texts] if self._strips else texts
        for i, ids in enumerate(rows if self._apart else ()):
            if not self._apart.isdisjoint(ids):
                texts[i] = self._decoded_apart(ids)
        return texts

    def _decoded_apart(self, ids: Sequence[int]) -> str:
        """Decode with a space on each side of an added token."""
        parts: list[str] = []
        runs = [(is_token, [*run]) for is_token, run in groupby(self._without_special(ids), self._apart.__contains__)]
        for i, (is_token, run) in enumerate(runs):
            texts = [*map(self.token, run)] if is_token else [self._backend.decode(run).strip()]
            # Joined as in transformers, where an empty text counts only at the end.
            parts += texts if i + 1 == len(runs) else filter(None, texts)
        return " ".join(parts)

    def _without_special(self, ids: Sequence[int]) -> Iterator[int]:
        return (id for id in ids if id not in self.special_ids)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of bytes in SentencePiece's byte fallback. A run of them is decoded as a whole: to characters if it is
        valid UTF-8, else to U+FFFD for each byte."""
        if "ByteFallback" not in {part.get("type") for part in self._decoders()}:
            return frozenset()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return frozenset(id for byte in range(256) if (id := vocabulary.get(f"<0x{byte:02X}>")) is not None)

    @cached_property
    def decodes_in_parts(self) -> bool:
        """Whether the text of ids is the joined text of their parts, apart from a space at the beginning of a part and
        from characters of several ids."""
        local = {
            "ByteLevel": {},
            "ByteFallback": {},
            "Fuse": {},
            "Metaspace": {},
            "Strip": {"stop": (0,), "start": (0, 1)},
        }
        local["Replace"] = {"pattern": ({"String": "\u2581"},)}
        return not (self._strips or self._apart) and all(
            part.get("type") in local and all(part[key] in values for key, values in local[part["type"]].items())
            for part in self._decoders()
        )

    def _decoders(self) -> list[Mapping[str, Any]]:
        decoder = self._specification.get("decoder") or {}
        return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]

    def stands_for_text(self, id: int) -> bool:
        """Whether the id is in the vocabulary and not special, so that decoded text may show it."""
        return id not in self.special_ids and self._backend.id_to_token(id) is not None

    def token(self, id: int) -> str:
        """An id's spelling in the vocabulary, for reports; byte-level BPE spells bytes as letters. Raises `UserError`
        for an id outside the vocabulary."""
        token = self._backend.id_to_token(id)
        if token is None:
            raise UserError(f"token id {id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return token.removesuffix(" ") if id in self._roles_in_pieces else token

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoded text leaves out, <mask> included."""
        return frozenset(token.id for token in added_tokens(self._specification) if token.special) | self._silent

    @cached_property
    def added(self) -> list[AddedToken]:
        """Tokens that the model's maker added; `special` is as the maker set it. See `added_tokens`."""
        prefixes = roles_of(self._specification).get("prefixes")
        whole = {*roles_of(self._specification).get(WHOLE, ())}
        tokens = [token for token in added_tokens(self._specification) if not token.special]
        return [
            token._replace(special=token.id in self._silent) for token in tokens if token.id in whole or not prefixes
        ]

    @property
    def merges(self) -> list[list[str]] | None:
        """The merges (pairs of tokens) in order of learning; None for published vocabularies."""
        return None if self._published else self._specification["model"]["merges"]

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token; None if the vocabulary has none."""
        return self._backend.token_to_id(MASK_TOKEN) if self._mask is None else self._mask

    @property
    def mask_token(self) -> str:
        """The mask token's spelling, e.g. "<mask>" or "[MASK]"."""
        return MASK_TOKEN if self._mask is None else self.token(self._mask)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included. For a published decoder, which may skip ids, the last id + 1."""
        if self.is_makers:
            return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return self._backend.get_vocab_size(with_added_tokens=True)

    def check_fits(self, config: "TransformerConfig", where: str) -> None:
        """Raise `UserError` unless the ids fit a model of this config. where: the model's name, for errors.

        A published decoder's tokenizer gets its ids of pad, bos and eos from the config."""
        if self.is_makers:
            if config.architecture != "decoder" and config.head.kind != "hidden":  # hidden: text vectors
                raise UserError(f"{where}/tokenizer.json: is a published decoder's, not an {config.architecture}'s")
            self.pad_id, self.bos_id, self.eos_id = config.pad_id, config.bos_id, config.eos_id
        special, smallest = (self.pad_id, self.bos_id, self.eos_id), min(config.source_vocab_size, config.vocab_size)
        if self.separate:
            if config.architecture != "encoder-decoder":
                raise UserError(
                    f"{where}: architecture={config.architecture!r} has one vocabulary, but its tokenizer has two"
                )
            if config.one_embedding:
                raise UserError(
                    f"{where}: tie_embeddings={config.tie_embeddings!r} shares an embedding between the languages, but "
                    "their vocabularies are separate: choose target-output or none"
                )
            smallest = config.vocab_size
            if (size := self.source.vocab_size) > config.source_vocab_size:
                raise UserError(
                    f"{where}: source tokenizer of {size} tokens, but the model has {config.source_vocab_size}"
                )
        if self.vocab_size > smallest:
            raise UserError(f"{where}: tokenizer of {self.vocab_size} tokens, but the model has {smallest}")
        if special != (config.pad_id, config.bos_id, config.eos_id):
            raise UserError(f"{where}: the ids of pad, bos and eos differ between tokenizer {special} and config")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON; equal only for equal tokenizers."""
        specification = {"source": self.source._specification, "target": self._specification}
        chosen = specification if self.separate else self._specification
        canonical = json.dumps(chosen, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


@contextmanager
def _giving_up() -> Iterator[None]:
    """Raise `UserError` if a file's own regular expression exceeds the library's limit of steps."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(
            f"the tokenizer's own regular expression takes too long on this text ({error_line(error)}): shorten the "
            "text, or download the tokenizer again"
        ) from None


def is_makers(specification: Mapping[str, Any]) -> bool:
    """Whether a parsed tokenizer.json is a published decoder's own, i.e. BPE and not written by this project."""
    model = specification.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
        return False
    if roles_of(specification):
        return False
    before, processor = specification.get("pre_tokenizer"), specification.get("post_processor")
    if is_sentencepiece(dict(specification)) and isinstance(processor, dict):
        template = processor.get("single")  # in our files it ends with an end token
        return not (isinstance(template, list) and template and "SpecialToken" in template[-1])
    parts = before.get("pretokenizers") if isinstance(before, dict) else None
    kinds = [isinstance(part, dict) and part.get("type") for part in parts] if isinstance(parts, list) else []
    ids = {token.content for token in added_tokens(specification) if token.id < len(SPECIAL_TOKENS)}
    return kinds != ["Split", "ByteLevel"] or ids != {*SPECIAL_TOKENS}


def read_backend(specification: Callable[[], str], origin: str) -> tokenizers.Tokenizer:
    """Parse a tokenizer.json with the library `tokenizers`. Raises `UserError` if it can't."""
    try:
        return tokenizers.Tokenizer.from_str(specification())
    except BaseException as error:  # Rust raises bare Exception for errors, and PanicException for panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(f"{origin}: not a tokenizer that `tokenizers` can read ({error_line(error)})") from None


def _parse(text: str, origin: str) -> dict[str, Any]:
    specification = parse_json(text, f"{origin}: not JSON", DAMAGED)
    if not isinstance(specification, dict) or not isinstance(specification.get("model"), dict):
        raise UserError(f'{origin}: not a tokenizer.json ("model" is missing)')
    model = specification["model"]
    words = model.get("type") == "WordPiece"
    if words and (not isinstance(model.get("vocab"), dict) or model.get("unk_token") not in model["vocab"]):
        raise UserError(f"{origin}: its unk_token {model.get('unk_token')!r:.60} is not in its vocabulary")
    for name in FOREIGN:
        if (value := model.get(name)) and not (words and name == "continuing_subword_prefix"):
            raise UserError(f"{origin}: its model has {name}={value!r:.60}, which is not supported; train a tokenizer")
    check_parts(specification, origin)
    for pattern in () if is_makers(specification) else _patterns(specification):
        if pattern not in TRUSTED_PATTERNS and pattern != silent_pattern(silent_contents(specification)):
            raise UserError(f"{origin}: has the unknown regular expression {pattern[:60]!r}; train a tokenizer anew")
    return specification


def _untypable(specification: Mapping[str, Any]) -> str | None:
    """Add a space to the special pieces of a published Unigram tokenizer.json, so that no text spells them.

    Returns the new file's text; None for other files.
    """
    model = specification["model"]
    if not roles_of(specification).get("as_written") or not isinstance(pieces := model.get("vocab"), list):
        return None
    control = {token.content for token in added_tokens(specification) if token.special and token.id < len(pieces)}
    added = [entry for entry in specification["added_tokens"] if entry.get("content") not in control]
    renamed = [[f"{piece[0]} ", *piece[1:]] if piece and piece[0] in control else piece for piece in pieces]
    return json.dumps({**specification, "added_tokens": added, "model": {**model, "vocab": renamed}})


def check_parts(specification: Mapping[str, Any], origin: str) -> None:
    """Raise `UserError` for damage on which the library `tokenizers` would panic and write a stack trace."""
    _check_precompiled(specification.get("normalizer"), origin)
    _check_template(specification.get("post_processor"), origin)


def _check_precompiled(normalizer: Any, origin: str) -> None:
    if not isinstance(normalizer, dict):
        return
    inside = normalizer.get("normalizers")
    for inner in inside if isinstance(inside, list) else ():
        _check_precompiled(inner, origin)
    if normalizer.get("type") == "Precompiled" and not is_whole(normalizer.get("precompiled_charsmap")):
        raise UserError(f"{origin}: the table of its Precompiled normalizer is damaged; restore it from a copy")


def _check_template(processor: Any, origin: str) -> None:
    if not isinstance(processor, dict):
        return
    inside = processor.get("processors")
    for inner in inside if isinstance(inside, list) else ():
        _check_template(inner, origin)
    listed = processor.get("special_tokens")
    for form in ("single", "pair") if isinstance(listed, dict) else ():
        parts = processor.get(form)
        for part in parts if isinstance(parts, list) else ():
            token = part.get("SpecialToken") if isinstance(part, dict) else None
            if isinstance(token, dict) and isinstance(token.get("id"), str) and token["id"] not in listed:
                raise UserError(f"{origin}: post_processor: {token['id']!r:.60} isn't one of its special_tokens")


def _patterns(node: Any) -> Iterator[str]:
    """Yield the regular expressions in a parsed tokenizer.json; its large tables are skipped."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "Regex":
                yield str(value)
            elif key not in ("vocab", "merges"):
                yield from _patterns(value)
    elif isinstance(node, list):
        for value in node:
            yield from _patterns(value)


def _special_ids(backend: tokenizers.Tokenizer, published: bool, origin: str) -> tuple[int, ...]:
    """Ids of pad, bos, eos and unk: 0 to 3, except in published vocabularies."""
    ids = {token: backend.token_to_id(token) for token in SPECIAL_TOKENS}
    if published:
        ids["<s>"] = ids["<pad>"] if ids["<s>"] is None else ids["<s>"]
        if missing := [token for token, id in ids.items() if id is None]:
            raise UserError(f"{origin}: has no {' and no '.join(missing)}; import the model again")
        return tuple(id for id in ids.values() if id is not None)
    for id, token in enumerate(SPECIAL_TOKENS):
        if ids[token] != id:
            raise UserError(f"{origin}: {token} has id {ids[token]}, expected {id}; train a tokenizer anew")
    return PAD, BOS, EOS, UNK


def _listed_ids(backend: tokenizers.Tokenizer, roles: Mapping[str, Any], origin: str) -> tuple[int, ...]:
    """Ids of pad, bos, eos and unk in the file's roles; by default eos is </s> and unk is <unk>."""
    end = roles.get("eos", backend.token_to_id("</s>"))
    unknown = roles.get("unk", backend.token_to_id("<unk>"))
    problem = problem_of(roles, backend.get_vocab_size())
    if end is None or unknown is None or problem:
        raise UserError(f"{origin}: {problem or 'has no </s> or no <unk>'}; import the model again")
    return roles["pad"], roles["bos"], end, unknown


def _check(backend: tokenizers.Tokenizer, eos: int, origin: str) -> None:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError(f"{origin}: ids are not 0 to {len(vocabulary) - 1} without gaps; train a tokenizer anew")
    if backend.encode("a").ids[-1:] != [eos]:
        raise UserError(f"{origin}: doesn't end texts with </s>; train a tokenizer anew")


def checked_tokenizer(checkpoint: "Checkpoint") -> str | None:
    """The text of a checkpoint's tokenizer.json; None without a tokenizer.

    Raises `UserError` if the file is damaged or doesn't fit the config.
    """
    text = checkpoint.tokenizer_json()
    if text is not None:
        Tokenizer(text, str(checkpoint.tokenizer_path)).check_fits(checkpoint.config, str(checkpoint.folder))
    return text


def unicode_texts(lines: Iterable[str]) -> Iterator[str]:
    """Yield the texts. Raises `UserError` for a text with a lone surrogate, which UTF-8 can't encode."""
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise UserError(f"text {number}: must be text, not {type(line).__name__}")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text {number} holds a lone surrogate at character {error.start + 1}; "
                'leave it out, or read the file with errors="replace"'
            ) from None
        yield line
