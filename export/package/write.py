"""Write the ONNX folder from a checkpoint, with NumPy and without MLX.

    OUT/config.json, generation_config.json            for Optimum and transformers.js (`around.py`)
    OUT/tokenizer.json, tokenizer_config.json          if the checkpoint has a tokenizer; with one per language,
                                                       source_tokenizer.json and target_tokenizer.json
    OUT/mlx_transformer.json                           the model's TransformerConfig, the source's digest, versions
    OUT/embedding.json, modules.json, 1_Pooling, ...   if an encoder says how a text's vector is made: for this
                                                       project and for sentence-transformers
    OUT/generation.json, and the shortlist it names    the model's default generation settings, if it has any
    OUT/int8_scales.json                               int8's fixed scales, and the layers left in float32
    OUT/README.md                                      the model card
    OUT/manifest.json                                  digests of these files except the card
    OUT/onnx/*.onnx, *.onnx_data                       the graphs and their weights, with their own manifest.json

All graphs of a precision share a data file, model.onnx_data, so no weight is stored twice. Browsers fetch a data file
per graph, named after it; so target web has two, encoder_model.onnx_data and decoder_model_merged.onnx_data. Files of a
lower precision have its suffix before the dot, e.g. model_int8.onnx.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from export.interface import PROMPT_CPU
from export.precision.int8 import BY_ROW
from export.precision.packed import unpack_on_load, use_packed_operators
from export.precision.passes import lower
from export.precision.table import PRECISIONS
from export.settings import ExportSettings
from export.targets.cpu.decoder import join_projections
from mlx_transformer.core.card import Form, carried, write_card
from mlx_transformer.core.checkpoint import open_checkpoint, resolve
from mlx_transformer.core.int8_scales import Int8Scales, ProductScales, read_int8_scales
from mlx_transformer.core.outputs import ONNX_FOLDER, claim
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.tokenizer_files import JOINT, tokenizer_files
from mlx_transformer.families.marian_files.conversion import multiplier
from mlx_transformer.system.durable import Output, Target, replace_folder
from mlx_transformer.system.errors import Text, UserError, joined
from mlx_transformer.system.lazy import naming_extra
from mlx_transformer.system.manifest import write_manifest
from mlx_transformer.system.progress import Progress, no_progress

from .around import files_around, graphs_of
from .fixed_scales import Trial, calibration_text, settled
from .layers import Layers, measured
from .plan import Plan
from .quality import gate_text, judge, record
from .weights import fill

if TYPE_CHECKING:
    from typing import Unpack

    from export.arguments import ExportArguments

GRAPHS = "onnx"


@naming_extra("export_onnx")
def export_onnx(
    checkpoint: str | Path,
    out: Target,
    settings: ExportSettings = ExportSettings(),
    *,
    external_threshold: int = 1024,
    log: Callable[[str], None] = lambda _: None,
    watch: Progress = no_progress,
    **changes: Unpack[ExportArguments],
) -> Path:
    """Write a checkpoint (or a run's folder) as ONNX models; returns the folder `out`.

    Options are fields of `export.settings.ExportSettings`, as `settings` or by name:

        export_onnx("runs/de-en", "onnx", target="cpu", precision=["float32", "int8"])

    `out` is new or empty, or with `force` an earlier export to replace; it appears only when it is complete. Tensors of
    more than `external_threshold` bytes go to data files beside the graphs. With `attention` the decoders also return
    `cross_attention`, the mean over a layer's heads. With `inputs_embeds` the encoder reads vectors (B, S, D) under
    that name.

    int8 has fixed scales or a scale per token: see `int8_scales` and `calibrate`, and `fixed_scales.py`.
    `float32_layers` and `least_neighbours` leave layers of an encoder in float32, by name or by the measurement of
    `layers.py` on `gate_source`.

    Lower precisions are judged on the sentences of `gate_source`, with their translations `gate_reference`, or on
    held-out phrases of the built-in corpus if the run was trained on it. The result goes to mlx_transformer.json.
    Beyond the limits (`quality.LIMITS`) nothing is written, unless `accept_loss`. `log` gets a line per result, `watch`
    the share done and the precision.

    Raises UserError, e.g. for a damaged checkpoint, a folder with other files, a full disk, or too much loss.
    """
    settings = replace(settings, **changes)
    if not isinstance(out, Output) and Path(out).suffix == ".onnx" and not Path(out).is_dir():
        raise UserError(f"{out}: what is written is a folder; for one file, with the search inside, add --search")
    output = claim(out, ONNX_FOLDER, settings.force, resolve(checkpoint), *texts_of(settings))
    out = output.path
    plan = Plan.of(checkpoint, settings)
    opened = plan.checkpoint
    plan.say_what_is_widened(log)
    if (written := plan.written) is not plan.target:
        files = " and ".join(f"{name}.onnx" for name in written.graph_names(opened.config))
        log(f"{files}: written as target {written.name} has it: {plan.target.supports(opened.config)}")
    if plan.tokenizer is not None and len(files := tokenizer_files(plan.tokenizer)) > 1:
        log(f"{' and '.join(files)}: Optimum and transformers.js, which expect one {JOINT}, can be given ids alone")
    for name in plan.elsewhere:
        log(f"{name}: not judged: target {plan.target.name} has it for {plan.target.provider} alone, which isn't here")
    text = gate_text(
        opened, plan.judged, settings.gate_source, settings.gate_reference, log, plan.request.inputs_embeds
    )
    plan = settled(plan, settings, write_package, log, watch)
    plan, layers = measured(plan, settings.least_neighbours, text, log, watch)
    with replace_folder(output) as folder:
        write_package(plan, folder, external_threshold)
        if text is not None:
            with TemporaryDirectory() as plain:
                write_package(plan.plain(), Path(plain))
                qualities = judge(folder, Path(plain), plan.judged, text, watch, plan.provider)
            problems = [f"{quality.precision}: {problem}" for quality in qualities for problem in quality.problems]
            if problems and not settings.accept_loss:
                hints = [Text("{accept_loss} writes it all the same", accept_loss=True)]
                if layers is not None:
                    hints += [Text("{least_neighbours} leaves matrices in float32 for as many neighbours as you name")]
                hints += [Text("{force} only replaces a model", force=True)] * settings.force
                raise UserError("{}: not written: {} ({}); {}", out, "; ".join(problems), text.origin, joined(hints))
            record(folder, qualities, None if layers is None else layers.to_dict())
            for quality in qualities:
                log(str(quality))
        form = Form("onnx", ("onnxruntime", *plan.target.tags, "transformer"), more=_about_int8(plan, layers))
        write_card(folder, plan.config, form, carried(opened.folder, "float32" in plan.precisions), out)
        write_manifest(folder)
    return out


def texts_of(settings: ExportSettings) -> list[Path]:
    """The files an export reads in addition to the checkpoint."""
    files = (settings.calibrate, settings.gate_source, settings.gate_reference, settings.shortlist)
    return [Path(file) for file in files if file is not None]


def write_package(plan: Plan, folder: Path, external_threshold: int = 1024) -> None:
    """Write a plan's graphs and files into an empty folder, without the model card."""
    graphs = folder / GRAPHS
    graphs.mkdir()
    external = []
    for precision in plan.precisions:
        external += _write_graphs(plan, precision, graphs, external_threshold)
    for name, contents in files_around(plan, external).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(contents)
    write_manifest(graphs)


def _about_int8(plan: Plan, layers: Layers | None) -> list[str]:
    """Lines of the model card on the layers in int8; empty if all are int8 and nothing was measured."""
    left = plan.int8_scales.float32
    if "int8" not in plan.precisions or not (left or layers):
        return []
    named = ", ".join(f"`{layer}`" for layer in left)
    sentence = f"float32 stays in {named}; all other layers are int8." if left else "All layers are int8."
    return ["## int8", "", sentence, "", *([*layers.lines(), ""] if layers else [])]


def _write_graphs(plan: Plan, precision: str, folder: Path, external_threshold: int) -> list[str]:
    """Write all graphs of a precision; return the graph files with a data file of their own name."""
    external = []
    suffix = PRECISIONS[precision].suffix
    for owner, graphs in package_graphs(plan, precision).items():
        models = {f"{name}{suffix}": model for name, model in graphs.items()}
        if fill(models.values(), plan.checkpoint, folder / f"{owner}{suffix}.onnx_data", external_threshold):
            external += [f"{name}.onnx" for name in models if name == f"{owner}{suffix}"]
        for name, model in models.items():
            path = folder / f"{name}.onnx"
            path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
            onnx.checker.check_model(path, full_check=True)
    return external


def package_graphs(plan: Plan, precision: str) -> dict[str, dict[str, ir.Model]]:
    """Build all graphs of a precision, without values for their weights: {data file: {name: graph}}, both names
    without the precision's suffix."""
    by_owner = {}
    for owner, names in graphs_of(plan, precision).items():
        by_owner[owner] = models = {name: plan.target.build(name, plan.request) for name in names}
        for name, model in models.items():
            of, scales = precision, plan.int8_scales
            if name == PROMPT_CPU:
                of, scales = PRECISIONS[precision].prompts, BY_ROW
            lower(model, of, plan.target.lowering, plan.activations, scales)
            if PRECISIONS[precision].form == "packed":
                use_packed_operators(model, plan.checkpoint, plan.activations)
            join_projections(model)
            unpack_on_load(model, plan.checkpoint)
    return by_owner


def marian_scales(
    checkpoint: str | Path, calibrate: str | Path | None = None, log: Callable[[str], None] = lambda _: None
) -> Int8Scales | None:
    """Return the scales for writing a checkpoint as Marian's int8; None without a text to calibrate on.

    A file of Marian's has a multiplier per matrix and another for its input, 127 steps on either side of zero. Our own
    int8 may have a scale per output and 255 steps above zero, so its scales can't stand there.

    They come from the checkpoint's int8_scales.json unless `calibrate` names a text, then from that text; without
    either, from the validation text of the checkpoint's run. `log` gets a line with the result. Raises UserError if the
    text can't be read, or if the model has no tokenizer for it.
    """
    opened = open_checkpoint(checkpoint).widened()
    own = read_int8_scales(opened.folder, opened.config)
    if own is not None and calibrate is None:
        return own
    text = calibration_text(opened, calibrate, log)
    if text is None:
        return None
    plan = Plan.of(opened.folder, ExportSettings(precision=["int8"]))
    # The file stores each matrix with a multiplier from its largest magnitude, so the trial has to as well.
    names = quantizable_shapes(opened.config)
    before = own or Int8Scales({name: ProductScales(weight=multiplier(opened.tensor(name))) for name in names})
    with TemporaryDirectory() as place:
        scales, quality = Trial(plan, text, write_package, Path(place)).best(before, symmetric=True)
    log(f"int8: scales from {scales.origin['sentences']} lines of {text.origin}; on others: {quality}")
    return scales
