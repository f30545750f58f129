"""The plan of an export, checked as a whole before anything is written; and facts about a folder's graphs, read without
their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from export.graph.protos import all_nodes, metadata_of, read_model
from export.interface import Request
from export.precision.int8 import BY_ROW
from export.precision.packed import check_integers
from export.precision.table import check_activations, check_precisions
from export.settings import ExportSettings
from export.targets.attention import requested_layer
from export.targets.sentence_embedding import in_graph
from export.targets.table import Target, target_of
from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint
from mlx_transformer.core.config import RELATIVE, SINUSOIDS, TransformerConfig
from mlx_transformer.core.heads import EMBEDDING
from mlx_transformer.core.int8_scales import Int8Scales
from mlx_transformer.core.positions import long_from, rotation_of
from mlx_transformer.core.shortlist import open_shortlist
from mlx_transformer.core.text_embedding import TextEmbedding, read_embedding
from mlx_transformer.generation.settings import NO_SHORTLIST, SHORTLIST, Settings, named_files, read_settings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import sha256
from mlx_transformer.text.tokenizer import checked_tokenizer

from .quality import LIMITS

Value = tuple[str, str, str]  # name, element type, shape such as "batch_size x 8 x 64"


def describe_graphs(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Describe FOLDER/*.onnx and FOLDER/onnx/*.onnx, sorted by name, or a single file.

    Returns {file name: {"nodes": count, "opset": version, "inputs": [...], "outputs": [...], "metadata": {...}}}, with
    inputs and outputs as (name, type, shape), e.g. ("input_ids", "int64", "batch_size x encoder_sequence_length").
    Nodes inside branches of If are counted. Raises UserError for a file in another format than ONNX.
    """
    folder = Path(folder)
    if folder.is_file():
        return {folder.name: _facts(folder)}
    files = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")])
    return {str(file.relative_to(folder)): _facts(file) for file in files}


def _facts(file: Path) -> dict[str, Any]:
    model = read_model(file)
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        "nodes": sum(1 for _ in all_nodes(model.graph)),
        "opset": next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0),
        "inputs": [_value(value) for value in model.graph.input if value.name not in weights],
        "outputs": [_value(value) for value in model.graph.output],
        "metadata": metadata_of(model),
    }


def _value(value: onnx.ValueInfoProto) -> Value:
    tensor = value.type.tensor_type
    sizes = [d.dim_param or str(d.dim_value) if d.WhichOneof("value") else "?" for d in tensor.shape.dim]
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()  # pyright: ignore[reportArgumentType]
    return value.name, dtype, " x ".join(sizes) or "scalar"


LARGEST_TABLE = 1 << 28
"""Most bytes of the constant table of positions in a graph."""

SHORTLIST_FILE = "shortlist.bin"
"""Name of the file with the export's shortlist, if any."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checkpoint opened for export, and every choice of the export."""

    checkpoint: Checkpoint
    tokenizer: str | None
    """The text of the checkpoint's tokenizer.json; None without a tokenizer."""
    target: Target
    precisions: tuple[str, ...]
    activations: str
    int8_scales: Int8Scales
    """Fixed scales, and the matrices left in float32. A product without an entry gets a scale per token."""
    request: Request
    embedding: TextEmbedding | None
    """How an encoder's text vector is made, already shortened to `dimensions`."""
    generation: Settings
    """The model's default generation settings."""
    named: dict[str, Path]
    """Files named by the generation settings, as {name: file}."""
    shortlist: str | dict[str, str] | None
    """The export's own choice of shortlist as the package records it: its digest, or "none"; None: the model's settings
    decide."""

    @classmethod
    def of(cls, checkpoint: str | Path | Checkpoint, settings: ExportSettings) -> Plan:
        """Check the settings against a checkpoint (a path, or already open), and return the plan.

        Raises UserError for a damaged checkpoint, contradictory settings, a model the target can't express, or more
        positions than a graph should hold.
        """
        target = target_of(settings.target)
        precisions = check_precisions(settings.precision)
        activations = check_activations(settings.activations, precisions)
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        opened = opened.widened()
        check_scales(settings, precisions, opened.config.architecture)
        tokenizer = checked_tokenizer(opened)
        _check_positions(opened)
        check_integers(opened, precisions)
        layer = requested_layer(opened.config, settings.attention, settings.attention_layer)
        if settings.inputs_embeds and not opened.config.has_encoder:
            raise UserError("inputs_embeds: a decoder alone goes on from ids; an encoder takes vectors in their place")
        target.for_model(opened.config)
        generation, named, shortlist = _generation(opened, settings.shortlist)
        embedding = _embedding(opened, settings.dimensions)
        return cls(
            generation=generation,
            named=named,
            shortlist=shortlist,
            checkpoint=opened,
            embedding=embedding,
            tokenizer=tokenizer,
            target=target,
            precisions=tuple(precisions),
            activations=activations,
            int8_scales=BY_ROW.leaving(_float32_layers(settings), opened.config),
            request=Request(
                config=opened.config,
                attention_layer=layer,
                inputs_embeds=settings.inputs_embeds,
                by_token=target.by_token and opened.config.architecture == "encoder",
                embedding=in_graph(opened.config, embedding),
                dimensions=settings.dimensions,
            ),
        )

    @property
    def config(self) -> TransformerConfig:
        return self.checkpoint.config

    def say_what_is_widened(self, log: Callable[[str], None]) -> None:
        own = self.checkpoint.precision
        if own != "float32" and "float32" in self.precisions:
            log(f"{self.checkpoint.folder}: stored in {own}; float32 holds the same numbers in twice the room")

    @property
    def written(self) -> Target:
        """The target whose graphs are written: the requested target, or its substitute for this model."""
        return self.target.for_model(self.config)

    @property
    def judged(self) -> list[str]:
        """Precisions judged by the quality gate against float32."""
        return [name for name in self.precisions if name in LIMITS and name not in self.elsewhere]

    @property
    def elsewhere(self) -> list[str]:
        """Precisions to leave unjudged on this machine: no CPU runs them, and the target's execution provider is
        missing."""
        return ["bfloat16"] if "bfloat16" in self.precisions and self.provider != self.target.provider else []

    @property
    def provider(self) -> str | None:
        """The target's execution provider, if ONNX Runtime has it on this machine."""
        from export.runtime.sessions import is_available

        provider = self.target.provider
        return provider if provider is not None and is_available(provider) else None

    def plain(self) -> Plan:
        """The plan of a portable package, from which the quality gate reads logits: float32 and the judged
        precisions."""
        precisions, request = ("float32", *self.judged), Request(config=self.config)
        return replace(self, target=target_of("portable"), precisions=precisions, request=request)


def _embedding(opened: Checkpoint, dimensions: int | None) -> TextEmbedding | None:
    """The folder's text embedding, shortened to `dimensions`. Raises UserError if there is none to shorten."""
    embedding = read_embedding(opened.folder, opened.config.d_model)
    if embedding is not None:
        return embedding.cut(dimensions, opened.config.d_model)
    if dimensions is not None:
        raise UserError(
            "{dimensions}: {} has no {}, which says how a text's vector is made",
            opened.folder,
            EMBEDDING,
            dimensions=dimensions,
        )
    return None


def _generation(
    opened: Checkpoint, shortlist: Path | str | None
) -> tuple[Settings, dict[str, Path], str | dict[str, str] | None]:
    """Return the model's generation settings, the files named there, and the record of the shortlist.

    shortlist: replaces the model's own.
    """
    settings = read_settings(opened.folder, opened.config)
    if shortlist is None:
        return settings, named_files(settings, opened.folder), None
    settings = {name: value for name, value in settings.items() if name != SHORTLIST}
    if str(shortlist) == NO_SHORTLIST:
        return settings, {}, NO_SHORTLIST
    open_shortlist(shortlist, opened.config)
    named = {SHORTLIST_FILE: Path(shortlist)}
    return {**settings, SHORTLIST: SHORTLIST_FILE}, named, {"sha256": sha256(Path(shortlist))}


def _float32_layers(settings: ExportSettings) -> list[str]:
    layers = settings.float32_layers
    return [layers] if isinstance(layers, str) else list(layers)


def check_scales(settings: ExportSettings, precisions: list[str], architecture: str) -> None:
    """Raise UserError for int8 settings without effect, or if they contradict each other."""
    chosen = {"int8_scales": settings.int8_scales, "calibrate": settings.calibrate}
    chosen |= {"float32_layers": ", ".join(_float32_layers(settings)) or None}
    chosen |= {"least_neighbours": settings.least_neighbours}
    for name, value in chosen.items():
        if value is not None and "int8" not in precisions:
            raise UserError(f"{name} {value}: precision {', '.join(precisions)} has no choice; int8 has one")
    if settings.int8_scales == "token" and settings.calibrate is not None:
        raise UserError(f"calibrate {settings.calibrate}: with a scale a token nothing is calibrated: leave out one")
    if (least := settings.least_neighbours) is not None:
        if not 0 < least <= 1:
            raise UserError("{least_neighbours} {}: is a share, above 0 and at most 1", f"{least:g}")
        if architecture != "encoder":
            raise UserError(
                "{least_neighbours} {}: only an encoder alone makes vectors that have neighbours", f"{least:g}"
            )
        if settings.gate_source is None:
            raise UserError("{least_neighbours} {}: is judged on text: give some with --gate-source FILE", f"{least:g}")


def _check_positions(opened: Checkpoint) -> None:
    c, limit = opened.config, LARGEST_TABLE
    # A learned table is a parameter, not a constant.
    turned = {rotation_of(layer): layer for stack in c.stacks for layer in c.layers(stack)}
    rotary = sum(layer.turned * (8 if long_from(layer) else 4) for key, layer in turned.items() if key)
    widths = {**dict.fromkeys(SINUSOIDS, 4 * c.d_model), **dict.fromkeys(RELATIVE, 16)}
    positions, size = c.max_positions, widths.get(c.positions, rotary) * c.max_positions
    if size > limit:
        raise UserError(
            f"{opened.folder}: max_positions={positions:,} makes a table of {size / 1e6:,.0f} MB, a graph takes"
            f" {limit / 1e6:,.0f}: lower max_positions in its config.json to {positions * limit // size:,} or less"
        )
