"""A checkpoint as one ONNX file that holds encoder, decoder and search, and if wanted the tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

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
from export.precision.mlx_integers import unpack_on_load
from export.precision.packed import use_packed_operators
from export.precision.passes import lower
from export.precision.table import PRECISIONS, check_precisions
from export.settings import ExportSettings
from export.targets.table import TARGETS, target_of
from mlx_transformer.core.checkpoint import resolve
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import Int8Scales, read_int8_scales
from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.core.pooling import EMBEDDING
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.generation.settings import Settings
from mlx_transformer.system.durable import Output, Target, replace_files
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.watch import Progress, no_progress

from .graph import search_model
from .metadata import SOURCE
from .pieces import has_pieces
from .placement import move_inside
from .record import record, settings_beside
from .steps import STEPS
from .vectors import vector_model
from .vocabulary import ALL_LOGITS

if TYPE_CHECKING:
    from typing import Unpack

    from export.arguments import ExportArguments

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
    """Write `out`, one ONNX file that takes source ids (with `text`: strings) and returns the n best translations; of
    an encoder of texts, with `text`, one that takes strings and returns their vectors, with ONNX Runtime's operators.

    `settings` and `changes` are as in `export_onnx`, but for what one file can't have: several precisions, a fixed
    shape, vectors. target: `portable` is made of standard operators; `cpu` has ONNX Runtime's own where they are faster
    there. text: tokenizer inside, made of `onnxruntime-extensions`' operators, which whoever runs the file registers.
    attention: of each token of the hypotheses returned; not with text, whose tokens nobody sees. external: weights in a
    second file, OUT_data; always so for weights of more than 2 GB. With `force` an earlier such file is replaced, once
    the new one is complete. Lower precisions are judged as by `export_onnx`, on a package of
    the same, and `accept_loss` is as there. Raises `UserError` (no encoder-decoder, no tokenizer, a damaged checkpoint,
    a full disk, too much lost).
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
        if not text:  # the checker knows no operators but ONNX's and ONNX Runtime's
            onnx.checker.check_model(file, full_check=True)
        if not external:
            write_inside(proto, temporary, file)
            data.unlink(missing_ok=True)
    return out


def one_file_graph(plan: Plan, generation: Settings, text: bool) -> ir.Model:
    """Build the graph with the search inside, or of an encoder from texts to vectors, its weights not filled yet.
    generation: as `settings_beside` gives it."""
    (precision,) = plan.precisions
    request, inside = replace(plan.request, text=text), plan.tokenizer if text else None
    if text and not plan.config.has_decoder:
        assert plan.embedding is not None
        model = vector_model(request, str(inside), plan.embedding)
    else:
        digest = None if inside is None else sha256(inside.encode()).digest()
        key = (SEARCH, plan.target.name, precision, digest, repr(request), repr(generation))
        model = built_once(key, lambda: search_model(request, plan.target.name, inside, generation, precision))
    # Sixteen bits are for the file's size: the loop computes in float32, as a CPU does anyway.
    lower(model, precision, plan.target.lowering._replace(computes_in=()), plan.activations, plan.int8_scales)
    model.metadata_props.update(record(plan, generation, text))
    if PRECISIONS[precision].form == "packed":
        use_packed_operators(model, plan.checkpoint, plan.activations)
    unpack_on_load(model, plan.checkpoint)
    return model


def place_constants(model: ir.Model) -> None:
    """Put constants, once they have values, into the inner graphs that read them."""
    names = {graph.name for graph in model.graph.subgraphs()}
    for inner in (ALL_LOGITS, STEPS):
        if inner in names:
            move_inside(model, inner)


def _check_one_file(settings: ExportSettings, out: Path) -> None:
    """Raise `UserError` for settings that one file can't have, and for a name of none."""
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
    """Raise `UserError` unless text can go in and come out."""
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
    """Return whether a file is a model with the search inside, written by this project."""
    return SOURCE in metadata_of(read_model(file))


SEARCH_FILE = Kind("model", _holds_search)


def _claim_beside(output: Output, name: str, force: bool, *read: Path) -> Output:
    """Return the right to write a file that belongs to the model: that of an earlier one goes with it."""
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
    """Return what int8 is like in a package of this precision. `UserError` if that would be refused."""
    judged = replace(settings, target="portable", attention=False, attention_layer=None, force=False)
    with TemporaryDirectory() as folder:
        package = Path(folder) / "package"
        try:
            export_onnx(checkpoint, package, judged, log=log, watch=watch)
        except UserError as error:
            raise UserError(str(error).replace(str(package), str(out))) from None
        return read_int8_scales(package, config) or BY_ROW
