"""The model card: README.md in a model's folder, read by people and by the Hugging Face Hub.

It has YAML front matter, then the kind of model, how to use it, its sizes, and the result of `validate`. A card that a
person wrote or edited is kept; only the lines between the marks of the proof change. Its last line holds a hash, which
shows whether it was edited.

Front matter is only split into its keys, not parsed. So any key of another author can be passed on unchanged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_transformer.system.files import read_bytes
from mlx_transformer.system.manifest import CARD, sha256

from .config import TransformerConfig
from .heads import EMBEDDING
from .parameters import parameter_count
from .tokenizer_files import CHAT_TEMPLATE

FENCE = "---"
KEY = re.compile(r"([A-Za-z][\w-]*):(?:\s|$)")
PLAIN = re.compile(r"[a-z][a-z0-9-]*")
NO_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words read by YAML 1.1 as booleans or null, e.g. "no", the code of Norwegian."""


def keys_of(text: str) -> dict[str, str]:
    """Split a document's front matter into {key: its lines}; {} if there is none or it has no end.

    >>> keys_of("---\\nlanguage:\\n- de\\n---\\n# Title")
    {'language': 'language:\\n- de'}
    """
    first, *lines = text.lstrip("\ufeff").splitlines() or [""]
    if first.rstrip() != FENCE or FENCE not in (ends := [line.rstrip() for line in lines]):
        return {}
    keys: dict[str, list[str]] = {}
    key = None
    for line in lines[: ends.index(FENCE)]:
        if match := KEY.match(line):
            key = match[1]
            keys[key] = []
        elif line.startswith("#"):
            key = None
        if key is not None:
            keys[key].append(line)
    return {name: "\n".join(part) for name, part in keys.items()}


def front_matter(keys: Mapping[str, str], comment: str = "") -> str:
    """Write front matter from {key: its lines}, as `keys_of` and `yaml_of` return them. comment: its first line."""
    return "\n".join([FENCE, *([f"# {comment}"] if comment else []), *keys.values(), FENCE, ""])


def yaml_of(key: str, value: Any) -> str:
    """The YAML lines of a key. value: text, numbers, and lists and dicts of them."""
    return "\n".join(_lines({key: value}))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner and isinstance(inner, Mapping | list):
                yield f"{key}:"
                yield from (f"  {line}" for line in _lines(inner))
            else:
                yield f"{key}: {_scalar(inner)}"
    else:
        for inner in value:
            first, *rest = _lines(inner) if inner and isinstance(inner, Mapping | list) else [_scalar(inner)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and PLAIN.fullmatch(value) and value not in NO_TEXT
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


LICENSE = "license: fill in what your text and the model's origin allow (huggingface.co/docs/hub/repositories-licenses)"
LEGAL = ("license", "license_name", "license_link")
ABOUT = (*LEGAL, "language", "pipeline_tag", "base_model", "datasets")
"""Keys that stay true for a model made from another model."""
RESULTS = "model-index"
"""The key of scores. They stay true for the same weights in another format."""


class Kind(NamedTuple):
    """A kind of model. pipeline: the Hub's name for it; text, ids: code that calls it with text or with token ids."""

    title: str
    pipeline: str
    text: str
    ids: str = "model.token_logits([[5, 6, 7]])"


KINDS = {
    "encoder-decoder": Kind(
        "encoder and decoder",
        "translation",
        'model.translate("A sentence.", beam=4)',
        "model.generate([[5, 6, 7]], beam=4)",
    ),
    "decoder": Kind(
        "decoder alone", "text-generation", 'model.complete("Once upon a time")', "model.generate([[5, 6, 7]])"
    ),
    "chat": Kind(
        "decoder alone, with a chat template",
        "text-generation",
        'model.chat([{"role": "user", "content": "Hello!"}])',
        "model.generate([[5, 6, 7]])",
    ),
    "embedding": Kind("encoder alone, vectors of texts", "sentence-similarity", 'model.embed("A sentence.")'),
    "vocabulary": Kind("encoder alone", "fill-mask", 'model.fill("A <mask> sentence.")'),
    "hidden": Kind("encoder alone, its last layer", "feature-extraction", ""),
    "pooled": Kind("encoder alone, a vector of each text", "feature-extraction", ""),
    "classes": Kind("encoder alone, classes of texts", "text-classification", 'model.classify("A sentence.")'),
    "token-classes": Kind("encoder alone, classes of tokens", "token-classification", 'model.tag("A sentence.")'),
    "spans": Kind("encoder alone, answers in a text", "question-answering", 'model.answer("A question?", "A text.")'),
}
"""Keys are architectures and, for encoder-only models, kinds of heads or "embedding"; of decoders with a template
"chat". An empty `text` means that the model takes only ids."""
SENTENCE_TRANSFORMERS = "modules.json"
WEIGHTS = (".safetensors", ".onnx", ".onnx_data", ".npz", ".bin")

BEGIN, END = "<!-- validate: begin -->", "<!-- validate: end -->"
UNPROVEN = "Not validated since it was written; `mlx-transformer validate CHECKPOINT ONNX` does it, and says so here."
SIGNED = "\n<!-- mlx-transformer wrote this; what you change stays as you have it. {} -->\n"


class Form(NamedTuple):
    """The parts of a card for a folder's format, e.g. checkpoint or ONNX."""

    library: str
    """The Hub's library_name."""
    tags: tuple[str, ...]
    use: str | None = None
    """How to use it, as Markdown; None: with this package."""
    more: Sequence[str] = ()
    """Further sections, as lines of Markdown."""


CHECKPOINT = Form("mlx-transformer", ("mlx", "transformer"))


def begin_card(**values: object) -> str:
    """Front matter for `write_card`, e.g. `begin_card(language=["en", "de"])`; values of None are left out."""
    return front_matter({key: yaml_of(key, value) for key, value in values.items() if value is not None})


def carried(folder: Path, results: bool = False) -> str:
    """Front matter to keep in a model made from that in `folder`: license, languages, origin and so on.

    results: also the scores, for the same weights in another format.
    """
    keys = keys_of(_text(folder / CARD)) if (folder / CARD).is_file() else {}
    names = (*ABOUT, RESULTS) if results else ABOUT
    return front_matter({key: lines for key, lines in keys.items() if key in names})


def write_card(
    folder: Path, config: TransformerConfig, form: Form = CHECKPOINT, begin: str = "", replaced: Path | None = None
) -> None:
    """Write a folder's card, after all its other files, whose sizes it lists.

    begin: front matter, which overrides generated keys. replaced: see `put_card`.
    """
    put_card(folder, _card(folder, config, form, keys_of(begin)), replaced)


def put_card(folder: Path, text: str, replaced: Path | None = None) -> None:
    """Write `text` as the card of a folder.

    replaced: the folder that this one replaces. If a person wrote or edited its README.md, that is kept instead of
    `text`, with its proof marked as missing.
    """
    if replaced is not None and (replaced / CARD).is_file() and not _is_ours(old := _text(replaced / CARD)):
        text = _with_proof(old, UNPROVEN)
    else:
        text = _signed(text)
    (folder / CARD).write_bytes(text.encode("utf-8", "surrogateescape"))


def note_proof(folder: Path, proof: str) -> None:
    """Write the result of `validate` between the proof marks of a folder's card, if it has them.

    Raises `UserError` if the card can't be written.
    """
    from mlx_transformer.system.durable import write_text  # imports ctypes, which running a model doesn't need

    path = folder / CARD
    if not path.is_file():
        return
    old = _text(path)
    new = _with_proof(old, proof)
    if new != old:
        write_text(path, _signed(_unsigned(new)) if _is_ours(old) else new)


def _card(folder: Path, c: TransformerConfig, form: Form, known: dict[str, str]) -> str:
    kind = kind_of(folder, c)
    made = {"pipeline_tag": kind.pipeline, "library_name": form.library, "tags": list(form.tags)}
    return "\n".join(
        [
            first_lines(made, known),
            f"# A Transformer: {kind.title}",
            "",
            form.use or _use(folder, kind),
            "",
            "## Sizes",
            "",
            *_sizes(folder, c),
            "",
            *form.more,
            "## Proof",
            "",
            BEGIN,
            UNPROVEN,
            END,
            "",
        ]
    )


def first_lines(made: Mapping[str, object], known: dict[str, str]) -> str:
    """The front matter of a card: `known` keys override those of `made`. Without a license, a comment asks for it."""
    keys = {key: yaml_of(key, value) for key, value in made.items()} | known
    return front_matter(keys, "" if any(key in keys for key in LEGAL) else LICENSE)


def kind_of(folder: Path, c: TransformerConfig) -> Kind:
    """The kind of a folder's model, from its config, and for encoder-only models from its files."""
    if c.architecture != "encoder":
        talks = c.architecture == "decoder" and (folder / CHAT_TEMPLATE).is_file()
        return KINDS["chat" if talks else c.architecture]
    embeds = (folder / EMBEDDING).is_file() or (folder / SENTENCE_TRANSFORMERS).is_file()
    return KINDS["embedding" if embeds else c.head.kind]


def _use(folder: Path, kind: Kind) -> str:
    call = kind.text if kind.text and any(folder.glob("*tokenizer.json")) else kind.ids
    code = f'import mlx_transformer as mt\nmodel = mt.open_model("ORG/NAME or FOLDER")\nprint({call})'
    return f"```python\n{code}\n```"


def _sizes(folder: Path, c: TransformerConfig) -> list[str]:
    layers = [f"{count} {name}" for name, count in (("encoder", c.encoder_layers), ("decoder", c.decoder_layers))]
    counts = {"encoder-decoder": layers, "encoder": layers[:1], "decoder": layers[1:]}[c.architecture]
    rows = {
        "parameters": f"{parameter_count(c):,}",
        "layers": ", ".join(counts),
        "width, heads": f"{c.d_model}, {c.heads}",
        "vocabulary": f"{c.vocab_size:,}",
        "positions": f"{c.max_positions:,}",
    }
    for path in sorted(folder.rglob("*")):
        if path.suffix in WEIGHTS and path.is_file():
            size = path.stat().st_size
            counts = f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"
            rows[f"`{path.relative_to(folder).as_posix()}`"] = counts
    for path in sorted(folder.rglob("*.jinja")):  # a template may hide instructions
        rows[f"`{path.relative_to(folder).as_posix()}`"] = f"SHA-256 {sha256(path)}"
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _with_proof(text: str, proof: str) -> str:
    """Put `proof` between the marks; the text is unchanged if it lacks them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{proof}\n{end}{after}" if begin and end else text


def _signed(text: str) -> str:
    return text + SIGNED.format(hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest())


def _unsigned(text: str) -> str:
    return text[: text.rfind(SIGNED[: SIGNED.index("{")])]


def _is_ours(text: str) -> bool:
    """Whether this program wrote the card and nobody has edited it."""
    return SIGNED[: SIGNED.index("{")] in text and _signed(_unsigned(text)) == text


def _text(path: Path) -> str:
    """Read a card. Bytes that aren't UTF-8 become surrogates and are written back unchanged."""
    return read_bytes(path).decode("utf-8", "surrogateescape")
