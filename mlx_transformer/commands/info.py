"""The output of `mlx-transformer info`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from mlx_transformer.core.adapter import ADAPTER, read_adapter
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import ONNX_CONFIG, WEIGHTS, Place
from mlx_transformer.core.parameters import parameter_count, quantizable_shapes
from mlx_transformer.core.quantization import described
from mlx_transformer.core.text_embedding import TextEmbedding, read_embedding
from mlx_transformer.core.tokenizer_files import tokenizer_path
from mlx_transformer.families.conversion import ORIGIN, read_published
from mlx_transformer.generation.settings import CHAT_TEMPLATES, Settings, read_settings
from mlx_transformer.system.errors import FEW, UserError
from mlx_transformer.system.files import JsonObject, read_json, read_object
from mlx_transformer.system.gguf_files import parts_of
from mlx_transformer.system.manifest import MANIFEST, verify_file, verify_files
from mlx_transformer.system.tensors import stored_tensors
from mlx_transformer.text.chat import ChatTemplates
from mlx_transformer.text.tokenizer import Tokenizer, checked_tokenizer

LEFT = "int8, but float32"
"""Row title for layers that int8 keeps in float32."""
Facts = Callable[[Path], dict[str, dict[str, Any]]]


def problems_of(error: BaseException | None) -> RenderableType | None:
    """Return a table with all problems of an error, if its message shows only the first few."""
    while error is not None:
        if isinstance(error, UserError) and len(error.problems) > FEW:
            return _table({str(i): problem for i, problem in enumerate(error.problems, 1)}, "problems")
        error = error.__cause__
    return None


@dataclass(frozen=True)
class Description:
    """What `info` says of a model: rich prints it as tables. `files`: {name: bytes}. `graphs`: of `describe_graphs`."""

    facts: dict[str, str]
    config: TransformerConfig | None
    files: dict[str, int]
    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __rich__(self) -> Group:
        files = {name: f"{size:,} bytes" for name, size in self.files.items()}
        parts = [_table(self.facts), *([] if self.config is None else [_config(self.config)]), _table(files, "files")]
        return Group(*parts, *_graphs(self.graphs))

    def json(self) -> str:
        """All of it as a JSON object; names in `facts` are those of the table, with underscores."""
        c = self.config
        network = {} if c is None else {"parameters": parameter_count(c), "config": c.to_dict()}
        graphs = {"graphs": self.graphs} if self.graphs else {}
        facts = {name.replace(" ", "_"): value for name, value in self.facts.items()}
        return json.dumps({**facts, **network, "files": self.files, **graphs}, indent=2)


def describe(path: Path, graph_facts: Facts) -> Description:
    """Describe a checkpoint, a run, an adapter, a published model, an ONNX folder or an ONNX file with the
    search.

    graph_facts: `export.package.plan.describe_graphs`, or a function like it. Raises `UserError` for anything else, and
    if it is damaged.
    """
    place = Place.of(path)
    if path.is_file() and not place.is_importable:
        return _file(path, graph_facts)
    if place.what == "an adapter":
        return Description({"kind": "adapter", "folder": str(path), **_adapter(path)}, None, _files(path))
    if place.check_model().onnx:
        return _onnx(path, graph_facts)
    return _published(path) if place.is_importable else _checkpoint(path)


def _file(path: Path, graph_facts: Facts) -> Description:
    from export.search.metadata import ACTIVATIONS, CONFIG, PRECISION, TOKENIZER, VECTOR, int8_scales_of

    if path.suffix != ".onnx":
        raise UserError(
            f"{path}: is a file; a model is a folder, one .onnx file that `export --search` wrote, or a .gguf"
        )
    verify_file(path)
    graphs = graph_facts(path)
    (graph,) = graphs.values()
    metadata, data = graph["metadata"], path.with_name(f"{path.name}_data")
    facts = {"kind": "ONNX model, not of this project", "file": str(path)}
    sizes = {file.name: file.stat().st_size for file in (path, data) if file.is_file()}
    if CONFIG not in metadata:
        return Description(facts, None, sizes, graphs)
    takes_text = "text" in {name for name, *_ in graph["inputs"]}
    facts["kind"] = "vectors of texts in one ONNX file" if VECTOR in metadata else "search in one ONNX file"
    facts["takes"] = "text" if takes_text else "ids; text by the tokenizer in it" if TOKENIZER in metadata else "ids"
    facts["precision"] = metadata.get(PRECISION, "float32")
    if ACTIVATIONS in metadata:
        facts["activations"] = metadata[ACTIVATIONS]
    try:
        config = TransformerConfig.from_json(metadata[CONFIG])
    except UserError as error:
        raise UserError(f"{path}: {error}; write it again with export --search") from error
    scales = int8_scales_of(metadata, config, path)
    facts |= {LEFT: ", ".join(scales.float32)} if scales is not None and scales.float32 else {}
    return Description(facts, config, sizes, graphs)


def _checkpoint(path: Path) -> Description:
    opened = open_checkpoint(path)
    facts = {"kind": "checkpoint", "folder": str(opened.folder), "tensors": str(len(opened.names()))}
    facts["digests"] = _digests(opened.folder)
    facts |= {"stored as": _types(stored_tensors(opened.folder / WEIGHTS))} | _origin(opened.folder)
    facts |= _head(opened.config, read_embedding(opened.folder, opened.config.d_model))
    if (text := checked_tokenizer(opened)) is not None:  # raises if it is wrong
        facts |= _vocabularies(Tokenizer(text))
    facts |= _chat(read_settings(opened.folder, opened.config))
    if opened.quantization:
        facts["quantised"] = described(opened.quantization, quantizable_shapes(opened.config))
    run = path / "run.json"
    if run.is_file():
        facts |= _run(run)
    if opened.adapter is not None:
        facts |= _adapter(opened.folder)
        facts["it is kept"] = (
            f"beside {len(opened.adapted_integers)} matrices of integers, and merged into the others as they are read"
        )
    elif any((folder / ADAPTER).is_file() for folder in (path, path / "adapter")):
        facts |= _adapter(path)
    return Description(facts, opened.config, _files(opened.folder))


def _published(path: Path) -> Description:
    ours = read_published(path)
    what, form = ("GGUF model", "file") if path.is_file() else ("published model", "folder")
    facts = {"kind": f"{what}, which `import` makes a checkpoint of", form: str(path)}
    facts |= _vocabularies(Tokenizer(ours.tokenizer, str(path))) if ours.tokenizer is not None else {}
    facts |= {"stored as": _types(ours.weights)} | _head(ours.config, ours.text_embedding) | _chat(ours.settings)
    if ours.quantization:
        facts["quantised"] = described(ours.quantization, quantizable_shapes(ours.config))
    facts |= {f"note {i}": note for i, note in enumerate(ours.notes, 1) if note not in facts.values()}
    return Description(facts, ours.config, _files(path))


def _types(tensors: Mapping[str, Any]) -> str:
    """E.g. "uint32 210 tensors, float32 61 tensors"."""
    counts = Counter(str(array.dtype) for array in tensors.values())
    return ", ".join(f"{kind} {count} tensors" for kind, count in counts.most_common())


def _head(config: TransformerConfig, embedding: TextEmbedding | None) -> dict[str, str]:
    """What an encoder makes of a text: classes, or a vector."""
    facts = {"labels": ", ".join(config.head.labels)} if config.head.labels else {}
    if embedding is not None:
        ways = ", ".join((*embedding.pooling, *(f"dense {layer.width}" for layer in embedding.dense)))
        length = ", of length 1" if embedding.normalize else ""
        facts["vectors"] = f"{' and '.join(embedding.kinds)}: {ways}, {embedding.width(config.d_model)} numbers{length}"
        facts |= {f"prompt {name}": repr(text) for name, text in embedding.prompts.items()}
    return facts


def _adapter(path: Path) -> dict[str, str]:
    adapter = read_adapter(path)
    c, count = adapter.config, sum(array.size for array in adapter.arrays.values())
    facts = {"adapter": f"{c.kind} of rank {c.rank}, alpha {c.alpha:g}: {count:,} parameters"}
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", target) for target in c.targets)
    facts["its targets"] = f"{len(c.targets)} linear maps: {', '.join(kinds)}"
    return facts | {"its base": f"model.safetensors of SHA-256 {c.base}"}


def _origin(folder: Path) -> dict[str, str]:
    """Where an imported model came from, and the digests of its files of weights."""
    if not (folder / ORIGIN).is_file():
        return {}
    origin = JsonObject(read_object(folder / ORIGIN), f"{folder / ORIGIN}: damaged")
    digests = "; ".join(f"{name}: SHA-256 {digest}" for name, digest in origin.object("sha256").items())
    return {"imported from": f"{origin.text('place') or 'not said'}; {digests}".removesuffix("; ")}


def _run(path: Path) -> dict[str, str]:
    record = JsonObject(read_object(path), f"{path}: damaged")
    texts = record.object("data")
    counts = {name: {unit: n for unit, n in texts.object(name).items() if type(n) is int} for name in texts}
    data = ", ".join(f"{name} {n:,} {unit}" for name, units in counts.items() for unit, n in units.items())
    return {"run": str(path.parent), "data": data or "not said", "trained on": record.text("device") or "not said"}


def _onnx(path: Path, graph_facts: Facts) -> Description:
    graphs = path / "onnx" if (path / "onnx").is_dir() else path
    for folder in {graphs, path}:
        verify_files(folder)
    facts = {"kind": "ONNX models", "folder": str(path), "digests": _digests(graphs)}
    file = path / ONNX_CONFIG
    config: TransformerConfig | None = None
    if file.is_file():
        values = read_json(file)
        if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
            raise UserError(f"{file}: damaged (no config in it); export the model again")
        try:
            config = TransformerConfig.from_dict(values["config"])
        except UserError as error:
            raise UserError(f"{file}: {error}; export the model again") from error
        facts |= _adapter_facts(values) | _left(values) | _products(values, graphs)
        if (place := tokenizer_path(path)) is not None:
            tokenizer = Tokenizer.load(place)
            tokenizer.check_fits(config, str(path))
            facts |= _vocabularies(tokenizer)
        facts |= _head(config, read_embedding(path, config.d_model)) | _chat(read_settings(path, config))
        facts["precisions"] = ", ".join(values.get("precisions") or {})
    return Description(facts, config, _files(path), graph_facts(path))


def _chat(settings: Settings) -> dict[str, str]:
    """Name a decoder's chat templates; hidden instructions in them are as much part of the model as its weights."""
    if not (templates := settings.get(CHAT_TEMPLATES)):
        return {}
    return {"chat template": f"{', '.join(templates)}: SHA-256 {ChatTemplates(templates).digest}"}


def _vocabularies(tokenizer: Tokenizer) -> dict[str, str]:
    if not tokenizer.separate:
        return {}
    return {"vocabularies": f"source {tokenizer.source.vocab_size:,} tokens, target {tokenizer.vocab_size:,}"}


def _adapter_facts(values: dict[str, Any]) -> dict[str, str]:
    """Describe an adapter that the graphs hold unmerged."""
    try:
        adapter = values["adapter"]
        text = f"{adapter['kind']} of rank {adapter['rank']}, alpha {adapter['alpha']:g}"
        maps = f"{adapter['linear_maps']} linear maps, {adapter['beside_integers']} of them beside integers"
        return {"adapter": f"{text}: {maps} in float32 and packed"}
    except (LookupError, TypeError, ValueError):
        return {}


def _left(values: dict[str, Any]) -> dict[str, str]:
    """List the layers that int8 keeps in float32."""
    try:
        return {LEFT: ", ".join(values["precisions"]["int8"]["float32"])}
    except (LookupError, TypeError):
        return {}


def _products(values: dict[str, Any], graphs: Path) -> dict[str, str]:
    """Say how integers are multiplied: in which precisions, and how this processor sums products of bytes."""
    from export.interface import PROMPT_CPU
    from export.precision.table import PRECISIONS

    held = [name for name in PRECISIONS if name in (values.get("precisions") or {}) and PRECISIONS[name].bits <= 8]
    if not held or find_spec("onnxruntime") is None:
        return {}
    from export.validate.engines.onnxruntime_engine import integer_kernel

    apart = [name for name in held if (graphs / f"{PROMPT_CPU}{PRECISIONS[name].suffix}.onnx").is_file()]
    prompts = [f"; {name}'s prompts in {PRECISIONS[name].prompts}" for name in apart]
    return {"integer products": f"{', '.join(held)}{''.join(prompts)}; on this processor {integer_kernel()}"}


def _digests(folder: Path) -> str:
    """Say which digests were compared; the comparison has already passed."""
    return "verified" if (folder / MANIFEST).exists() else "no manifest to verify"


def _graphs(graphs: dict[str, dict[str, Any]]) -> list[RenderableType]:
    tables: list[RenderableType] = []
    for name, facts in graphs.items():
        table = Table(title=f"{escape(name)}: {facts['nodes']} nodes, opset {facts['opset']}", title_justify="left")
        for column in ("", "name", "type", "shape"):
            table.add_column(column, overflow="fold")  # fold, don't cut: names differ at their ends
        for kind in ("inputs", "outputs"):
            for value in facts[kind]:
                table.add_row(kind[:-1], *map(escape, value))
        tables.append(table)
    return tables


def _config(config: TransformerConfig) -> Table:
    values = {name: str(value) for name, value in config.to_dict().items()}
    return _table({"parameters": f"{parameter_count(config):,}", **values}, "config")


def _files(folder: Path) -> dict[str, int]:
    """Sizes of a folder's files, or of all parts of a GGUF file."""
    paths = parts_of(folder) if folder.is_file() else sorted(folder.rglob("*"))
    root = folder.parent if folder.is_file() else folder
    return {str(path.relative_to(root)): path.stat().st_size for path in paths if path.is_file()}


def _table(facts: dict[str, str], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(escape(name), escape(value))
    return table
