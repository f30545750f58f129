"""Text to token ids and back, exactly: byte-level BPE in a plain `tokenizer.json`, joint or separate by language.

Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units" (BPE), over UTF-8 bytes
(Radford et al. 2019, section 2.2), so that every string has ids and `decode(encode(s)) == s` holds byte for byte.

Ids: `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3 (never produced, but other programs expect it), the 256 bytes 4 to 259,
then the merges in the order they were learned, and `<mask>` last, if the model restores hidden text. The file holds
standard components only (Split, ByteLevel, BPE, TemplateProcessing), so `transformers` and `transformers.js` read it
unchanged and give the same ids. There `clean_up_tokenization_spaces` must be off, and `split_special_tokens` on to
treat "</s>" in a text as text.

A published decoder's file (byte-level BPE or SentencePiece's BPE) is kept byte for byte: its own components cut text,
begin it (perhaps with a start token) and decode it. It doesn't say what ends an output; the config does.

For other published models `sentencepiece_tokenizer` writes the file: SentencePiece's pieces with the model's ids.
Decoded text isn't always the original, as the normaliser drops some characters. Published encoders, e.g. with
WordPiece, cut text as their own file says (`families/encoder_text.py`).
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

# The text that a merge may span: a separator and the word or the punctuation after it; a single digit, so that copying
# a number is compositional; a run of separators. The caps keep a word of a megabyte linear in time. Only classes that
# Oniguruma (Rust) and JavaScript define alike are used, so not `\s`.
SPLIT_PATTERN = (
    r"\p{N}"
    r"|\p{Z}?[\p{L}\p{M}]{1,32}"
    r"|\p{Z}?[^\p{L}\p{M}\p{N}\p{Z}]{1,32}"
    r"|\p{Z}{1,32}"
)
# Oniguruma backtracks, so a file's own expression could take exponential time. Only these are run, but for a published
# decoder's, each of which has its own: there Oniguruma gives up after ten million steps.
TRUSTED_PATTERNS = frozenset({SPLIT_PATTERN, INNER_SPACES_PATTERN, *(each for x in OF_SPACES.values() for each in x)})
# Settings of a BPE model: with the first two some files end a thread of the library, the third makes encoding random.
FOREIGN = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")


class Tokenizer:
    """A joint vocabulary of both languages, or a vocabulary for each; made by `train`, `load` or `pair`.

    `source` tokenizes the input of a translator's encoder; everything else here is for the target, or for both.
    """

    source: "Tokenizer"
    """The source language's tokenizer; this tokenizer itself if the vocabulary is joint."""

    pad_id: int
    bos_id: int
    """The token that decoders start with; in a vocabulary without <s> the padding token."""
    eos_id: int
    unk_id: int
    is_makers: bool = False
    """Whether the file is a published decoder's own. Its ids of pad, bos and eos then come from the config, by
    `check_fits`."""

    def __init__(self, specification: str, origin: str = "tokenizer.json"):
        """specification: the text of a `tokenizer.json`, or of two joined by `tokenizer_files.join_texts`. origin: its
        name in errors. Raises UserError if it can't be read."""
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
        # A space before <mask> belongs to it, but in published vocabularies that don't say so.
        flags = {entry.get("id"): entry.get("lstrip") for entry in self._specification.get("added_tokens") or ()}
        self.mask_takes_space = not roles.get("as_written") or bool(flags.get(self._mask))
        self._published = of_pieces or bool(roles) or self.is_makers
        self._read_added(roles)
        if self.is_makers:
            if not self._backend.get_vocab():
                raise UserError(f"{origin}: holds no tokens; take it from its maker")
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
        """Read which tokens decoded text leaves out, and which it surrounds with spaces."""
        self._silent = frozenset(roles.get(SILENT, ()))
        spoken = {*roles.get(WHOLE, ())} - self._silent
        self._apart, self._strips = frozenset(spoken if roles.get("apart") else ()), roles.get("strips") is True
        pieces = self._specification["model"].get("vocab")
        own = roles.get("as_written") and isinstance(pieces, list)
        control = [token.id for token in added_tokens(self._specification) if token.special and own]
        self._roles_in_pieces = frozenset(id for id in control if id < len(pieces or ()))

    def _cutter(self, whole: "Tokenizer", origin: str) -> ExactText:
        """Return the encoder of the target's text, which gives the ids of `whole`."""
        if self._exact is None or (self.vocab_size, self.eos_id) != (whole.vocab_size, whole.eos_id):
            raise UserError(f"{origin}: its target's pieces are none of its own; import the model again")
        return self._exact

    @classmethod
    def train(
        cls, lines: Iterable[str], vocab_size: int = 8000, min_frequency: int = 2, mask: bool = False
    ) -> "Tokenizer":
        """Learn merges from `lines` (both languages together) until `vocab_size` ids exist.

        The result depends only on the multiset of lines, not on their order or on the machine. It is smaller than
        `vocab_size` if no pair of tokens occurs `min_frequency` times any more. mask: the last id is <mask>. Raises
        UserError for a `vocab_size` below 260 (4 special tokens and 256 bytes) and for text that is not Unicode.
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
        """Join the languages' vocabularies into a tokenizer with separate vocabularies."""
        return cls(join_texts(source.own_json(), target.own_json()), origin="tokenizers")

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a `tokenizer.json`, or a folder's tokenizer files. Raises UserError if missing, broken or not ours."""
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
        from mlx_transformer.system.durable import write_text  # running a model does without

        write_text(claim(path, Kind("tokenizer", holds_object("model")), force), self.to_json())

    def to_json(self) -> str:
        """Return the text that `save` writes; separate vocabularies are joined in it."""
        return join_texts(self.source.own_json(), self.own_json()) if self.separate else self.own_json()

    def own_json(self) -> str:
        """Return the text of `tokenizer.json`; of separate vocabularies the target's."""
        if self.is_makers:
            return self._text
        return json.dumps(self._specification, ensure_ascii=False, indent=1) + "\n"

    @property
    def separate(self) -> bool:
        """Whether source and target have separate vocabularies. (A joint vocabulary may still have two cutters.)"""
        return self.source is not self and target_of(self._specification) is None

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; the ids end with `eos_id` and have no `bos_id`. UserError for text that isn't Unicode.

        A published decoder's file decides itself what surrounds a text, mostly nothing or a start token. Its control
        tokens, e.g. <|im_end|>, count as text if they are typed.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts at once as `encode` does, in parallel."""
        try:
            if not all(isinstance(text, str) for text in texts):  # of a tuple the library makes a pair
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
        """Tokenize prompts for a decoder: without an end token, and with a start token if the vocabulary uses it. An
        empty text is just the start token. control: spelled control tokens count as tokens, and a start token that a
        text begins with isn't doubled."""
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
        """The start token before a decoder's texts; [] in a maker's vocabulary whose texts have none."""
        return self.ends[0] if self.is_makers else [self.bos_id]

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts that a decoder learns to write after a start token; the ids end with the end token."""
        rows = self.encode_batch(texts)
        if not self.is_makers:
            return rows
        before, behind = map(len, self.ends)
        return [[*ids[before : len(ids) - behind], self.eos_id] for ids in rows]

    @cached_property
    def control_tokens(self) -> list[str]:
        """The spellings of control tokens, e.g. <|im_end|>."""
        return [token.content for token in added_tokens(self._specification) if token.special]

    def encode_control(self, text: str, mark: str = "") -> list[int]:
        """Tokenize a text whose spelled control tokens count as tokens. A `mark` after a spelling's first character
        makes it text again; the mark is removed. Adds no start or end token."""
        backend, ids, nonce = self._control
        places = {token: i for i, token in enumerate(self.control_tokens)}
        pattern = "|".join(map(re.escape, sorted(places, key=len, reverse=True))) or r"(?!)"
        text = re.sub(pattern, lambda found: f"{nonce}{places[found[0]]}{nonce}", text)
        [plain] = unicode_texts([text.replace(mark, "") if mark else text])
        with _giving_up():
            return [ids.get(id, id) for id in backend.encode(plain, add_special_tokens=False).ids]

    @cached_property
    def _control(self) -> tuple[tokenizers.Tokenizer, dict[int, int], str]:
        """(the vocabulary with control tokens spelled randomly, so that no text has them by chance; {id there: id}; the
        random string around each spelling)."""
        if self._exact is not None:
            raise UserError("a vocabulary of SentencePiece's for translators has no control tokens in a text")
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
        """The ids that the file puts before and after each text."""
        whole, plain = (self._backend.encode("a", add_special_tokens=special).ids for special in (True, False))
        first = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:first], whole[first + len(plain) :]

    def encode_places(self, texts: Sequence[str]) -> list[Located]:
        """Tokenize texts as `encode_batch` does, with each token's characters in the text."""
        plain = list(unicode_texts(texts))
        if self._exact is not None:
            return self._exact.located(plain)
        return [Located.of(encoding) for encoding in self._backend.encode_batch(plain)]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_length: int | None = None) -> list[Pair]:
        """Tokenize pairs of texts, each pair a row of at most `max_length` tokens in the vocabulary's form for pairs.

        Raises UserError for a vocabulary without such a form."""
        form = self.pair_form(max_length)
        texts = list(unicode_texts(text for pair in pairs for text in pair))
        if self._exact is None:
            ids = [each.ids for each in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            ids = [each.alone().ids for each in self._exact.located(texts)]
        return [form.row(*both) for both in zip(ids[::2], ids[1::2], strict=True)]

    def pair_form(self, max_length: int | None = None) -> PairForm:
        """How a pair becomes a row of at most `max_length` tokens. UserError for a vocabulary without pairs."""
        return PairForm(self._specification, max_length)

    def encode_words(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the word number of each token of `encode_batch(texts)`; eos has a number of its own."""
        encodings = self._backend.encode_batch(list(texts)) if self._exact is None else self._exact.encodings(texts)
        return [[last if word is None else word for word in e.word_ids] for e in encodings for last in [len(e.ids)]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens, <unk> included; invalid UTF-8 becomes U+FFFD."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Decode many sequences at once as `decode` does, in parallel."""
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
            # As transformers joins them: an empty text counts at the end alone.
            parts += texts if i + 1 == len(runs) else filter(None, texts)
        return " ".join(parts)

    def _without_special(self, ids: Sequence[int]) -> Iterator[int]:
        return (id for id in ids if id not in self.special_ids)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of single bytes (SentencePiece's byte fallback). A run of them is decoded as a whole: to characters if it
        is UTF-8, else to a U+FFFD for each byte."""
        if "ByteFallback" not in {part.get("type") for part in self._decoders()}:
            return frozenset()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return frozenset(id for byte in range(256) if (id := vocabulary.get(f"<0x{byte:02X}>")) is not None)

    @cached_property
    def decodes_in_parts(self) -> bool:
        """Whether ids can be decoded in parts whose texts are joined, apart from a space at a part's beginning and from
        characters made of several ids."""
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
        """Return whether decoded text may show this id."""
        return id not in self.special_ids and self._backend.id_to_token(id) is not None

    def token(self, id: int) -> str:
        """Return an id's spelling in the vocabulary, for reports; ByteLevel shows bytes as letters."""
        token = self._backend.id_to_token(id)
        if token is None:
            raise UserError(f"token id {id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return token.removesuffix(" ") if id in self._roles_in_pieces else token

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text, <mask> among them."""
        return frozenset(token.id for token in added_tokens(self._specification) if token.special) | self._silent

    @cached_property
    def added(self) -> list[AddedToken]:
        """The maker's added tokens, each a single id wherever it stands in a text. `special` is as the maker set it."""
        prefixes = roles_of(self._specification).get("prefixes")
        whole = {*roles_of(self._specification).get(WHOLE, ())}
        tokens = [token for token in added_tokens(self._specification) if not token.special]
        return [
            token._replace(special=token.id in self._silent) for token in tokens if token.id in whole or not prefixes
        ]

    @property
    def merges(self) -> list[list[str]] | None:
        """The merges (pairs of tokens) in order; None for a vocabulary that doesn't merge bytes."""
        return None if self._published else self._specification["model"]["merges"]

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token; None if the vocabulary has no such token."""
        return self._backend.token_to_id(MASK_TOKEN) if self._mask is None else self._mask

    @property
    def mask_token(self) -> str:
        """Its spelling, "<mask>" or "[MASK]"."""
        return MASK_TOKEN if self._mask is None else self.token(self._mask)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids with special tokens, at most the embedding's rows. A published decoder may skip ids."""
        if self.is_makers:
            return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return self._backend.get_vocab_size(with_added_tokens=True)

    def check_fits(self, config: "TransformerConfig", where: str) -> None:
        """Raise `UserError` if a model of this config can't take the ids. where: the model's name.

        A published decoder's tokenizer gets its ids of pad, bos and eos from the config."""
        if self.is_makers:
            if config.architecture != "decoder" and config.head.kind != "hidden":  # of text vectors
                raise UserError(f"{where}/tokenizer.json: is a published decoder's, not an {config.architecture}'s")
            self.pad_id, self.bos_id, self.eos_id = config.pad_id, config.bos_id, config.eos_id
        special, smallest = (self.pad_id, self.bos_id, self.eos_id), min(config.source_vocab_size, config.vocab_size)
        if self.separate:
            if config.architecture != "encoder-decoder":
                raise UserError(
                    f"{where}: architecture={config.architecture!r} has one vocabulary, its tokenizer has two"
                )
            if config.one_embedding:
                raise UserError(
                    f"{where}: tie_embeddings={config.tie_embeddings!r} is one table for both languages, which have a "
                    "vocabulary each: choose target-output or none"
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
            f"the tokenizer's own regular expression takes too long on this text ({error_line(error)}): shorten it, or "
            "take the tokenizer from its maker"
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
        template = processor.get("single")  # ours end a text
        return not (isinstance(template, list) and template and "SpecialToken" in template[-1])
    parts = before.get("pretokenizers") if isinstance(before, dict) else None
    kinds = [isinstance(part, dict) and part.get("type") for part in parts] if isinstance(parts, list) else []
    ids = {token.content for token in added_tokens(specification) if token.id < len(SPECIAL_TOKENS)}
    return kinds != ["Split", "ByteLevel"] or ids != {*SPECIAL_TOKENS}


def read_backend(specification: Callable[[], str], origin: str) -> tokenizers.Tokenizer:
    """Parse a tokenizer.json with the library `tokenizers`. Raises `UserError` if it can't."""
    try:
        return tokenizers.Tokenizer.from_str(specification())
    except BaseException as error:  # the Rust side raises bare Exception, and below it what ends a thread there
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(f"{origin}: not a tokenizer that `tokenizers` can read ({error_line(error)})") from None


def _parse(text: str, origin: str) -> dict[str, Any]:
    specification = parse_json(text, f"{origin}: not JSON", DAMAGED)
    if not isinstance(specification, dict) or not isinstance(specification.get("model"), dict):
        raise UserError(f'{origin}: no tokenizer.json (its "model" is missing)')
    model = specification["model"]
    words = model.get("type") == "WordPiece"
    if words and (not isinstance(model.get("vocab"), dict) or model.get("unk_token") not in model["vocab"]):
        raise UserError(f"{origin}: its vocabulary doesn't have its own token for unknown words")
    for name in FOREIGN:
        if (value := model.get(name)) and not (words and name == "continuing_subword_prefix"):
            raise UserError(
                f"{origin}: its model has {name} = {value!r:.60}, which no tokenizer of ours has; train one"
            )
    check_parts(specification, origin)
    for pattern in () if is_makers(specification) else _patterns(specification):
        if pattern not in TRUSTED_PATTERNS and pattern != silent_pattern(silent_contents(specification)):
            raise UserError(f"{origin}: holds the unknown regular expression {pattern[:60]!r}; train a tokenizer anew")
    return specification


def _untypable(specification: Mapping[str, Any]) -> str | None:
    """For a tokenizer.json of scored pieces that cuts text by its own components, return the file with a space added to
    the pieces of special tokens, so that no text spells them; None for other files."""
    model = specification["model"]
    if not roles_of(specification).get("as_written") or not isinstance(pieces := model.get("vocab"), list):
        return None
    control = {token.content for token in added_tokens(specification) if token.special and token.id < len(pieces)}
    added = [entry for entry in specification["added_tokens"] if entry.get("content") not in control]
    renamed = [[f"{piece[0]} ", *piece[1:]] if piece and piece[0] in control else piece for piece in pieces]
    return json.dumps({**specification, "added_tokens": added, "model": {**model, "vocab": renamed}})


def check_parts(specification: Mapping[str, Any], origin: str) -> None:
    """Raise `UserError` for damage at which the library `tokenizers` would panic, with many lines of output."""
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
    """Return the ids of pad, bos, eos and unk; 0 to 3 except in vocabularies of published models."""
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
    """Return the same ids from the file's list of roles; eos and unk are by default </s> and <unk>."""
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
        raise UserError(f"{origin}: does not end a sequence with </s>; train a tokenizer anew")


def checked_tokenizer(checkpoint: "Checkpoint") -> str | None:
    """Return a checkpoint's tokenizer.json; None without a tokenizer.

    Raises `UserError` if the file is damaged, or has more tokens than the model has rows.
    """
    text = checkpoint.tokenizer_json()
    if text is not None:
        Tokenizer(text, str(checkpoint.tokenizer_path)).check_fits(checkpoint.config, str(checkpoint.folder))
    return text


def unicode_texts(lines: Iterable[str]) -> Iterator[str]:
    """Yield the texts; raise `UserError` at a text with half a surrogate pair, which UTF-8 can't encode."""
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise UserError(f"text {number}: must be text, not {type(line).__name__}")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text {number} holds a lone surrogate at character {error.start + 1}; "
                'it is no Unicode text: leave it out, or read a file with errors="replace"'
            ) from None
        yield line
