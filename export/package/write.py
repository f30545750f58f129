"""The folder that consumers load, written from a checkpoint with NumPy alone.

    OUT/config.json, generation_config.json            for Optimum and transformers.js (`consumers.py`)
    OUT/tokenizer.json, tokenizer_config.json          if the checkpoint has a tokenizer; if it has one for each
                                                       language, source_tokenizer.json and target_tokenizer.json
    OUT/mlx_transformer.json                           the model's TransformerConfig, the source's digest, versions
    OUT/manifest.json                                  digests of these files
    OUT/onnx/*.onnx, *.onnx_data                       the graphs and their weights, with manifest.json's digests

All graphs of a precision share one data file, so that nothing is stored twice: model.onnx_data. Only a browser fetches
one file a graph, named after it, so target web has two: encoder_model.onnx_data and decoder_model_merged.onnx_data.
Names of a lower precision's files have its suffix before the dot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnx_ir as ir

from export.interface import Request
from export.precision.mlx_integers import unpack_on_load
from export.precision.packed import check_integers, use_packed_operators
from export.precision.passes import change
from export.precision.table import IN_BLOCKS, PRECISIONS, blocks_operators, check_activations, check_precisions
from export.targets.attention import requested_layer
from export.targets.table import Target, target_of
from mlx_transformer.core.checkpoint import Checkpoint, digests
from mlx_transformer.core.folders import SPEC
from mlx_transformer.core.tokenizer_files import JOINT, tokenizer_files
from mlx_transformer.families.folder import tokenizer_config
from mlx_transformer.system.durable import check_free, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.machine import versions
from mlx_transformer.system.manifest import write_manifest
from mlx_transformer.system.watch import Watch, unwatched

from . import consumers
from .quality import LIMITS, gate_text, judge, record
from .source import open_source
from .weights import fill

FORMAT = 1
GRAPHS = "onnx"


def export_onnx(
    checkpoint: str | Path,
    out: str | Path,
    *,
    target: str = "portable",
    precision: str | Sequence[str] = "float32",
    activations: str | None = None,
    fixed_shape: str | None = None,
    attention: bool = False,
    attention_layer: int | None = None,
    inputs_embeds: bool = False,
    external_threshold: int = 1024,
    gate_source: str | Path | None = None,
    gate_reference: str | Path | None = None,
    force: bool = False,
    accept_loss: bool = False,
    told: Callable[[str], None] = lambda _: None,
    watch: Watch = unwatched,
) -> Path:
    """Write a checkpoint (or a run's folder) as ONNX models; returns the folder `out`.

    `precision`: one or several of `precision.PRECISIONS`, side by side in the folder. `activations`: what weights in
    blocks are multiplied with, "int8" (default) or "float32" (`precision.ACTIVATIONS`). `fixed_shape`: for target
    coreml, such as "1x64x64" (`coreml/shape.py`). `attention`: the decoders also return how much each position reads of
    each source token, `cross_attention`, of `attention_layer` (from 0; default: the one that aligns best), the mean of
    its heads. `inputs_embeds`: the encoder reads vectors of that name, (B, S, D), in place of `input_ids`. `out` is
    new, or replaced if it is empty or an earlier export of the same weights, with `force` one of others; it appears
    only when it is complete. Tensors of more than `external_threshold` bytes are stored in data files beside the
    graphs. Raises `UserError` (a damaged checkpoint, a
    folder that holds something else, a full disk).

    Lower precisions are judged on the sentences of `gate_source`, with their translations `gate_reference`, or on
    held-out phrases of the built-in corpus if the run was trained on it; the result is written to mlx_transformer.json.
    Beyond the limits (`quality.LIMITS`) nothing is written and `UserError` says why, unless `accept_loss`. `told` is
    called with a line on each of them, `watch` with the share of this that is done and the precision.
    """
    chosen = target_of(target)
    precisions = check_precisions(precision)
    chosen.check_precisions(precisions)
    activations = check_activations(activations, precisions)
    opened, tokenizer = open_source(checkpoint)
    check_integers(opened, precisions)
    out = Path(out)
    source = _digests(opened)
    if out.suffix == ".onnx" and not out.is_dir():
        raise UserError(f"{out}: what is written is a folder; for one file, with the search inside, add --search")
    replace = force or _source(out) == source
    check_free(out, "ONNX folder", lambda folder: (folder / SPEC).is_file(), replace, opened.folder)
    request = Request(
        config=opened.config,
        shape=chosen.shape_of(fixed_shape, opened.config),
        attention_layer=requested_layer(opened.config, attention, attention_layer),
        inputs_embeds=inputs_embeds,
    )
    if inputs_embeds:
        chosen.check_vectors(opened.config)
    if (written := chosen.for_model(opened.config)) is not chosen:
        files = " and ".join(f"{name}.onnx" for name in written.graph_names(opened.config))
        told(f"{files}: written as target {written.name} has it: {chosen.supports(opened.config)}")
    if tokenizer is not None and len(files := tokenizer_files(tokenizer)) > 1:
        told(f"{' and '.join(files)}: Optimum and transformers.js, which expect one {JOINT}, can be given ids alone")
    judged = [name for name in precisions if name in LIMITS]
    text = gate_text(opened, judged, gate_source, gate_reference, told, inputs_embeds)
    with replace_folder(out, "ONNX folder") as folder:
        _write(opened, tokenizer, folder, chosen, precisions, activations, fixed_shape, request, external_threshold)
        if text is not None:
            with TemporaryDirectory() as plain:
                plainly = target_of("portable"), ["float32", *judged], activations
                _write(opened, tokenizer, Path(plain), *plainly, None, Request(config=opened.config))
                qualities = judge(folder, Path(plain), judged, text, watch)
            problems = [f"{quality.precision}: {problem}" for quality in qualities for problem in quality.problems]
            if problems and not accept_loss:
                hint = "accept_loss=True writes it all the same" + ("; force=True only replaces a model" * force)
                raise UserError(f"{out}: not written: {'; '.join(problems)} ({text.origin}); {hint}")
            record(folder, qualities)
            for quality in qualities:
                told(str(quality))
        write_manifest(folder)
    return out


def _write(
    opened: Checkpoint,
    tokenizer: str | None,
    folder: Path,
    target: Target,
    precisions: Sequence[str],
    activations: str,
    fixed_shape: str | None,
    request: Request,
    external_threshold: int = 1024,
) -> None:
    """Fill an empty folder."""
    config, written = opened.config, target.for_model(opened.config)
    graphs = folder / GRAPHS
    graphs.mkdir()
    external = []
    for precision in precisions:
        external += _write_graphs(opened, graphs, external_threshold, target, request, precision, activations)
    texts: dict[str, Any] = consumers.configs(config, external, PRECISIONS[_default(precisions)].dtype)
    for name, text in ({} if tokenizer is None else tokenizer_files(tokenizer)).items():
        (folder / name).write_text(text, encoding="utf-8")
        if name == JOINT:
            texts["tokenizer_config.json"] = tokenizer_config(config, text)
    texts[SPEC] = {
        "format": FORMAT,
        "config": config.to_dict(),
        "source": _digests(opened),
        **_adapter(opened),
        "target": target.name,
        **({} if written is target else {"graphs": {"target": written.name, "why": target.supports(config)}}),
        **({"fixed_shape": fixed_shape} if fixed_shape else {}),
        **request.written(),
        "precisions": {
            name: {"suffix": PRECISIONS[name].suffix, **_blocks(name, target, activations)} for name in precisions
        },
        "versions": versions(),
    }
    for name, values in texts.items():
        (folder / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_manifest(graphs)


def _blocks(precision: str, target: Target, activations: str) -> dict[str, str]:
    if precision not in IN_BLOCKS:
        return {}
    return {"activations": activations, "blocks": blocks_operators(precision, target.lowering, activations)}


def _write_graphs(
    checkpoint: Checkpoint,
    folder: Path,
    external_threshold: int,
    target: Target,
    request: Request,
    precision: str,
    activations: str,
) -> list[str]:
    """All graphs of the architecture; returns the names of those files that a data file of their own goes with."""
    external = []
    suffix = PRECISIONS[precision].suffix
    for owner, names in target.data_files(checkpoint.config).items():
        models = {f"{name}{suffix}": target.build(name, request) for name in names}
        for model in models.values():
            change(model, precision, target.lowering, activations)
            if PRECISIONS[precision].form == "packed":
                use_packed_operators(model, checkpoint, activations)
            unpack_on_load(model, checkpoint)
        if fill(models.values(), checkpoint, folder / f"{owner}{suffix}.onnx_data", external_threshold):
            external += [f"{name}.onnx" for name in models if name == f"{owner}{suffix}"]
        for name, model in models.items():
            path = folder / f"{name}.onnx"
            path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
            onnx.checker.check_model(path, full_check=True)
    return external


def _default(precisions: Sequence[str]) -> str:
    return "float32" if "float32" in precisions else precisions[0]


def _adapter(opened: Checkpoint) -> dict[str, Any]:
    if opened.adapter is None:
        return {}
    c = opened.adapter.config
    facts = {"kind": c.kind, "rank": c.rank, "alpha": c.alpha, "linear_maps": len(c.targets)}
    return {"adapter": {**facts, "beside_integers": len(opened.kept)}}


def _digests(opened: Checkpoint) -> dict[str, dict[str, str]]:
    return {name: {"sha256": digest} for name, digest in digests(opened).items()}


def _source(out: Path) -> dict[str, dict[str, str]] | None:
    """The digests of the weights that an earlier export was made from."""
    try:
        return read_json(out / SPEC)["source"]
    except (UserError, LookupError, TypeError):
        return None
