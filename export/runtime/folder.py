"""Reads an exported folder: its graphs, the model's config, the tokenizer's path, the manifests.

Besides this project's folders it reads Optimum's, for published models that `families` knows: config.json,
tokenizer.json and, in `onnx/` or beside them, encoder_model.onnx with either decoder_model.onnx and
decoder_with_past_model.onnx, or decoder_model_merged.onnx.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from export.interface import (
    DECODER_CPU,
    DECODER_FIRST,
    DECODER_MERGED,
    DECODER_NEXT,
    ENCODER,
    ENCODER_CPU,
    GRAPHS,
    LISTED_CPU,
    MODEL,
    PROMPT_CPU,
    ROWS_CPU,
    STEP_CPU,
    Request,
)
from export.precision.table import (
    ACTIVATIONS,
    DEFAULT_ACTIVATIONS,
    IN_BLOCKS,
    PRECISIONS,
    STANDARD,
    check_activations,
    check_precisions,
    prompts_in,
)
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import AN_ONNX_FOLDER, ONNX_CONFIG, Place
from mlx_transformer.core.heads import DENSE, EMBEDDING
from mlx_transformer.core.int8_scales import INT8_SCALES, read_int8_scales
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE, NAMES, tokenizer_path
from mlx_transformer.generation.settings import SETTINGS
from mlx_transformer.system.errors import CommandLine, UserError
from mlx_transformer.system.files import check_name, read_json
from mlx_transformer.system.manifest import MANIFEST, read_manifest, verify_file, verify_files

if TYPE_CHECKING:
    from mlx_transformer.system.durable import Target

FIRST_GRAPHS = (ENCODER, ENCODER_CPU, MODEL, STEP_CPU)
"""A folder has one of these graphs in each of its precisions."""

READ = (ONNX_CONFIG, "config.json", INT8_SCALES, SETTINGS, CHAT_TEMPLATE, EMBEDDING, DENSE, *NAMES)
"""Files beside the graphs' folder that may be read."""
INNER_MANIFEST = f"onnx/{MANIFEST}"
"""The manifest of the graphs' folder, as listed in the manifest of the outer folder."""


class OnnxFolder(NamedTuple):
    """An exported folder. `graphs`: {name: file} of the graphs that run the model."""

    path: Path
    request: Request
    """The model's config, and the options of its graphs, e.g. attention."""
    graphs: dict[str, Path]
    listed: dict[str, Path]
    """{name: file} of additional graphs for a search among given ids; empty if the folder has none."""
    precision: str = "float32"
    activations: str | None = None
    """Type of the activations multiplied with weights in blocks, "int8" or "float32" (`precision.table.ACTIVATIONS`);
    None without such weights, or if the folder doesn't say."""
    standard: bool = False
    """Standard operators read its blocks, so the session chooses the activations."""
    may_overflow: bool = False
    """Sums of its int8 products may overflow on some processors (`Int8Scales.may_overflow`)."""

    def with_activations(self, activations: str | None) -> OnnxFolder:
        """The folder with these activations, "int8" or "float32"; `UserError` if the session can't choose them."""
        if activations is None or activations == self.activations:
            return self
        check_activations(activations, [self.precision])
        # If the folder was exported with int8 activations, operators of the graph round the classifier's activations.
        if not (self.standard and activations == "int8"):
            made = f"with {self.activations} activations" if self.activations else "elsewhere"
            raise UserError(f"{self.path}: was exported {made}; export it with activations {activations}")
        return self._replace(activations=activations)

    @property
    def config(self) -> TransformerConfig:
        return self.request.config

    @property
    def place(self) -> Path:
        """The folder that holds the graphs."""
        return next(iter(self.graphs.values())).parent

    def verify_graphs(self) -> None:
        """Raise `UserError` if a graph, or another file that is read, differs from its manifest's digest, or any listed
        file is missing or has another size."""
        verify_files(self.place, [file.name for file in (*self.graphs.values(), *self.listed.values())])
        if self.path != self.place:
            verify_beside(self.path)

    def verify_data(self) -> None:
        """Compare the digests of the precision's data files. Raises `UserError` if one differs."""
        listed = read_manifest(self.place) or {}
        verify_files(self.place, [name for name in listed if _precision_of_data(name) == self.precision])

    @property
    def tokenizer_path(self) -> Path | None:
        """The argument of `Tokenizer.load`; None if the folder has no tokenizer."""
        return tokenizer_path(self.path)

    @property
    def weights(self) -> Path | None:
        """The data file that all graphs share; None if there is none."""
        name = f"model{PRECISIONS[self.precision].suffix}.onnx_data"
        files = {file for graph in self.graphs.values() if (file := graph.with_name(name)).is_file()}
        return files.pop() if files else None

    @property
    def files(self) -> list[Path]:
        """The files of the graphs, and the data files they read."""
        own = (graph.with_name(f"{graph.name}_data") for graph in self.graphs.values())
        data = {file for file in own if file.is_file()} | ({self.weights} if self.weights else set())
        return [*self.graphs.values(), *self.listed.values(), *sorted(data)]

    @property
    def weights_size(self) -> int:
        """Bytes of the shared data file; 0 without it."""
        return self.weights.stat().st_size if self.weights else 0

    @property
    def has_float32_matrices(self) -> bool:
        """Whether the data file is large enough to hold every matrix in float32."""
        matrices = (math.prod(shape) for shape in parameter_shapes(self.config).values() if len(shape) > 1)
        return self.weights_size >= 4 * sum(matrices)

    @property
    def integers(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of the matrices that the graphs may compute from a checkpoint's integers."""
        small = self.precision in ("float32", "packed") and self.weights and not self.has_float32_matrices
        return {name: shape for name, shape in parameter_shapes(self.config).items() if len(shape) > 1} if small else {}


def open_folder(path: str | Path, precision: str | None = None) -> OnnxFolder:
    """Open a folder; `UserError` if files are missing or it isn't an exported folder.

    `precision`: one of the folder's, e.g. "int8"; default: float32 if the folder has it, else its only precision.
    """
    check_name(path)
    path = _whole(Path(path))
    if path.is_file():
        raise UserError(f"{path}: is a file; give a folder that `export` wrote without --search and --embed-tokenizer")
    if not (what := Place.of(path)).onnx:
        raise what.error(AN_ONNX_FOLDER)
    place = _place(path)
    precision = _precision(place, precision)
    request, activations, standard = _described(path, precision)
    config = request.config
    suffix = PRECISIONS[precision].suffix
    files = {name: file for name in GRAPHS if (file := graph_file(place, name, suffix)) is not None}
    present = files.keys()
    if STEP_CPU in present:
        needed = [STEP_CPU, PROMPT_CPU] if prompts_in(precision, activations) else [STEP_CPU]
    elif config.architecture != "encoder-decoder":
        needed = [MODEL]
    elif present & {ENCODER_CPU, DECODER_CPU}:
        needed = [ENCODER_CPU, DECODER_CPU]
    # The pair of decoders computes the source's keys and values once, shared by beams; the merged graph copies them.
    elif present >= {DECODER_FIRST, DECODER_NEXT} or DECODER_MERGED not in present:
        needed = [ENCODER, DECODER_FIRST, DECODER_NEXT]
    else:
        needed = [ENCODER, DECODER_MERGED]
    missing = [f"{name}{suffix}.onnx" for name in needed if name not in present]
    if missing:
        raise UserError(f"{place}: {' and '.join(missing)} missing; export the model again")
    graphs = {name: files[name] for name in needed}
    listed = {name: files[name] for name in (ROWS_CPU, LISTED_CPU) if name in files and ENCODER_CPU in graphs}
    scales = read_int8_scales(path, config) if precision == "int8" else None
    overflow = scales is not None and scales.may_overflow
    return OnnxFolder(path, request, graphs, listed, precision, activations, standard, overflow)


def has_row_per_token(path: Path) -> bool:
    """Whether the folder is an encoder-only model with target cpu's graph, which computes one row per token."""
    place = _whole(path)
    return (place / ONNX_CONFIG).is_file() and _described(place, "float32")[0].by_token


def verify_beside(path: Path, names: Collection[str] = READ) -> None:
    """Compare these files beside the graphs' folder with their manifest, if it lists them. Raises `UserError` if a file
    differs.

    The manifest also lists the graphs' manifest, so that a graphs' folder from another export is noticed, too.
    """
    listed = read_manifest(path) or {}
    verify_files(path, [name for name in (*names, INNER_MANIFEST) if name in listed])


def verify_export(path: Path) -> None:
    """Compare all files of a folder with its manifests, or a single file with the manifest beside it. Raises
    `UserError` if a file differs."""
    if path.is_file():
        verify_file(path)
    else:
        verify_files(path)
        if (path / "onnx").is_dir():
            verify_files(path / "onnx")


def copy_export(path: Path, out: Target, force: bool = False) -> Path:
    """Copy a folder to `out`, completely or not at all; returns the copy's path. `force`: replace an earlier export."""
    import shutil  # here, since it is rarely needed

    from mlx_transformer.core.outputs import ONNX_FOLDER, claim
    from mlx_transformer.system.durable import replace_folder

    output = claim(out, ONNX_FOLDER, force, path)
    verify_export(path)
    with replace_folder(output) as temporary:
        shutil.copytree(path, temporary, dirs_exist_ok=True)
    return output.path


def precisions(path: str | Path) -> list[str]:
    """The precisions of a folder's graphs, by their file names, e.g. ["float32", "int8"]."""
    place = _place(Path(path))
    return [p for p, entry in PRECISIONS.items() if any(graph_file(place, n, entry.suffix) for n in FIRST_GRAPHS)]


def has_graph(path: str | Path, name: str) -> bool:
    """Whether the folder has this graph, in any precision."""
    place = _place(Path(path))
    return any(graph_file(place, name, entry.suffix) for entry in PRECISIONS.values())


def graph_file(place: Path, name: str, suffix: str) -> Path | None:
    """The file of the graph `name` in a folder of graphs, e.g. with suffix "_quantized"; None if it isn't there."""
    file = place / f"{name}{suffix}.onnx"
    return file if file.is_file() else None


def _place(folder: Path) -> Path:
    return folder / "onnx" if (folder / "onnx").is_dir() else folder


def _precision_of_data(name: str) -> str | None:
    stem, _, ending = name.rpartition(".")
    fits = [p for p, entry in PRECISIONS.items() if stem.endswith(entry.suffix)]
    return max(fits, key=lambda p: len(PRECISIONS[p].suffix)) if ending == "onnx_data" else None


def _precision(place: Path, requested: str | None) -> str:
    available = precisions(place)
    if requested is not None:
        if check_precisions(requested)[0] not in available and available:
            raise UserError(
                f"{place}: holds {' and '.join(available)}, not {requested}: choose one of them, or export it"
            )
        return requested
    if len(available) > 1 and "float32" not in available:
        raise UserError(f"{place}: holds {' and '.join(available)}; choose with precision")
    return available[0] if len(available) == 1 else "float32"


def _whole(path: Path) -> Path:
    """The outer folder with the config, if `path` names its `onnx` folder; otherwise `path`."""
    inner = path.name == "onnx" and not _has_config(path) and _has_config(path.parent)
    return path.parent if inner else path


def _has_config(path: Path) -> bool:
    return any((path / name).is_file() for name in (ONNX_CONFIG, "config.json"))


def _described(path: Path, precision: str) -> tuple[Request, str | None, bool]:
    """(request, activations, standard), as in `OnnxFolder`, from mlx_transformer.json or a published config.json."""
    for file in (path / ONNX_CONFIG, path / "onnx" / ONNX_CONFIG):
        if file.is_file():
            values = read_json(file)
            try:
                config = TransformerConfig.from_dict(values["config"])
                return Request.read(values, config), *_blocks(values, precision)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UserError(f"{file}: damaged ({error}); export the model again") from error
    file = path / "config.json"
    return Request(config=_from_published(file, read_json(file))), None, False


def _blocks(values: dict[str, Any], precision: str) -> tuple[str | None, bool]:
    """(activations, standard), as in `OnnxFolder`, from mlx_transformer.json.

    Older files name no activations, since there was no choice: they are the default.
    """
    if precision not in IN_BLOCKS:
        return None, False
    entry = values.get("precisions", {}).get(precision, {})
    activations = entry.get("activations", DEFAULT_ACTIVATIONS)
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations {activations!r} are none of {', '.join(ACTIVATIONS)}")
    return activations, entry.get("blocks") == STANDARD


def _from_published(file: Path, values: Any) -> TransformerConfig:
    """The config of a published model, exported e.g. by Optimum; `UserError` if its family isn't known."""
    from mlx_transformer.families.engine import config_of
    from mlx_transformer.families.table import FAMILIES

    model_type = values.get("model_type") if isinstance(values, dict) else None
    if model_type not in list(FAMILIES):
        raise UserError(
            "{}: model_type {!r} can't be run here: export with `{}`, or one of {} with Optimum",
            *(file, model_type, CommandLine("export"), ", ".join(FAMILIES)),
        )
    return config_of(FAMILIES[model_type], values, {}, file)
