"""The models that consumers are given, what they are asked, and how they are run in their own environments."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chat_templates import CONVERSATIONS, TEMPLATES, TOKENS
from golden_tokens import golden
from imports import ROOT
from makers_tokenizers import TEXTS as MAKERS_TEXTS
from makers_tokenizers import makers_json
from small_models import DECODER, SIZES, alone, encoder_decoder, random_weights

from export import OnnxTransformer
from export.package import export_onnx
from export.targets.table import target_of
from mlx_transformer import Tokenizer, Transformer, TransformerConfig, UserError, load
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE
from mlx_transformer.data import built_in
from mlx_transformer.generation.settings import SETTINGS, SPECIAL_TOKENS, read_settings

HERE = Path(__file__).parent
DECODERS = ROOT / "tests" / "mlx_transformer" / "families" / "golden_decoders"
# `make test-consumers` makes the environments and the model, and says where they are.
MODEL = Path(os.environ.get("CONSUMERS_MODEL", ROOT / ".consumers" / "model"))
PYTHON = Path(os.environ.get("CONSUMERS_PYTHON", ROOT / ".venv-consumers" / "bin" / "python"))
COMMANDS = {
    "optimum": [str(PYTHON), "-I", str(HERE / "with_optimum.py")],
    "genai": [str(PYTHON), "-I", str(HERE / "with_genai.py")],
    "transformers.js": ["node", str(HERE / "node" / "with_transformers.mjs")],
    "chromium": ["node", str(HERE / "node" / "with_chromium.mjs")],
}
# What only one of them can be asked, by the beginning of a task's name. transformers.js reads the merged layout alone.
ONLY = {"split": "optimum", "wasm": "transformers.js", "text": "transformers.js", "sentence": "optimum"}
SECONDS = 900  # for all that one consumer is asked

PHRASES, NEW_TOKENS, BATCH = 200, 80, 32
# Random models of each architecture, beside the trained one, by their names in small_models.
ARCHITECTURES = ("encoder-decoder", "decoder", "encoder")
RANDOM = ("paper", "modern", "untied")
RANDOM_NEW_TOKENS = 16
# Tiny decoders that `transformers` wrote, imported: grouped heads, heads of any width, windows, rotation of a part, by
# two bases or in some layers alone, joint matrices, factors, norms of each kind; and the ids that also end their texts.
PUBLISHED = {
    **dict.fromkeys(("gpt2-wide", "nemo", "qwen3-yarn", "hunyuan-wide", "phi4-mini", "olmo2-wide", "granite"), ()),
    **dict.fromkeys(("mistral-window", "gemma-wide", "gemma2-wide", "gemma3-sixth", "gemma3-linear"), ()),
    "smollm3-window": (31, 38),
    "llama-wide": (20, 28),
}
# Published forms of vocabularies and chat templates (`makers_tokenizers`, `chat_templates`).
CHATS = ("qwen2", "smollm2", "gemma", "llama3")

# Published vocabularies with three tokens that their maker added (`golden_tokens`).
MARKED = ("v4/bart", "v4/bert", "v4/marian", "v4/nllb", "v4/t5", "v4/xlm-roberta")
MARKED += ("v5/m2m100", "v5/mbart", "v5/pegasus", "v5/roberta", "v5/t5", "v5/xlm-roberta")

# Lower ones that these consumers know, by transformers.js's names for them in PRECISIONS. The last bits of int4's
# products depend on how many rows they have: phrases go one by one.
LOWER = ("float16", "int8", "int4")
LOWER_PHRASES = 24

# What tokenizers stumble over.
TEXTS = [
    *("", " ", "  two  spaces ", "\t\n", "a\u00a0b\u2009c\u3000d", "e\u0301 é", "ﬁ Å ﷺ", "İstanbul ẞ"),
    *("12.345,67 €", "२०२४", "½ Ⅷ ²", "don't I'll", "...?!", "日本語のテキスト", "العربية ١٢٣", "🇩🇪👩\u200d👧 🏳️"),
    *("\u200b\ufeff\x07\x7f", "x" * 100, "-" * 70, "\u0301" * 40, " " * 50, "[CLS] ## ▁a <0x0A> Ġ <|endoftext|>"),
]
SPECIAL_TEXT = "a </s> b <pad><s>"


@dataclass(frozen=True)
class Trained:
    """The trained model, its folders for consumers, phrases it has not seen, and MLX's greedy tokens for them."""

    model: Transformer
    tokenizer: Tokenizer
    folder: Path
    web: Path
    phrases: list[str]
    tokens: list[list[int]]

    def finished(self) -> list[tuple[str, list[int]]]:
        """The first 20 phrases, with their tokens, whose translation ended before the limit."""
        pairs = zip(self.phrases, self.tokens, strict=True)
        return [(text, tokens) for text, tokens in pairs if len(tokens) < NEW_TOKENS][:20]


def first_difference(ours: list[int], theirs: list[int], eos: int) -> tuple[int, int, int]:
    """The place at which two outputs part, and the token of each there; eos where one has ended."""
    pairs = zip([*ours, eos], [*theirs, eos], strict=False)
    return next((at, a, b) for at, (a, b) in enumerate(pairs) if a != b)


@dataclass(frozen=True)
class Lower:
    """The trained model in precisions below float32: folder, and what our own runtime says of the first phrases."""

    folder: Path
    rows: list[list[int]]
    models: dict[str, OnnxTransformer]
    tokens: dict[str, list[list[int]]]

    @classmethod
    def of(cls, trained: Trained, folder: Path, target: str) -> "Lower":
        export_onnx(MODEL, folder, target=target, precision=["float32", *LOWER], accept_loss=True)
        rows = trained.tokenizer.encode_batch(trained.phrases[:LOWER_PHRASES])
        models = {p: OnnxTransformer(folder, precision=p) for p in ("float32", *LOWER)}
        tokens = {p: [models[p].generate([row], max_new_tokens=NEW_TOKENS)[0] for row in rows] for p in LOWER}
        return cls(folder, rows, models, tokens)

    def decided_otherwise(self, precision: str, found: list[list[int]], limit: int = NEW_TOKENS) -> list[str]:
        """One line a row of `found` that chose another token where the files decide between both.

        They don't where both tokens' logits are nearer to each other than the precision itself moved a logit of that
        step from float32's: activations are rounded to 8 bits, and in another order of additions the last bit of a
        float is a step of their grid. What follows such a step isn't compared.
        """
        ours, exact = self.models[precision], self.models["float32"]
        lines = []
        for i, theirs in enumerate(found):
            mine = self.tokens[precision][i][:limit]
            if mine == theirs:
                continue
            at, a, b = first_difference(mine, theirs, ours.config.eos_id)
            before = np.array([[ours.config.bos_id, *mine[:at]]])
            source = np.array([self.rows[i]])
            logits, wide = (m.decode(before, m.encode(source))[0, -1] for m in (ours, exact))
            gap, moved = logits[a] - logits[b], np.abs(logits - wide).max()
            if gap > moved:
                lines.append(f"row {i}, token {at}: {a} here, {b} there; {gap:.1e} apart, rounding moved {moved:.1e}")
        return lines


@dataclass(frozen=True)
class RandomModel:
    """A random model, its folder, and rows of ids to run it on."""

    model: Transformer
    folder: Path
    rows: list[list[int]]

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    @property
    def ends(self) -> set[int]:
        return {self.config.eos_id, *read_settings(self.folder, self.config).get("end_ids", ())}

    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """ids and mask (B, L): left of the prompts of a decoder, right of everything else."""
        longest = max(map(len, self.rows))
        ids = np.full((len(self.rows), longest), self.config.pad_id)
        mask = np.zeros_like(ids)
        for i, row in enumerate(self.rows):
            left = self.config.architecture == "decoder"
            place = slice(longest - len(row), longest) if left else slice(0, len(row))
            ids[i, place], mask[i, place] = row, 1
        return ids, mask


def trained_model(folder: Path) -> Trained:
    """Export to folder/onnx and, for browsers, folder/web, and translate. Raises UserError if there is none."""
    model, tokenizer = load(MODEL)
    if tokenizer is None or model.config.architecture != "encoder-decoder":
        raise UserError(f"{MODEL}: an encoder-decoder with its tokenizer is needed")
    folder, web = export_onnx(MODEL, folder / "onnx"), export_onnx(MODEL, folder / "web", target="web")
    # The default arguments, as in training: with others, these phrases would not be held out. All kinds take turns.
    phrases = built_in.build("cldr:en-de").held_out.source[:PHRASES]
    tokens = model.generate(tokenizer.encode_batch(phrases), max_new_tokens=NEW_TOKENS)
    return Trained(model, tokenizer, folder, web, phrases, tokens)


@dataclass(frozen=True)
class Chat:
    """A decoder with a published form of tokenizer and template, its folder, and our ids of a conversation."""

    tokenizer: Tokenizer
    folder: Path
    messages: list[dict[str, str]]
    ids: list[int]

    @classmethod
    def of(cls, kind: str, folder: Path) -> "Chat":
        text, named = makers_json(kind), TOKENS[kind]
        ids = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
        tokenizer, eos = Tokenizer(text), ids[named["eos_token"]]
        specials = dict(pad_id=10, eos_id=eos, bos_id=ids[named.get("bos_token", named["eos_token"])])
        sizes = {**SIZES, **DECODER, "vocab_size": tokenizer.vocab_size, "source_vocab_size": tokenizer.vocab_size}
        config = TransformerConfig(**{**sizes, **specials, "max_positions": 256, "positions": "rotary"})
        save_checkpoint(folder / "model", config, random_weights(config), text)
        (folder / "model" / CHAT_TEMPLATE).write_text(TEMPLATES[kind], encoding="utf-8")
        (folder / "model" / SETTINGS).write_text(json.dumps({SPECIAL_TOKENS: named}), encoding="utf-8")
        messages = CONVERSATIONS["turns"].messages
        model = load(folder / "model")[0]
        return cls(tokenizer, export_onnx(folder / "model", folder / "onnx"), messages, model.chat_ids(messages))


@dataclass(frozen=True)
class Marked:
    """A model with a published vocabulary, its folder, and lines with its maker's tokens."""

    tokenizer: Tokenizer
    folder: Path
    texts: list[str]

    @classmethod
    def of(cls, name: str, folder: Path) -> "Marked":
        facts, text, config = golden(name)
        config = dataclasses.replace(config, d_ff=16, encoder_layers=1, decoder_layers=min(1, config.decoder_layers))
        save_checkpoint(folder / "model", config, random_weights(config), text)
        # transformers.js has NFKC in the place of a published table: lines that both leave as they are.
        texts = [line for line in facts["texts"] if max(line, default="") < "\u0530"]
        return cls(Tokenizer(text), export_onnx(folder / "model", folder / "onnx"), texts)


def published_model(name: str, folder: Path, ends: tuple[int, ...] = (), **generation: Any) -> RandomModel:
    """A decoder that `transformers` wrote, with other ends and settings where it has them."""
    shutil.copytree(DECODERS / name, folder / "theirs")
    file = folder / "theirs" / "generation_config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values = {**values, "eos_token_id": [values["eos_token_id"], *ends], **generation}
    file.write_text(json.dumps(values), encoding="utf-8")
    import_huggingface(folder / "theirs", folder / "model")
    model, _ = load(folder / "model")
    return RandomModel(model, export_onnx(folder / "model", folder / "onnx"), _rows(model.config.vocab_size))


def _rows(vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocabulary, length).tolist() for length in (9, 1, 14, 5)]


def random_model(architecture: str, name: str, folder: Path) -> RandomModel:
    if name in PUBLISHED:
        return published_model(name, folder, PUBLISHED[name])
    config = encoder_decoder(name) if architecture == "encoder-decoder" else alone(name, architecture)
    # A random model with tied embeddings says the same token for ever, and consumers know one width of heads a model.
    config = dataclasses.replace(config, tie_embeddings="none", decoder={})
    weights = random_weights(config)
    save_checkpoint(folder / "model", config, weights)
    model = Transformer.from_weights(config, weights)
    model.eval()
    # One output more than consumers know.
    attention = architecture == "encoder-decoder"
    package = export_onnx(folder / "model", folder / "onnx", attention=attention)
    return RandomModel(model, package, _rows(config.source_vocab_size))


def all_tasks(
    trained: Trained,
    randoms: dict[tuple[str, str], RandomModel],
    chats: dict[str, Chat],
    marked: dict[str, Marked],
) -> list[dict[str, Any]]:
    """As the scripts read them: {"name", "kind", arguments of this kind}."""
    folder = str(trained.folder)
    texts = [*TEXTS, *trained.phrases]
    rows = trained.tokenizer.encode_batch(texts)
    translate = dict(kind="translate", folder=folder, texts=trained.phrases, batch=BATCH, max_new_tokens=NEW_TOKENS)
    tasks = [
        dict(name="tokenize", kind="tokenize", folder=folder, texts=texts, rows=[*rows, *trained.tokens]),
        dict(name="special", kind="tokenize", folder=folder, texts=[SPECIAL_TEXT], rows=[]),
        dict(name="merged", layout="merged", **translate),
        dict(name="split", layout="split", **translate),
        dict(
            name="pipeline", kind="translation_pipeline", folder=folder, texts=[text for text, _ in trained.finished()]
        ),
        _wasm(
            "trained",
            trained.web,
            trained.model.config,
            np.array([rows[-1]]),
            np.ones((1, len(rows[-1])), int),
            "web",
        ),
    ]
    for kind, chat in chats.items():
        folder = str(chat.folder)
        tasks.append(dict(name=f"chat {kind}", kind="chat", folder=folder, messages=chat.messages))
        tasks.append(dict(name=f"texts {kind}", kind="tokenize", folder=folder, texts=MAKERS_TEXTS, rows=[]))
    for name, each in marked.items():
        tasks.append(dict(name=f"marked {name}", kind="tokenize", folder=str(each.folder), texts=each.texts, rows=[]))
    for (architecture, own_name), random in randoms.items():
        ids, mask = random.padded()
        name = f"{architecture} {own_name}"
        task = dict(name=name, folder=str(random.folder), ids=ids.tolist(), mask=mask.tolist())
        if architecture == "encoder":
            tasks.append(dict(kind="logits", **task))
        else:
            tasks.append(dict(kind="generate", architecture=architecture, max_new_tokens=RANDOM_NEW_TOKENS, **task))
        if own_name not in PUBLISHED:
            tasks.append(_wasm(name, random.folder, random.config, ids, mask))
    return tasks


def _wasm(
    name: str, folder: Path, config: TransformerConfig, ids: np.ndarray, mask: np.ndarray, target: str = "portable"
) -> dict[str, Any]:
    """Open all graphs, run the first; with an empty cache, if it is a decoder."""
    graphs = {graph: owner for owner, graphs in target_of(target).data_files(config).items() for graph in graphs}
    inputs = {"input_ids": ids, "attention_mask": mask}
    if config.architecture == "decoder":
        inputs["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
        for layer in range(config.decoder_layers):
            for part, width in (("key", config.d_k), ("value", config.d_v)):
                empty = np.zeros((len(ids), config.key_value_heads, 0, width), np.float32)
                inputs[f"past_key_values.{layer}.{part}"] = empty
    return {
        "name": f"wasm {name}",
        "kind": "wasm",
        "folder": str(folder),
        "graphs": graphs,
        "inputs": {k: [str(v.dtype), v.ravel().tolist(), v.shape] for k, v in inputs.items()},
        "output": "last_hidden_state" if config.architecture == "encoder-decoder" else "logits",
    }


def run(consumer: str, tasks: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """{task's name: {"value": ...} or {"error": text}}. Raises RuntimeError if the consumer is missing or dies."""
    chosen = [task for task in tasks if ONLY.get(task["name"].split()[0], consumer) == consumer]
    (folder / "tasks.json").write_text(json.dumps(chosen), encoding="utf-8")
    command = [*COMMANDS[consumer], str(folder / "tasks.json"), str(folder / "answers.json")]
    # An empty cache of its own: what a developer has downloaded before must not help.
    environment = {**os.environ, "HF_HOME": str(folder / "cache")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not there; run make test-consumers") from None
    if done.returncode != 0:
        raise RuntimeError(f"{consumer} ended with {done.returncode}: {done.stderr[-3000:]}")
    return json.loads((folder / "answers.json").read_text(encoding="utf-8"))


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The origin of a site, which a process of its own serves as long as this lasts."""
    command = [sys.executable, "-m", "export", "serve", "--web", str(site), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            [origin] = re.findall(r"on (http://127\.0\.0\.1:\d+) ", server.stderr.readline())
            yield origin
        finally:
            server.terminate()
