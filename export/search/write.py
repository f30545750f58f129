"""Write a checkpoint as a single ONNX file: encoder, decoder and search, and optionally the tokenizer.

The file's metadata records the plan of the export (`record`), and `recorded_plan` reads it back.

The place of weights matters for speed and memory (`move_inside`). ONNX Runtime packs a product's weights when it loads
a graph. In a loop within a loop, or a branch in it, it packs only constants of that inner graph; other products take up
to twice the time. But it copies an inner graph's initializers once per level, and keeps the copies as long as the
session. So matrices are stored in the outermost graph, and the inner graph gets a Transpose or a Reshape of each, which
runtimes fold into a constant of that graph.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import onnx
import onnx_ir as ir

from export.graph.built import built_once
from export.graph.protos import metadata_of, read_model, write_inside
from export.interface import SEARCH
from export.package import export_onnx
from export.package.fixed_scales import settled
from export.package.plan import Plan
from export.package.quality import gate_text
from export.package.weights import fill, nbytes
from export.package.write import texts_of, write_package
from export.precision.int8 import BY_ROW
from export.precision.packed import unpack_on_load, use_packed_operators
from export.precision.passes import lower
from export.precision.table import IN_BLOCKS, PRECISIONS, check_precisions
from export.settings import ExportSettings
from export.targets.table import TARGETS, target_of
from mlx_transformer.core.checkpoint import Checkpoint, digests, resolve
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import EMBEDDING
from mlx_transformer.core.int8_scales import Int8Scales, read_int8_scales
from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.generation.settings import NO_SHORTLIST, SHORTLIST, Settings
from mlx_transformer.system.durable import Output, Target, replace_files
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import Progress, no_progress

from .graph import search_model, vector_model
from .metadata import (
    ACTIVATIONS,
    ATTENTION,
    CONFIG,
    GENERATION,
    GIVEN,
    PRECISION,
    SCALES,
    SOURCE,
    TOKENIZER,
    VECTOR,
    int8_scales_of,
)
from .options import ALL_LOGITS
from .pieces import has_pieces
from .steps import STEPS

if TYPE_CHECKING:
    from typing import Unpack

    from export.arguments import ExportArguments


def move_inside(model: ir.Model, name: str) -> None:
    """Give the inner graph `name` its own constants, which must have values."""
    (inner,) = (graph for graph in model.graph.subgraphs() if graph.name == name)
    for node in [node for node in model.graph if node.op_type == "Transpose"]:
        if node.inputs[0] in model.graph.initializers.values() and _graphs(node.outputs[0]) == {inner}:
            model.graph.remove(node)
            inner.insert_before(inner[0], node)
    for value in list(model.graph.initializers.values()):
        if value.is_graph_input() or value.shape is None:
            continue
        if len(value.shape) > 1:
            users = {node: None for node, _ in value.uses() if node.graph is inner}
            products = [node for node in users if node.op_type not in ("Gather", "Transpose")]
            if products:
                _read_through_reshape(inner, value, products, f"{value.name}/{name}")
        elif _graphs(value) == {inner}:
            del model.graph.initializers[str(value.name)]
            inner.register_initializer(value)


def _graphs(value: ir.Value) -> set[ir.Graph | None]:
    """The graphs that read a value."""
    return {cast(ir.Graph | None, node.graph) for node, _ in value.uses()}


def _read_through_reshape(graph: ir.Graph, value: ir.Value, readers: list[ir.Node], name: str) -> None:
    assert value.const_value is not None
    dims = ir.tensor(list(value.const_value.shape.numpy()), dtype=ir.DataType.INT64, name=f"{name}/dims")
    shape = ir.Value(name=dims.name, shape=ir.Shape([dims.size]), type=ir.TensorType(dims.dtype), const_value=dims)
    graph.register_initializer(shape)
    node = ir.node("Reshape", [value, shape], name=f"{name}/Reshape")
    node.outputs[0].name = f"{name}/here"
    graph.insert_before(graph[0], node)
    for reader in readers:
        for i, read in enumerate(reader.inputs):
            if read is value:
                reader.replace_input_with(i, node.outputs[0])


def settings_beside(plan: Plan, stem: str, text: bool = False) -> tuple[Settings, dict[str, Path]]:
    """(generation settings for a file with this stem, {name: source} of the shortlist to put beside it)

    text: the file takes text; such a file has no shortlist.
    """
    settings = {name: value for name, value in plan.generation.items() if name != SHORTLIST}
    named = {} if text else {f"{stem}.{name}": file for name, file in plan.named.items()}
    return (settings | {SHORTLIST: next(iter(named))} if named else settings), named


def record(plan: Plan, generation: Settings, text: bool = False) -> dict[str, str]:
    """The file's metadata. generation: from `settings_beside`."""
    (precision,) = plan.precisions
    layer, scales, embedding = plan.request.attention_layer, plan.int8_scales, plan.embedding
    config, source = json.dumps(plan.config.to_dict()), source_of(plan.checkpoint)
    if text and not plan.config.has_decoder:
        assert embedding is not None
        facts = {CONFIG: config, VECTOR: embedding.json()}
    else:
        facts = ({GENERATION: json.dumps(generation)} if generation else {}) | {CONFIG: config}
    facts |= {PRECISION: precision, SOURCE: source}
    facts |= {} if layer is None else {ATTENTION: str(layer)}
    facts |= {} if plan.tokenizer is None else {TOKENIZER: plan.tokenizer}
    facts |= {ACTIVATIONS: plan.activations} if precision in IN_BLOCKS else {}
    facts |= {SCALES: scales.json()} if precision == "int8" and scales.products else {}
    return facts | ({} if plan.shortlist is None else {GIVEN: json.dumps(plan.shortlist)})


def source_of(opened: Checkpoint) -> str:
    """Digests of the checkpoint's weights, joined by spaces."""
    return " ".join(digests(opened).values())


def recorded_plan(opened: Checkpoint, metadata: Mapping[str, Any], file: Path) -> Plan:
    """Return the plan by which this file was exported from the checkpoint. Errors as in
    `package.recorded.recorded_plan`."""
    precision = metadata[PRECISION]
    settings = ExportSettings(
        precision=[precision],
        activations=metadata.get(ACTIVATIONS),
        attention_layer=int(metadata[ATTENTION]) if ATTENTION in metadata else None,
        shortlist=_shortlist(metadata, file),
    )
    plan = Plan.of(opened, settings)
    if precision != "int8":
        return plan
    own = read_int8_scales(opened.folder, opened.config) or BY_ROW
    used = int8_scales_of(metadata, opened.config, file) or BY_ROW
    left = own.leaving(used.float32, opened.config)
    its_own = own.is_fixed and (used.origin == own.origin or used.products == left.products)
    return replace(plan, int8_scales=left if its_own else used)


def _shortlist(metadata: Mapping[str, str], file: Path) -> Path | str | None:
    given: Any = json.loads(metadata.get(GIVEN, "null"))
    if not isinstance(given, dict):
        return given and NO_SHORTLIST
    return file.with_name(json.loads(metadata[GENERATION])[SHORTLIST])


PROTOBUF_LIMIT = 2_000_000_000  # bytes of one file; the format's own limit is 2^31
EXTERNAL_THRESHOLD = 1024


def export_search(
    checkpoint: str | Path,
    out: Target,
    settings: ExportSettings = ExportSettings(),
    *,
    text: bool = False,
    external: bool = False,
    log: Callable[[str], None] = lambda _: None,
    watch: Progress = no_progress,
    **changes: Unpack[ExportArguments],
) -> Path:
    """Write `out`, a single ONNX file that takes source ids (with `text`: strings) and returns the n best translations.

    A decoder's file takes ids of prompts and returns their continuations. A text encoder's file, with `text`, takes
    strings and returns their vectors, using ONNX Runtime's operators.

    `settings` and `changes` are as in `export_onnx`, but a file can't have several precisions, or vectors as input.

    target: `portable` consists of standard operators; `cpu` uses ONNX Runtime's own where they are faster. text: put
    the tokenizer inside, with operators of `onnxruntime-extensions`, which the caller has to register. attention:
    return the attention of each token of the hypotheses; not with text, where callers don't see tokens. external:
    weights in a second file, OUT_data; always so beyond 2 GB. force: replace an earlier such file, once the new one is
    complete.

    Lower precisions are judged as in `export_onnx`, on an ONNX folder of the same precision; `accept_loss` is as there.
    Raises UserError, e.g. for an encoder without `text`, a missing tokenizer, a damaged checkpoint, a full
    disk, or too much loss.
    """
    settings = replace(settings, **changes)
    _check_one_file(settings, Path(out))
    read = resolve(checkpoint), *texts_of(settings)
    output = claim(out, SEARCH_FILE, settings.force, *read)
    out = output.path
    beside = [_claim_beside(output, f"{out.name}_data", settings.force, *read)]
    plan = Plan.of(checkpoint, settings)
    opened = plan.checkpoint
    plan.say_what_is_widened(log)
    if text:
        _check_text(plan, out)
    generation, named = settings_beside(plan, out.stem, text)
    beside += [_claim_beside(output, name, settings.force, *read) for name in named]
    if gate_text(opened, plan.judged, settings.gate_source, settings.gate_reference, log) is None:
        plan = settled(plan, settings, write_package, log, watch)
    else:
        plan = replace(plan, int8_scales=_judged_scales(checkpoint, plan.config, out, settings, log, watch))
    model = one_file_graph(plan, generation, text)
    external = external or sum(map(nbytes, model.graph.initializers.values())) > PROTOBUF_LIMIT
    with replace_files(output, *beside) as temporary:
        data, file = temporary / f"{out.name}_data", temporary / out.name
        fill([model], opened, data, EXTERNAL_THRESHOLD)
        place_constants(model)
        for name, path in named.items():
            shutil.copyfile(path, temporary / name)
        proto = ir.to_proto(model)
        file.write_bytes(proto.SerializeToString(deterministic=True))
        if not text:  # the checker knows only ONNX's and ONNX Runtime's operators
            onnx.checker.check_model(file, full_check=True)
        if not external:
            write_inside(proto, temporary, file)
            data.unlink(missing_ok=True)
    return out


def one_file_graph(plan: Plan, generation: Settings, text: bool) -> ir.Model:
    """Build the graph (a search, or from text to vectors) without values for its weights.

    generation: from `settings_beside`.
    """
    (precision,) = plan.precisions
    request, inside = replace(plan.request, text=text), plan.tokenizer if text else None
    if text and not plan.config.has_decoder:
        assert plan.embedding is not None
        model = vector_model(request, str(inside), plan.embedding)
    else:
        digest = None if inside is None else sha256(inside.encode()).digest()
        key = (SEARCH, plan.target.name, precision, digest, repr(request), repr(generation))
        model = built_once(key, lambda: search_model(request, plan.target.name, inside, generation, precision))
    # 16-bit weights only make the file smaller: the loop computes in float32, as a CPU does anyway.
    lower(model, precision, plan.target.lowering._replace(computes_in=()), plan.activations, plan.int8_scales)
    model.metadata_props.update(record(plan, generation, text))
    if PRECISIONS[precision].form == "packed":
        use_packed_operators(model, plan.checkpoint, plan.activations)
    unpack_on_load(model, plan.checkpoint)
    return model


def place_constants(model: ir.Model) -> None:
    """Move constants, once they have values, into the inner graphs that read them."""
    names = {graph.name for graph in model.graph.subgraphs()}
    for inner in (ALL_LOGITS, STEPS):
        if inner in names:
            move_inside(model, inner)


def _check_one_file(settings: ExportSettings, out: Path) -> None:
    """Raise UserError for settings a single file can't have, or if `out` isn't a file name ending in .onnx."""
    if not target_of(settings.target).search:
        targets = ", ".join(name for name, entry in TARGETS.items() if entry.search)
        raise UserError(f"search in the graph: target {settings.target!r} has none; choose one of {targets}")
    if len(precisions := check_precisions(settings.precision)) > 1:
        raise UserError(f"{out}: search in the graph is one file of one precision, not {', '.join(precisions)}")
    if settings.inputs_embeds:
        raise UserError("{}: search in the graph is one file that reads ids: leave out {inputs_embeds}", out)
    if out.suffix != ".onnx" or out.is_dir():
        raise UserError(f"{out}: search in the graph is one file: give a name that ends with .onnx")


def _check_text(plan: Plan, out: Path) -> None:
    """Raise UserError unless this model's file can take and return text."""
    folder = plan.checkpoint.folder
    if plan.tokenizer is None:
        raise UserError(f"{folder}: has no tokenizer.json, which text in and out needs; export without text")
    if side_texts(plan.tokenizer) is not None and not has_pieces(plan.tokenizer):
        raise UserError(
            f"{folder}: has a vocabulary of bytes for each language; text in a graph is of a joint one, or of"
            " SentencePiece's pieces: export without text"
        )
    if not plan.config.has_decoder and plan.embedding is None:
        raise UserError(f"{folder}: has no {EMBEDDING}, which says how a text's vector is made: export a folder")
    if plan.request.attention_layer is not None:
        raise UserError(f"{out}: attention is between tokens, which a file of text doesn't show: leave out --attention")


def _holds_search(file: Path) -> bool:
    """Whether this project wrote the file as a model with the search inside."""
    return SOURCE in metadata_of(read_model(file))


SEARCH_FILE = Kind("model", _holds_search)


def _claim_beside(output: Output, name: str, force: bool, *read: Path) -> Output:
    """Claim a file that belongs to the model's file. A file there is replaced only together with an earlier model."""
    kind = Kind(f"file beside {output.path.name}", lambda _: not output.place.exists() or output.before is not None)
    return claim(output.path.with_name(name), kind, force, *read)


def _judged_scales(
    checkpoint: str | Path,
    config: TransformerConfig,
    out: Path,
    settings: ExportSettings,
    log: Callable[[str], None],
    watch: Progress,
) -> Int8Scales:
    """The int8 scales of an ONNX folder of the same precision. Raises UserError if the quality gate refuses it."""
    judged = replace(settings, target="portable", attention=False, attention_layer=None, force=False)
    with TemporaryDirectory() as folder:
        package = Path(folder) / "package"
        try:
            export_onnx(checkpoint, package, judged, log=log, watch=watch)
        except UserError as error:
            raise UserError(str(error).replace(str(package), str(out))) from None
        return read_int8_scales(package, config) or BY_ROW
