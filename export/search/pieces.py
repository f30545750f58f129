"""Text in and out of a search graph with a SentencePiece vocabulary.

SentencepieceTokenizer of onnxruntime-extensions contains SentencePiece itself. It splits text by a model rebuilt from
tokenizer.json; standard operators look up tokens missing in this model. If spaces are changed otherwise than in
SentencePiece, or added tokens are looked for in normalised text, standard operators normalise the text first, by
SentencePiece's table. The ids are those of `text/sentencepiece_tokenizer.py`, except in the rare texts for which that
module says that it differs from SentencePiece.

Other operators of onnxruntime-extensions fail: HfJsonTokenizer takes one text at a time and gives no </s> for an empty
text; SentencepieceDecoder takes one row, and writes <unk> as U+2047.

The table maps strings to replacements, and the longest match counts. Its trie (stored as in `text/sentencepiece.py`) is
walked from all bytes at once, a byte a step; then the matches that follow each other from a text's beginning are taken.
SentencepieceTokenizer also gives a text's bytes, if its vocabulary is the 256 bytes.

Shapes: B lines, W parts of all lines, N tokens of all lines, R texts (to write, or to replace in), T their tokens; in
the table N bytes of all texts, U units of the trie, P bytes of the longest text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from export.nn.primitives import END, Op, table
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.generation.translate import fitting_tokenizer
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.added_tokens import CUT, WHOLE, AddedToken, added_tokens, mark_of
from mlx_transformer.text.published_ids import roles_of
from mlx_transformer.text.sentencepiece import (
    BPE,
    BYTE,
    BYTES,
    CONTROL,
    LONGEST_KEY,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    Piece,
    SentencePiece,
    replacements,
    sentencepiece_bytes,
)
from mlx_transformer.text.sentencepiece_tokenizer import (
    ENDED_SPACES_PATTERN,
    INNER_SPACES_PATTERN,
    MARKED_END,
    RUNS_OF_SPACES,
    SPACES_PATTERN,
    WHITE_ENDS,
    WHITE_SPACE,
    is_sentencepiece,
    patterns_of,
)
from mlx_transformer.text.tokenizer import Tokenizer

from .steps import Carried, State, looped
from .text import (
    CODE_TEXTS,
    PYTHONS_WHITE,
    REPLACEMENT,
    SEPARATOR,
    WHITE,
    Parts,
    TextOps,
    custom,
    integer,
    parts_of,
    replaced,
    strings,
    value_of,
    well_formed,
)

UNITS = {0: 256 << 10, 256: 255, 257: 3 << 10 | 1 << 8 | 1, 258: 1 << 31}
IDENTITY = b"".join(unit.to_bytes(4, "little") for unit in (4 * 512, *(UNITS.get(i, 0) for i in range(512)))) + b"\1\0"
"""A table that replaces U+0001 by itself: without a table the operator writes a line to stderr."""
NO_BYTE = 256
"""Code after the last byte of all texts."""
SPECIAL = 3
"""Number of pieces before the bytes: <unk>, <s>, </s>."""
MOST_JUMPS = 40
"""Doublings, enough for 2^40 bytes."""


class Table:
    """The trie of a SentencePiece table as arrays (U,); `texts` are the replacements."""

    def __init__(self, charsmap: bytes) -> None:
        size = int.from_bytes(charsmap[:4], "little")
        units = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
        width = 1 << max(9, int(len(units) - 1).bit_length())  # any place XOR a byte is inside
        self.label, self.base = np.full(width, -1), np.zeros(width, np.int64)
        self.label[: len(units)] = units & 0x800000FF
        offset = (units >> 10) << ((units & 0x200) >> 6)
        self.base[: len(units)] = np.minimum(np.arange(len(units)) ^ offset, width - 1)
        self.first = int(self.base[0])
        values = sorted({*replacements(charsmap).values()})
        ends, number = charsmap[4 + size :], {value: i for i, value in enumerate(values)}
        self.value = np.full(width, -1)
        for place in np.flatnonzero(units & 0x100):
            start = int(units[self.base[place]] & 0x7FFFFFFF) if self.base[place] < len(units) else len(ends)
            end = ends.find(b"\0", start)
            text = ends[start : end if end >= 0 else None].decode("utf-8", "replace")
            self.value[place] = number.get(text, -1)
        self.texts = values


def text_bytes(op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Text (R,) to the bytes of all texts (N,), and offsets (R+1,): text r has bytes offsets[r] to offsets[r+1] - 1."""
    first = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    pieces = (*first, *(Piece(byte, 0.0, BYTE) for byte in BYTES))
    options = dict(model_type=BPE, byte_fallback=True, dummy_prefix=False, remove_extra_whitespace=False)
    model = SentencePiece(pieces=pieces, charsmap=IDENTITY, **options)  # type: ignore[arg-type]
    data = base64.b64encode(sentencepiece_bytes(model, escaped=False)).decode()
    bytes, rows = pieces_of(op, text, data)
    return op.Sub(bytes, SPECIAL), rows


def pieces_of(op: Op, text: ir.Value, model: str, bos: bool = False, eos: bool = False) -> tuple[ir.Value, ir.Value]:
    """Text (B,) to the tokens of all lines (N,) by a SentencePiece model in base64, and their offsets (B+1,).

    bos: begin each line with the id -1, a placeholder.
    """
    none = (table(op, f"text.{t.__name__}", lambda t=t: np.zeros(1, t)) for t in (np.int64, np.float32))  # sampling
    flags = bos, eos, False, False  # not reversed, not numbered as in fairseq
    values = (table(op, f"text.{flag}", lambda flag=flag: np.array([flag])) for flag in flags)
    tokens, rows = custom(op, "SentencepieceTokenizer", text, *none, *values, model=model, kinds="iI")
    return integer(op, tokens), rows


def normalized(op: Op, text: ir.Value, charsmap: bytes) -> ir.Value:
    """Replace text (R,) by SentencePiece's table."""
    trie = Table(charsmap)
    bytes, rows = text_bytes(op, text)
    # One more byte: some operators fail on an empty list.
    bytes, count = op.Concat(bytes, [NO_BYTE], axis=0), op.Add(op.Size(bytes), 1)
    values, lengths = _matches(op, trie, bytes, rows)
    reached = _reached(op, bytes, op.Where(op.GreaterOrEqual(values, 0), lengths, 0))
    owner = op.Gather(op.Squeeze(op.NonZero(reached), [0]), op.Sub(op.CumSum(integer(op, reached), 0), 1))
    own, at = op.Gather(values, owner), op.Range(0, count, 1)
    nothing = len(CODE_TEXTS) - 1
    made = op.Where(op.Equal(at, owner), op.Add(own, len(CODE_TEXTS)), nothing)
    codes = op.Where(op.Less(own, 0), op.Where(op.Equal(bytes, NO_BYTE), nothing, bytes), made)  # (N,)
    start = op.Slice(rows, [0], [-1], [0])
    length = op.Sub(op.Slice(rows, [1], [END], [0]), start)
    column = op.Range(0, op.Max(op.ReduceMax(length, keepdims=0), 1), 1)
    place = op.Where(op.Less(column, op.Unsqueeze(length, [1])), op.Add(op.Unsqueeze(start, [1]), column), -1)
    letters = op.Gather(strings(op, "text.replacements", [*CODE_TEXTS, *trie.texts]), op.Gather(codes, place))  # (R, P)
    return custom(op, "StringJoin", letters, strings(op, "text.nothing", [""]), [1], kinds="S")


def _matches(op: Op, trie: Table, bytes: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The longest match from each byte (N,): the number of its replacement (-1: no match), and its length in bytes."""
    none, at = op.Mul(bytes, 0), op.Range(0, op.Size(bytes), 1)
    marks = op.ScatterElements(none, rows, op.Add(op.Mul(rows, 0), 1), axis=0, reduction="add")
    ends = op.Gather(op.Concat(rows, op.Reshape(op.Size(bytes), [1]), axis=0), op.CumSum(marks, 0))  # (N,)
    arrays = [
        table(op, f"text.trie.{name}", lambda x=x: x)
        for name, x in {"label": trie.label, "base": trie.base, "value": trie.value}.items()
    ]

    def body(op: Op, values: State) -> tuple[ir.Value, State, list[ir.Value]]:
        step = values["iteration"]
        ahead = op.Add(at, step)
        byte = op.Gather(bytes, op.Min(ahead, op.Sub(op.Size(bytes), 1)))
        place = op.BitwiseXor(values["place"], byte)
        label, base, value = (op.Gather(array, op.Min(place, len(trie.label) - 1)) for array in arrays)
        alive = op.And(op.And(values["alive"], op.Less(ahead, ends)), op.Equal(label, byte))
        ends_here = op.And(alive, op.GreaterOrEqual(value, 0))
        after = {
            "place": base,
            "alive": alive,
            "value": op.Where(ends_here, value, values["value"]),
            "length": op.Where(ends_here, op.Add(step, 1), values["length"]),
        }
        return op.Greater(op.ReduceMax(integer(op, alive), keepdims=0), 0), after, []

    starts = {"place": op.Add(none, trie.first), "value": op.Sub(none, 1), "length": none}
    carried = {name: Carried(start, ir.DataType.INT64, ("bytes",)) for name, start in starts.items()}
    carried["alive"] = Carried(op.Equal(none, 0), ir.DataType.BOOL, ("bytes",))
    result, _ = looped(op, "replacements", op.Constant(value_int=LONGEST_KEY), carried, body)
    return result["value"], result["length"]


def _reached(op: Op, bytes: ir.Value, lengths: ir.Value) -> ir.Value:
    """Whether a match or a character that isn't replaced begins at a byte (N,).

    jump[i] is the next beginning after i, followed from byte 0 by doubling. It leads across texts: a text's last match
    ends where the next text begins.
    """
    letters = np.ones(NO_BYTE + 1, np.int64)
    letters[0xC0:0xE0], letters[0xE0:0xF0], letters[0xF0:0xF8] = 2, 3, 4
    one = op.Gather(table(op, "text.letters", lambda: letters), bytes)
    count = op.Size(bytes)
    after = op.Add(op.Range(0, count, 1), op.Where(op.Greater(lengths, 0), lengths, one))
    jump = op.Concat(op.Min(after, count), op.Reshape(count, [1]), axis=0)
    begun = op.Equal(op.Range(0, op.Add(count, 1), 1), 0)

    def body(op: Op, values: State) -> tuple[ir.Value, State, list[ir.Value]]:
        jump, reached = values["jump"], values["reached"]
        reached = op.ScatterElements(reached, jump, reached, axis=0, reduction="max")
        more = op.Less(op.ReduceMin(jump, keepdims=0), count)
        return more, {"jump": op.Gather(jump, jump), "reached": reached}, []

    carried = {
        "jump": Carried(jump, ir.DataType.INT64, ("places",)),
        "reached": Carried(integer(op, begun), ir.DataType.INT64, ("places",)),
    }
    result, _ = looped(op, "reached", op.Constant(value_int=MOST_JUMPS), carried, body)
    return op.Cast(op.Slice(result["reached"], [0], [-1], [0]), to=ir.DataType.BOOL)


SPACE = "▁"
BEGUN, OPEN, CLOSE = "\U0010fffa", "\U0010fffb", "\U0010fffc"
"""Marks in decoded text, removed at the end: before each token, and before and after an added token."""
OF_RE2 = {
    SPACES_PATTERN: {"^ +": "", "[ ▁]+$": "", " {2,}": " "},
    INNER_SPACES_PATTERN: {"[ ▁]+$": "", " {2,}": " "},
    ENDED_SPACES_PATTERN: {" {2,}": " "},
    RUNS_OF_SPACES: {" {2,}": "▁"},
    MARKED_END: {"[ ▁]+$": ""},
    WHITE_ENDS: {f"[{WHITE}]+$": ""},
    WHITE_SPACE: {f"[{WHITE}]": " "},
}
"""{pattern of `text/sentencepiece_tokenizer.py`: {the same for RE2, which has no look-around: replacement}}"""
NEARER = 1e-3
"""Extra score of a piece of n unknown letters, times n^2, so that a longer piece beats several short ones."""


class PieceOps(TextOps):
    """The tokenizer of a tokenizer.json, or of one per language, written by `families` or `train`."""

    def __init__(self, tokenizer: str, config: TransformerConfig):
        """Raises UserError if the vocabulary isn't SentencePiece's or doesn't fit the model, or if the operators would
        split some text differently from the other runtimes."""
        whole = Tokenizer(tokenizer)
        fitting_tokenizer(config, whole, "model", config.architecture, "text")
        sides = side_texts(tokenizer) or {"source": tokenizer, "target": tokenizer}
        source, target = (json.loads(text) for text in sides.values())
        self.positions, self.size = config.max_positions, config.vocab_size
        self.pad, self.unknown = whole.source.pad_id, whole.source.unk_id
        self.roles, self.known = roles_of(source), len(_scored(source))
        self.source, self.changes, tokens = source, patterns_of(source), _whole(source)
        self.python, roles = self.roles.get("strips") is True, self.roles
        self.typed = [token for token in tokens if self.python or not token.normalized]
        self.normal = [token for token in tokens if token not in self.typed]
        self.inside = not self.normal and {*self.changes} <= {SPACES_PATTERN}
        """Whether SentencepieceTokenizer normalises the text, not operators before it."""
        self.surfaces = _surfaces(source) if "lookup" in roles else {}
        # The attribute is text, so the model is in base64.
        model = _model(source, self.surfaces, self.inside)
        self.model = base64.b64encode(sentencepiece_bytes(model)).decode()
        self.charsmap = b"" if self.inside else _charsmap(source)
        self.after = [whole.source.eos_id]
        known = {token.id for token in tokens}
        self.prefixes = {x["content"]: x["id"] for x in _added(source) if not x["special"] and x["id"] not in known}
        self._read_target(target, whole)
        if not config.has_encoder:
            self.continues(whole)

    def _read_target(self, target: Mapping[str, Any], whole: Tokenizer) -> None:
        """Read each id's spelling, which ids have none, and which are bytes."""
        known = {token.id for token in _whole(target)}
        texts = enumerate(text for text, _ in _scored(target))
        spelled = [text.replace(" ", "") if " " in text and id not in known else text for id, text in texts]
        silent = {*whole.special_ids, *range(len(spelled), self.size + 1)}
        self.silent = np.array([id in silent for id in range(self.size + 1)])
        self.bytes = np.full(self.size + 1, SEPARATOR, np.int64)
        if target["model"].get("byte_fallback"):
            self.bytes[[spelled.index(text) for text in BYTES]] = range(256)
        texts = ["" if id in silent else spelled[id] for id in range(self.size + 1)]
        inside, first = ([text.replace(SPACE, by) for text in texts] for by in (" ", ""))
        begins_with_space = mark_of(target)["prepend_scheme"] != "never"
        self.spelling = [*inside, *(first if begins_with_space else inside), *CODE_TEXTS]
        """Texts by place: of each id (size + 1), of each id at the beginning of a line (size + 1), of each byte."""
        self.strips = roles_of(target).get("strips") is True
        spoken = [token for token in whole.added if not token.special and token.id in roles_of(target).get(WHOLE, ())]
        self.apart = {token.id: token.content for token in spoken} if roles_of(target).get("apart") else {}
        if self.apart and target["model"].get("byte_fallback"):
            raise UserError(
                "tokenizer.json: no operator decodes both byte pieces and added tokens with a space on either side; "
                "export without text"
            )
        if self.apart:
            each = [*range(self.size + 1)] * 2
            marks = {id: f"{OPEN}{content}{CLOSE}" for id, content in self.apart.items()}
            spelled = zip(each, self.spelling, strict=False)
            made = ["" if id in silent else marks.get(id, f"{BEGUN}{text}") for id, text in spelled]
            self.spelling[: len(made)] = made

    def cut(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        parts, prefix = parts_of(op, text, "typed", self.typed, self.python), None
        texts = parts.without_tokens(op)
        if self.roles.get("prefixes"):
            prefix, texts = self._prefix(op, texts)
        if not self.inside:
            texts = parts.without_tokens(op, self._normalized(op, texts))
            parts = parts.apart(op, parts_of(op, texts, "normal", self.normal))
            texts = self._begun(op, parts)
        # Each part begins with -1, replaced by the id of its added token or prefix; without either it is dropped.
        texts = op.Where(op.GreaterOrEqual(parts.ids, 0), strings(op, "text.nothing", [""]), texts)
        tokens, rows = pieces_of(op, texts, self.model, bos=True)
        if self.surfaces:
            tokens, rows = self._looked_up(op, tokens, rows)
        if self.roles.get("missing"):
            tokens = op.Where(op.Less(tokens, self.known), tokens, self.unknown)
        first = parts.ids if prefix is None else op.Max(parts.ids, prefix)
        tokens = op.ScatterElements(tokens, op.Slice(rows, [0], [-1], [0]), first, axis=0)
        kept = op.GreaterOrEqual(tokens, 0)
        total = op.Concat([0], op.CumSum(integer(op, kept), 0), axis=0)
        rows = op.Gather(op.Gather(total, rows), parts.first)  # (B+1,)
        start = op.Slice(rows, [0], [-1], [0])
        return op.Compress(tokens, kept, axis=0), start, op.Sub(op.Slice(rows, [1], [END], [0]), start)

    def _normalized(self, op: Op, text: ir.Value) -> ir.Value:
        """Normalise text (W,) and its spaces."""
        text = normalized(op, text, self.charsmap) if self.charsmap else text
        for i, pattern in enumerate(self.changes):
            for j, (expression, by) in enumerate(OF_RE2[pattern].items()):
                text = replaced(op, text, f"spaces.{i}.{j}", expression, by)
        return text

    def _begun(self, op: Op, parts: Parts) -> ir.Value:
        """Put a space before each text (W,), or before the first of a line."""
        text, scheme = parts.text, mark_of(self.source)["prepend_scheme"]
        if mark_of(self.source) != self.source["pre_tokenizer"]:  # words
            for name, (pattern, by) in {"ends": ("^ +| +$", ""), "runs": (" +", " "), "marked": (" ▁", "▁")}.items():
                text = replaced(op, text, f"words.{name}", pattern, by)
        begun = replaced(op, text, "begin", "(?s)^([^ ▁])", r" \1")
        if scheme == "always":
            return begun
        return op.Where(parts.begins(op), begun, text) if scheme == "first" else text

    def _prefix(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Split off a token such as >>deu<< at the beginning of a line: its id (B,), -1 without one, and the rest."""
        beginning = replaced(op, text, "beginning", "(?s)^(>>.*?<<)?.*$", r"\1")
        first = value_of(op, beginning, {"": -1, **self.prefixes}, self.unknown)
        return first, replaced(op, text, "rest", "(?s)^>>.*?<<", "")

    def _looked_up(self, op: Op, tokens: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Merge a run of tokens that the model doesn't know into <unk>; a run of one token keeps its id."""
        strange = np.zeros(self.known + len(self.roles.get("missing", ())) + 1, np.int64)  # the last entry is for -1
        strange[[self.unknown, *self.surfaces.values()]] = 1
        marks = op.Gather(table(op, "text.strange", lambda: strange), tokens)  # (N,)
        before = op.Slice(op.Concat([0], marks, axis=0), [0], [-1], [0])
        after = op.Slice(op.Concat(marks, [0], axis=0), [1], [END], [0])
        tokens = op.Where(op.Greater(op.Mul(marks, after), 0), self.unknown, tokens)
        kept = op.Equal(op.Mul(marks, before), 0)
        total = op.Concat([0], op.CumSum(integer(op, kept), 0), axis=0)
        return op.Compress(tokens, kept, axis=0), op.Gather(total, rows)

    def decode(self, op: Op, sequences: ir.Value, blank: ir.Value) -> ir.Value:
        texts = super().decode(op, sequences, blank)
        if not self.strips:
            return texts
        shape, texts = op.Shape(texts), op.Reshape(texts, [-1])
        white = f"[{PYTHONS_WHITE}]+"
        changes = {f"^{white}|{white}$": ""}
        if self.apart:
            # BEGUN stays at the beginning of the text and after an added token.
            changes = {f"{BEGUN}+": BEGUN, f"([^{CLOSE}]){BEGUN}": r"\1"}
            changes |= {f"{white}({OPEN}|$)": r"\1", f"{BEGUN}{white}": BEGUN}
            # Joined as in transformers, where an empty text counts only at the end.
            changes |= {BEGUN + OPEN: OPEN, f"^[{BEGUN}{OPEN}]|{CLOSE}": "", f"[{BEGUN}{OPEN}]": " "}
        for i, (pattern, by) in enumerate(changes.items()):
            texts = replaced(op, texts, f"ends.{i}", pattern, by)
        return op.Reshape(texts, shape)

    def spell(self, op: Op, tokens: ir.Value) -> ir.Value:
        silent = op.Gather(table(op, "text.silent", lambda: self.silent), tokens)
        spoken = integer(op, op.Not(silent))
        is_first = op.Equal(op.Mul(op.CumSum(spoken, 1), spoken), 1)
        places = op.Add(tokens, op.Where(is_first, self.size + 1, 0))
        if (self.bytes < SEPARATOR).any():
            places = self._with_bytes(op, tokens, places, silent)
        return op.Gather(strings(op, "text.spelled", self.spelling), places)

    def _with_bytes(self, op: Op, tokens: ir.Value, places: ir.Value, silent: ir.Value) -> ir.Value:
        """Decode byte tokens: update places (R, T) in `spelling`. A run of valid UTF-8 keeps its bytes; in other runs
        each byte becomes U+FFFD."""
        # Silent tokens don't separate bytes.
        index = op.Transpose(op.NonZero(op.Or(op.Not(silent), op.Equal(tokens, self.size))), perm=[1, 0])  # (N, 2)
        stream = op.Gather(table(op, "text.bytes", lambda: self.bytes), op.GatherND(tokens, index))  # (N,)
        parts = op.Equal(stream, SEPARATOR)
        wrong = integer(op, op.GreaterOrEqual(well_formed(op, stream), REPLACEMENT))
        run = op.CumSum(integer(op, parts), 0)  # (N,): which run of bytes
        empty = op.Expand(0, op.Add(op.Shape(run), 1))
        wrong = op.Gather(op.ScatterElements(empty, run, wrong, axis=0, reduction="max"), run)
        codes = op.Add(op.Where(op.Greater(wrong, 0), REPLACEMENT, stream), 2 * (self.size + 1))
        return op.ScatterND(places, index, op.Where(parts, op.GatherND(places, index), codes))


def has_pieces(tokenizer: str) -> bool:
    """Whether a tokenizer.json (or both of its sides) is SentencePiece's."""
    return all(is_sentencepiece(json.loads(text)) for text in (side_texts(tokenizer) or {"": tokenizer}).values())


def _added(specification: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return specification.get("added_tokens") or []


def _scored(specification: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Pieces with scores in the order of ids. A BPE piece's score is minus the rank of its first merge."""
    model = specification["model"]
    size = len(model["vocab"])
    behind = [(token.content, 0.0) for token in added_tokens(specification) if token.id >= size]
    if model["type"] == "Unigram":
        return [*((text, score) for text, score in model["vocab"]), *behind]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        ranks.setdefault(left + right, rank)
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return [*((text, -float(ranks.get(text, 0))) for text in texts), *behind]


def _whole(specification: Mapping[str, Any]) -> list[AddedToken]:
    """The added tokens that are looked for in text."""
    known = {*roles_of(specification).get(WHOLE, ())}
    return [token for token in added_tokens(specification) if token.id in known]


def _surfaces(specification: Mapping[str, Any]) -> dict[str, int]:
    """{text: id} of tokens missing in the source's model, none of whose letters it has either."""
    texts = [text for text, _ in _scored(specification)]
    whole = {token.id: token.content for token in _whole(specification)}
    cut = {*roles_of(specification).get(CUT, ())}
    letters = {text for id, text in enumerate(texts) if len(text) == 1 and (id not in whole or id in cut)}
    letters |= {text for text, _ in roles_of(specification).get("missing", [])}
    named = enumerate(text[1:] if text.startswith(" ") and not text.startswith(" unused ") else "" for text in texts)
    return {text: id for id, text in {**dict(named), **whole}.items() if text and not letters & {*text}}


def _charsmap(specification: Mapping[str, Any]) -> bytes:
    normalizers = (specification.get("normalizer") or {"normalizers": []})["normalizers"]
    tables = [each["precompiled_charsmap"] for each in normalizers if each["type"] == "Precompiled"]
    return base64.b64decode(tables[0]) if tables else b""


def _model(specification: Mapping[str, Any], surfaces: Mapping[str, int], normalizes: bool) -> SentencePiece:
    """Rebuild the SentencePiece model of a tokenizer.json. Pieces without an id are numbered after the vocabulary.

    normalizes: the model normalises its texts, rather than operators before it.
    """
    model, roles, scored = specification["model"], roles_of(specification), _scored(specification)
    whole = {token.content for token in _whole(specification)}
    control = {each["content"] for each in _added(specification) if each["id"] not in roles.get(CUT, ())}
    defined = [each for each in _added(specification) if not each["special"] and each["content"] not in whole]
    if defined and not roles.get("prefixes"):
        raise UserError("tokenizer.json: no operator splits text at user-defined pieces; export without text")
    unigram, fallback = model["type"] == "Unigram", bool(model.get("byte_fallback"))
    unknown = model["unk_id"] if unigram else model["vocab"][model["unk_token"]]
    kinds = dict.fromkeys(BYTES, BYTE) if fallback else {}
    kinds |= dict.fromkeys((*control, *(text for text, _ in scored if text.startswith(" "))), CONTROL)
    kinds |= {scored[unknown][0]: UNKNOWN}
    pieces = [Piece(text, score, kinds.get(text, NORMAL)) for text, score in scored]
    pieces += [Piece(text, score) for text, score in roles.get("missing", [])]
    known = {piece.text for piece in pieces if piece.type == NORMAL}
    if surfaces and (not unigram or {letter for text in known for letter in text} - known):
        raise UserError("tokenizer.json: no operator looks up these tokens that its model lacks; export without text")
    lowest = min(score for _, score in scored) - 10
    for text, id in surfaces.items():
        pieces[id] = Piece(text, lowest * len(text) + NEARER * len(text) ** 2)
    return SentencePiece(
        pieces=tuple(pieces),
        model_type=UNIGRAM if unigram else BPE,
        byte_fallback=fallback,
        charsmap=(_charsmap(specification) if normalizes else b"") or IDENTITY,
        dummy_prefix=normalizes and mark_of(specification)["prepend_scheme"] != "never",
        remove_extra_whitespace=normalizes and SPACES_PATTERN in patterns_of(specification),
        special=(unknown, -1, -1, -1),
    )
