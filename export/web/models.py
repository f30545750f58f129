"""Read the models of a site, from exported folders and from files with the search inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx

from export.graph.protos import data_files_of, metadata_of, read_model
from export.interface import DECODER_MERGED, ENCODER, MODEL, SEARCH, SETTINGS, Request
from export.interface import GRAPHS as PORTS
from export.precision.table import PRECISIONS
from export.runtime.folder import graph_file, open_folder, precisions, verify_beside
from export.search.metadata import ATTENTION, CONFIG, GENERATION, PRECISION, SOURCE, TOKENIZER
from export.search.text import is_byte_level
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE, JOINT, read_tokenizer, side_texts
from mlx_transformer.generation.settings import (
    CHAT_TEMPLATES,
    LANGUAGES,
    SOURCE_LANGUAGE,
    SOURCE_LAST,
    TARGET_IN_SOURCE,
    TARGET_LANGUAGE,
    TARGET_STARTS,
    TASK_PREFIX,
    Settings,
    checked_settings,
    chosen_options,
    read_settings,
)
from mlx_transformer.system.errors import CommandLine, UserError
from mlx_transformer.system.files import parse_json, read_json
from mlx_transformer.system.manifest import verify_file, verify_files
from mlx_transformer.text.added_tokens import WHOLE
from mlx_transformer.text.published_ids import roles_of
from mlx_transformer.text.sentencepiece_tokenizer import is_sentencepiece
from mlx_transformer.text.tokenizer import SPLIT_PATTERN, Tokenizer

STEPS = {"encoder": ENCODER, "decoder": DECODER_MERGED}
"""{the page's name for a graph: its name here}, for models whose search the page does."""
GRAPHS = {**STEPS, "search": SEARCH}
CHAT_FILES = ("config.json", "generation_config.json", JOINT, "tokenizer_config.json", CHAT_TEMPLATE)
"""Files that Transformers.js reads from a decoder's folder, besides its graph."""
GIVEN = {
    *("beam", "n_best", "early_stopping", "length_penalty", "penalty_offset", "max_new_tokens", "min_new_tokens"),
    *("sample", "seed", "temperature", "top_k", "top_p"),
    *("prefix", "candidates", "forced_first", "start_id", "rows"),
}
"""Search options set by the page (`page/search.js`)."""
CONFIG_FIELDS = ("vocab_size", "max_positions", "pad_id", "bos_id", "eos_id")
"""Fields of TransformerConfig needed by a search."""
GENERATION_FIELDS = (
    *("beam", "length_penalty", "penalty_offset", "max_new_tokens", "max_length_factor", "min_new_tokens"),
    *("early_stopping", "heuristic_stop", "repetition_penalty", "no_repeat_ngram", "forced_end"),
    *("forced_first", "suppressed", "suppressed_first", "end_ids", "banned_sequences"),
)
"""Fields of `Options` that the page supports."""
CHAT_FIELDS = ("sample", "temperature", "top_k", "top_p", "max_new_tokens")
"""Fields of `Options` that a chat offers, with the model's defaults."""
WASM_ALONE = ("int8", "bfloat16")
"""Precisions that WebGPU can't run: it has no MatMulInteger, and no bfloat16."""
BEFORE = [
    {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
]
"""The pre-tokenizer implemented by page/tokenizer.js."""


@dataclass(frozen=True)
class Graph:
    """A graph file of a model.

    data: its external data files, by their names in the graph. inputs, outputs: their names. contents: the graph's
    bytes, if they differ from the file's.
    """

    file: Path
    data: Mapping[str, Path]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    contents: bytes | None = None


@dataclass(frozen=True)
class SiteModel:
    """A model in the page's list.

    kind     graphs                            search by
    steps    encoder and decoder               the page
    search   a single file                     the graph
    chat     decoder, by Transformers.js       Transformers.js, which finds the graph by `file` and `dtype`

    request: describes the graphs' inputs and outputs. source: SHA-256 of the checkpoint's weights, if recorded.
    beside: the other files that Transformers.js reads.
    """

    name: str
    kind: Literal["steps", "search", "chat"]
    request: Request
    tokenizer: str
    source: str | None
    graphs: dict[str, Graph]
    settings: Settings
    """Its default generation settings."""
    webgpu: bool
    place: Path
    """The folder with the files that its settings name, e.g. a shortlist."""
    float16: bool = False
    """WebGPU runs it only on a device with float16."""
    file: str = MODEL
    dtype: str = ""
    beside: tuple[Path, ...] = ()

    @property
    def config(self) -> TransformerConfig:
        return self.request.config

    @property
    def attention(self) -> bool:
        """Whether its graphs return cross-attention."""
        return self.request.attention_layer is not None

    @property
    def names(self) -> dict[str, dict[str, dict[str, str]]]:
        """Names of values in the graphs: {graph: {"inputs": {value: name}, "outputs": {value: name}}}."""
        names = {}
        for name, graph in self.graphs.items():
            ports = PORTS[GRAPHS[name]](self.request).among(graph.inputs, graph.outputs)
            names[name] = {"inputs": ports.input_names, "outputs": ports.output_names}
        return names


def facts_of(config: TransformerConfig, settings: Settings) -> dict[str, Any]:
    """`config` in site.json of a model that translates: sizes, special ids, and the settings of the search."""
    _, options = chosen_options(settings, {})
    optional = {"languages": LANGUAGES, "target_in_source": TARGET_IN_SOURCE}
    optional |= {"source_last": SOURCE_LAST, "target_starts": TARGET_STARTS}
    optional |= {"source_language": SOURCE_LANGUAGE, "target_language": TARGET_LANGUAGE}
    generation = {
        **{name: getattr(options, name) for name in GENERATION_FIELDS},
        **{name: settings[key] for name, key in optional.items() if key in settings},
        "task_prefix": settings.get(TASK_PREFIX, ""),
    }
    start = config.bos_id if options.start_id is None else options.start_id
    return {**{name: getattr(config, name) for name in CONFIG_FIELDS}, "start_id": start, "generation": generation}


def chat_facts(config: TransformerConfig, settings: Settings, tokenizer: str) -> dict[str, Any]:
    """`config` in site.json of a decoder.

    control_tokens: spellings that are split like any text if a person types them. templates: whether the model has a
    chat template; without one it continues the text.
    """
    _, options = chosen_options(settings, {})
    return {
        "max_positions": config.max_positions,
        "control_tokens": Tokenizer(tokenizer).control_tokens,
        "templates": bool(settings.get(CHAT_TEMPLATES)),
        "generation": {name: getattr(options, name) for name in CHAT_FIELDS},
    }


def read_models(path: Path, verify: bool = True) -> list[SiteModel]:
    """Read a folder's models, one per precision, or a file's model. Raises UserError if a page can't run them."""
    models = [_of_file(path, verify)] if path.is_file() else _of_folder(path, verify)
    for model in models:
        if model.kind == "chat":
            continue
        if model.config.architecture != "encoder-decoder":
            architecture = model.config.architecture
            chats = "; to chat, export the decoder as a folder" if architecture == "decoder" else ""
            raise UserError(f"{path}: architecture={architecture!r}: a page translates or chats{chats}")
        _check_tokenizer(path, model.tokenizer)
    return models


def _of_folder(path: Path, verify: bool) -> list[SiteModel]:
    models = []
    for precision in precisions(path) or [None]:
        opened = open_folder(path, precision)  # raises UserError for a folder without graphs
        chats = opened.config.architecture == "decoder"
        if opened.request.inputs_embeds:
            raise UserError(f"{path}: its encoder reads vectors (inputs_embeds), but a page translates text")
        if opened.tokenizer_path is None:
            raise UserError(f"{path}: has no tokenizer.json, which a page needs: export a checkpoint that has one")
        precision, suffix = opened.precision, PRECISIONS[opened.precision].suffix
        wanted = {"model": MODEL} if chats else STEPS
        files = {name: graph_file(opened.place, graph, suffix) for name, graph in wanted.items()}
        graphs = {name: _read(file) for name, file in files.items() if file is not None}
        if opened.config.architecture != "encoder" and len(graphs) < len(wanted):
            needed = " and ".join(f"{name}{suffix}.onnx" for name in wanted.values())
            raise UserError(f"{path}: a page needs {needed}: export it with --target web")
        if verify:
            used = [file.name for graph in graphs.values() for file in (graph.file, *graph.data.values())]
            verify_files(opened.place, used)
            verify_beside(path)
        tokenizer = read_tokenizer(opened.tokenizer_path)
        details = _source(path), graphs, read_settings(path, opened.config), precision not in WASM_ALONE, path
        if not chats:
            models.append(SiteModel(precision, "steps", opened.request, tokenizer, *details, precision == "float16"))
            continue
        beside = tuple(path / name for name in CHAT_FILES if (path / name).is_file())
        if not (dtype := PRECISIONS[precision].dtype):
            raise UserError(f"{path}: Transformers.js has no {precision}; export it in another precision")
        half, file = precision == "float16", f"{MODEL}{suffix}" if precision == "packed" else MODEL
        models.append(SiteModel(precision, "chat", opened.request, tokenizer, *details, half, file, dtype, beside))
    return models


def _of_file(file: Path, verify: bool) -> SiteModel:
    """Read a file, and turn the options set by the page into required inputs.

    onnxruntime-web accepts no inputs with defaults; the other options stay fixed at their defaults.
    """
    if verify:
        verify_file(file)
    model = read_model(file)
    facts = metadata_of(model)
    if CONFIG not in facts:
        raise UserError(
            "{}: has no search inside; write it: {}", file, CommandLine("export", "CHECKPOINT OUT.onnx --search")
        )
    config = TransformerConfig.from_dict(parse_json(facts[CONFIG], f"{file}: damaged", "export it again"))
    if PORTS[SEARCH](Request(config=config, text=True)).input_names["text"] in {v.name for v in model.graph.input}:
        raise UserError(
            f"{file}: takes text, by operators that browsers lack: export it with --search, not --embed-tokenizer"
        )
    if TOKENIZER not in facts:
        raise UserError(f"{file}: has no tokenizer, which a page needs: export a checkpoint that has one")
    data = _data(file, model)
    tensors = [tensor for tensor in model.graph.initializer if tensor.name not in GIVEN]
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)
    for value in [value for value in model.graph.input if value.name in SETTINGS.keys() - GIVEN]:
        model.graph.input.remove(value)
    for entry in [entry for entry in model.metadata_props if entry.key == TOKENIZER]:
        model.metadata_props.remove(entry)
    name = f"{facts.get(PRECISION, 'float32')}, search inside"
    graph = _graph(file, model, data, model.SerializeToString(deterministic=True))
    own = parse_json(facts.get(GENERATION, "{}"), f"{file}: damaged settings", "export it again")
    settings = checked_settings(own, config, str(file))
    details = facts[TOKENIZER], facts.get(SOURCE), {"search": graph}, settings, False, file.parent
    layer = int(facts[ATTENTION]) if ATTENTION in facts else None
    return SiteModel(name, "search", Request(config=config, attention_layer=layer), *details)


def _graph(file: Path, model: onnx.ModelProto, data: Mapping[str, Path], contents: bytes | None = None) -> Graph:
    inputs, outputs = (tuple(value.name for value in side) for side in (model.graph.input, model.graph.output))
    return Graph(file, data, inputs, outputs, contents)


def _read(file: Path) -> Graph:
    model = read_model(file)
    return _graph(file, model, _data(file, model))


def _data(file: Path, model: onnx.ModelProto) -> dict[str, Path]:
    names = dict.fromkeys(data_files_of(model))
    for name in names:
        if Path(name).name != name or not (file.parent / name).is_file():
            raise UserError(f"{file}: its data file {name!r} is not beside it; export it again")
    return {name: file.parent / name for name in names}


def _source(folder: Path) -> str | None:
    if not (folder / ONNX_CONFIG).is_file():
        return None
    values: Any = read_json(folder / ONNX_CONFIG)
    try:
        return " ".join(entry["sha256"] for entry in values["source"].values())
    except (LookupError, TypeError, AttributeError):
        return None


def _check_tokenizer(path: Path, text: str) -> None:
    """Raise UserError unless the page's tokenizer gives the same ids as this tokenizer."""
    Tokenizer(text, f"{path}: tokenizer")
    for part in (side_texts(text) or {"": text}).values():
        values = parse_json(part, f"{path}: damaged tokenizer", "export it again")
        if not (_is_ours(values) or _has_known_pieces(values) or is_byte_level(part)):
            raise UserError(f"{path}: unsupported tokenizer; a page has those that this project trains or imports")


def _is_ours(values: Mapping[str, Any]) -> bool:
    """Whether a parsed tokenizer.json is byte-level BPE as `train` makes it."""
    model, before = values["model"], (values.get("pre_tokenizer") or {}).get("pretokenizers", [])
    parts = [{key: value for key, value in part.items() if key != "trim_offsets"} for part in before]
    return (
        (model.get("type"), bool(model.get("ignore_merges")), values.get("normalizer")) == ("BPE", False, None)
        and parts == BEFORE
        and (values.get("decoder") or {}).get("type") == "ByteLevel"
    )


def _has_known_pieces(values: dict[str, Any]) -> bool:
    """Whether a parsed tokenizer.json is SentencePiece's, without user-defined pieces, which a page doesn't support."""
    roles = roles_of(values)
    defined = {each["id"] for each in values.get("added_tokens") or [] if not each["special"]}
    return is_sentencepiece(values) and (defined <= {*roles.get(WHOLE, ())} or bool(roles.get("prefixes")))
