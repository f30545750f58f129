"""The facts about the graphs of an ONNX folder, read without their weights.

The plan of an export, decided and checked as a whole before anything is written.
"""

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
from mlx_transformer.core.shortlist import open_shortlist
from mlx_transformer.core.text_embedding import TextEmbedding, read_embedding
from mlx_transformer.generation.settings import NO_SHORTLIST, SHORTLIST, Settings, named_files, read_settings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import sha256
from mlx_transformer.text.tokenizer import checked_tokenizer

from .quality import LIMITS

Value = tuple[str, str, str]  # name, element type, shape such as "batch_size x 8 x 64"


def describe_graphs(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return {file name: {"nodes": count, "opset": version, "inputs": [...], "outputs": [...], "metadata": {...}}} of
    FOLDER/*.onnx and FOLDER/onnx/*.onnx, in the order of their names, or of one file; inputs and outputs are (name,
    type, shape).

    Nodes inside the branches of If are counted. Raises `UserError` for a file that is no ONNX model.
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
"""Bytes of the constant table of positions in each graph."""

SHORTLIST_FILE = "shortlist.bin"
"""The name of a shortlist in a package that was given one."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checkpoint opened to be exported, and what is made of it."""

    checkpoint: Checkpoint
    tokenizer: str | None
    """The text of its tokenizer.json, if it has one."""
    target: Target
    precisions: tuple[str, ...]
    activations: str
    int8_scales: Int8Scales
    """The fixed ones of int8, and what it leaves in float32; without an entry a product has a scale a token."""
    request: Request
    embedding: TextEmbedding | None
    """How an encoder's vector of a text is made, cut where that was asked for."""
    generation: Settings
    """How the model generates unless told otherwise."""
    named: dict[str, Path]
    """{name: file} of what those settings name."""
    shortlist: str | dict[str, str] | None
    """What the package records of a shortlist that the export was told: its digest, or that there is none; None: the
    model's own settings decide."""

    @classmethod
    def of(cls, checkpoint: str | Path | Checkpoint, settings: ExportSettings) -> Plan:
        """Return the plan of these settings, for a checkpoint that may be opened already. `UserError` for what no
        target makes, for what this one doesn't make of this model, for a damaged checkpoint, and for one of more
        positions than a graph should hold."""
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
        if self.checkpoint.wide:
            log(f"{self.checkpoint.folder}: stored in float16; graphs are made of the same numbers in float32")

    @property
    def written(self) -> Target:
        """The target whose graphs are written: the one asked for, or that in its place."""
        return self.target.for_model(self.config)

    @property
    def judged(self) -> list[str]:
        """The precisions whose translations are compared with float32's."""
        return [name for name in self.precisions if name in LIMITS and name not in self.elsewhere]

    @property
    def elsewhere(self) -> list[str]:
        """The precisions that no CPU runs, where the target's execution provider isn't here."""
        return ["bfloat16"] if "bfloat16" in self.precisions and self.provider != self.target.provider else []

    @property
    def provider(self) -> str | None:
        """The execution provider that the target is for, if this machine's ONNX Runtime has it."""
        from export.runtime.sessions import is_available

        provider = self.target.provider
        return provider if provider is not None and is_available(provider) else None

    def plain(self) -> Plan:
        """Return the plan of a portable package that the quality gate reads logits from: float32, and what is
        judged."""
        precisions, request = ("float32", *self.judged), Request(config=self.config)
        return replace(self, target=target_of("portable"), precisions=precisions, request=request)


def _embedding(opened: Checkpoint, dimensions: int | None) -> TextEmbedding | None:
    """Return what the folder says of a text's vector, cut to so many numbers. `UserError` where there is none to
    cut."""
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
    """Return the model's own settings, with another shortlist where one is given, the files that they name, and what
    is recorded of the one given."""
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
    """Raise `UserError` for settings of int8 that nothing heeds, or that contradict each other."""
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
    # A learned table is no constant.
    widths = {**dict.fromkeys(SINUSOIDS, 4 * c.d_model), "rotary": 4 * c.d_k, **dict.fromkeys(RELATIVE, 16)}
    positions, size = c.max_positions, widths.get(c.positions, 0) * c.max_positions
    if size > limit:
        raise UserError(
            f"{opened.folder}: max_positions={positions:,} makes a table of {size / 1e6:,.0f} MB, a graph takes"
            f" {limit / 1e6:,.0f}: lower max_positions in its config.json to {positions * limit // size:,} or less"
        )
