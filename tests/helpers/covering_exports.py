"""Small models and how each is exported: every two choices that go together do so in one, over all options of the
network, targets, precisions, forms of the search, tokenizers and quantised weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import covering_configs
from adapter_models import made
from options import Factors, Values, covering, factors_of, merged
from random_models import random_weights

from export.precision.table import IN_BLOCKS
from mlx_transformer.convert.merge import keep_adapter
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import CONFIG, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.core.tokenizer_files import join_texts
from mlx_transformer.system.machine import versions
from mlx_transformer.system.manifest import MANIFEST
from mlx_transformer.text.tokenizer import Tokenizer

SIZES = {**covering_configs.BASE, "d_model": 32}  # which groups of 32 divide
LINES = ["one two three. four five six! größer 東京 " * 3]
TOKENS = {"joint": 280, "source": 270}

# Arguments of `export_onnx`, or with `search` of `export_search`; weights, tokenizer and gate say what they are given.
HOW: Factors = {
    "form": [
        *(dict(target=name) for name in ("portable", "cpu", "web", "cuda")),
        dict(target="cpu", external_threshold=0),
        dict(search=True, target="portable"),
        dict(search=True, target="cpu", external=True),
        dict(search=True, target="portable", text=True),
        dict(search=True, target="cpu", text=True),
    ],
    "precision": [
        *(
            dict(precision=name)
            for name in ("float32", "float16", "bfloat16", "int8", "int8-weights", "int4", "packed")
        ),
        *(dict(precision=name, activations="float32") for name in ("int8-weights", "int4", "packed")),
        dict(precision=["float32", "int8"]),
        dict(precision="int8", int8_scales="token"),
        dict(precision="int8", int8_scales="fixed", calibrate=True),
        dict(precision=["int4", "float16"], activations="int8"),
    ],
    "interface": [{}, dict(attention=True), dict(attention_layer=0), dict(inputs_embeds=True)],
    "weights": [{}, dict(weights=4), dict(weights=8), dict(weights="lora"), dict(weights="dora")],
    "vocabulary": [
        *covering_configs.BY_HAND["vocabulary"],
        dict(vocab_size=TOKENS["joint"], tokenizer="joint"),
        dict(vocab_size=TOKENS["joint"], source_vocab_size=TOKENS["source"], tokenizer="each"),
    ],
    "gate": [{}, dict(gate=True)],
}
FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
DRAWS = 500000


@dataclass(frozen=True)
class Export:
    """One call of `function`; `file` is what is written, `name` holds a digest of all that goes in."""

    name: str
    function: str
    checkpoint: str
    file: str
    options: Values


def factors(known: Mapping[str, list[Any]]) -> Factors:
    """Without the fields, and the values of fields, that `known`, {field: its values or none}, hasn't."""

    def is_known(name: str, value: Any) -> bool:
        return name not in FIELDS or (name in known and (not known[name] or value in known[name]))

    return {
        factor: [values for values in choices if all(is_known(*item) for item in values.items())] or [{}]
        for factor, choices in factors_of({**covering_configs.BY_HAND, **HOW}).items()
    }


def accepted(values: Values) -> bool:
    """Whether a model can be made and exported so: what `export_onnx` and `export_search` refuse is not."""
    config = {"d_model": SIZES["d_model"], **{name: value for name, value in values.items() if name in FIELDS}}
    architecture, tie = values["architecture"], values["tie_embeddings"]
    both, search, tokenizer = architecture == "encoder-decoder", "search" in values, values.get("tokenizer")
    precisions = [values["precision"]] if isinstance(values["precision"], str) else values["precision"]
    quantized, vectors = "weights" in values, "inputs_embeds" in values
    shown = "attention" in values or "attention_layer" in values
    rounded = [name for name in precisions if name not in ("float32", "packed")]
    return all(
        (
            both or not (search or shown or tokenizer == "each"),
            not search or len(precisions) == 1,
            not vectors or (architecture != "decoder" and not search),
            not shown or "text" not in values,
            "text" not in values or tokenizer == "joint",
            tokenizer is None or "pad_id" not in values,
            tokenizer != "each" or tie != "all",
            ("packed" in precisions) <= quantized,
            not quantized or (set(precisions) <= {"float32", "int8", "packed"} and config["d_model"] % 32 == 0),
            "gate" not in values or (both and tokenizer is not None and rounded and not vectors),
            "calibrate" not in values or tokenizer is not None,
            "activations" not in values or set(precisions) & set(IN_BLOCKS),
        )
    ) and covering_configs.accepted(config)


def write_exports(folder: Path, known: Mapping[str, list[Any]]) -> Iterator[Export]:
    """FOLDER/NAME, a checkpoint, for each of them."""
    tokenizers = _tokenizers()
    gate = {name: folder / name for name in ("gate_source", "gate_reference")}
    folder.mkdir(parents=True)
    for path in gate.values():
        path.write_text("one two\nfour three six!\ngrößer\n", encoding="utf-8")
    all_factors = factors(known)
    for i, choice in enumerate(covering(all_factors, accepted, draws=DRAWS)):
        values = {**SIZES, **merged(all_factors, choice)}
        config = TransformerConfig(**{name: value for name, value in values.items() if name in FIELDS})
        options = {name: value for name, value in values.items() if name not in FIELDS}
        weights, search = options.pop("weights", None), options.pop("search", False)
        checkpoint = _write(folder / f"{i:03d}", config, i, tokenizers.get(options.pop("tokenizer", None)), weights)
        if options.pop("gate", False):
            options |= {name: str(path) for name, path in gate.items()} | {"accept_loss": True}
        if options.pop("calibrate", False):
            options |= {"calibrate": str(gate["gate_source"]), "accept_loss": True}
        function, file = ("export_search", "search.onnx") if search else ("export_onnx", "onnx")
        name = f"{i:03d}-{options['target']}-{config.architecture}-{_digest(checkpoint, options)}"
        yield Export(name, function, str(checkpoint), file, options)


def _tokenizers() -> dict[str | None, str]:
    joint, source = (Tokenizer.train(LINES, vocab_size=size).to_json() for size in TOKENS.values())
    return {"joint": joint, "each": join_texts(source, joint)}


def _write(
    folder: Path, config: TransformerConfig, seed: int, tokenizer: str | None, weights: int | str | None
) -> Path:
    """A checkpoint that any revision reads which knows the fields that are not as by default."""
    out = save_checkpoint(folder / "model", config, random_weights(config, seed), tokenizer, force=True)
    if weights is not None:
        out = folder / "quantized"
        quantize_checkpoint(folder / "model", out, Scheme(32, weights if isinstance(weights, int) else 4))
    if isinstance(weights, str):
        made(out, weights, rank=1).write(folder / "adapter")
        out = folder / "adapted"
        keep_adapter(folder / "quantized", folder / "adapter", out)
    values = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    usual = {field.name for field in dataclasses.fields(config) if getattr(config, field.name) == _default(field)}
    values = {name: value for name, value in values.items() if name not in usual}
    (out / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (out / MANIFEST).unlink()  # of the longer config.json; a checkpoint may have none
    return out


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _digest(checkpoint: Path, options: Values) -> str:
    """Of the checkpoint, the options and the installed packages, whose versions are written too."""
    found = hashlib.sha256(json.dumps([options, versions()], sort_keys=True).encode())
    for path in sorted(checkpoint.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:12]
