"""A checkpoint as one ONNX file that holds encoder, decoder and search, and if wanted the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnx_ir as ir

from export.interface import Request
from export.package import export_onnx
from export.package.quality import LIMITS, gate_text
from export.package.source import open_source
from export.package.weights import fill, nbytes
from export.precision.mlx_integers import unpack_on_load
from export.precision.packed import check_integers, use_packed_operators
from export.precision.passes import change
from export.precision.table import IN_BLOCKS, PRECISIONS, check_activations, check_precisions
from export.targets.attention import requested_layer
from export.targets.table import TARGETS, target_of
from mlx_transformer.core.checkpoint import digests
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.system.durable import replace_files
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_protobuf
from mlx_transformer.system.watch import Watch, unwatched

from .graph import search_model
from .metadata import ACTIVATIONS, ATTENTION, PRECISION, SOURCE, TOKENIZER
from .placement import move_inside
from .steps import STEPS

EVERYTHING_INSIDE = 1 << 62
PROTOBUF_LIMIT = 2_000_000_000  # bytes of one file; the format's own limit is 2^31
EXTERNAL_THRESHOLD = 1024


def export_search(
    checkpoint: str | Path,
    out: str | Path,
    *,
    target: str = "portable",
    precision: str = "float32",
    activations: str | None = None,
    text: bool = False,
    external: bool = False,
    attention: bool = False,
    attention_layer: int | None = None,
    gate_source: str | Path | None = None,
    gate_reference: str | Path | None = None,
    force: bool = False,
    accept_loss: bool = False,
    told: Callable[[str], None] = lambda _: None,
    watch: Watch = unwatched,
) -> Path:
    """Write `out`, one ONNX file that takes source ids (with `text`: strings) and returns the n best translations.

    target: `portable` is made of standard operators; `cpu` has ONNX Runtime's own where they are faster there.
    activations: as in `export_onnx`. text: tokenizer inside, made of `onnxruntime-extensions`' operators, which whoever
    runs the file registers. attention, attention_layer: as in `export_onnx`, of each token of the hypotheses returned;
    not with text, whose tokens nobody sees. external: weights in a second file, OUT_data; always so for weights of more
    than 2 GB. A file made of the same weights is replaced when the new one is complete, any other only with `force`.
    Lower precisions are judged as by `export_onnx`, on a package of the same, and `accept_loss` is as there.
    Raises `UserError` (no encoder-decoder, no tokenizer, a damaged checkpoint, a full disk, too much lost).
    """
    chosen = target_of(target)
    if not chosen.search:
        targets = ", ".join(name for name, entry in TARGETS.items() if entry.search)
        raise UserError(f"search in the graph: target {target!r} has none; choose one of {targets}")
    (precision,) = check_precisions(precision)
    chosen.check_precisions([precision])
    multiplied = check_activations(activations, [precision])
    out = Path(out)
    if out.suffix != ".onnx" or out.is_dir():
        raise UserError(f"{out}: search in the graph is one file: give a name that ends with .onnx")
    opened, tokenizer = open_source(checkpoint)
    source = " ".join(digests(opened).values())
    if out.exists() and not force and _source(out) != source:
        raise UserError(f"{out}: holds another model; choose another name, or --force to replace it")
    if text and tokenizer is None:
        raise UserError(f"{opened.folder}: has no tokenizer.json, which text in and out needs; export without text")
    if text and tokenizer is not None and side_texts(tokenizer) is not None:
        raise UserError(
            f"{opened.folder}: has a vocabulary for each language; text in a graph is of a joint one: export "
            "without text"
        )
    check_integers(opened, [precision])
    shown = requested_layer(opened.config, attention, attention_layer)
    if text and shown is not None:
        raise UserError(f"{out}: attention is between tokens, which a file of text doesn't show: leave out --text")
    request = Request(config=opened.config, attention_layer=shown, text=text)
    model = search_model(request, target, tokenizer)
    # Sixteen bits are for the file's size: the loop computes in float32, as a CPU does anyway.
    change(model, precision, replace(chosen.lowering, computes_in=()), multiplied)
    model.metadata_props.update({PRECISION: precision, SOURCE: source})
    if shown is not None:
        model.metadata_props[ATTENTION] = str(shown)
    if tokenizer is not None:
        model.metadata_props[TOKENIZER] = tokenizer
    if precision in IN_BLOCKS:
        model.metadata_props[ACTIVATIONS] = multiplied
    if PRECISIONS[precision].form == "packed":
        use_packed_operators(model, opened, multiplied)
    unpack_on_load(model, opened)
    judged = [precision] if precision in LIMITS else []
    if gate_text(opened, judged, gate_source, gate_reference, told) is not None:
        gate: dict[str, Any] = {"gate_source": gate_source, "gate_reference": gate_reference}
        gate |= {"accept_loss": accept_loss, "told": told, "watch": watch}
        _judge(checkpoint, out, precision=precision, activations=activations, **gate)
    external = external or sum(map(nbytes, model.graph.initializers.values())) > PROTOBUF_LIMIT
    with replace_files(out) as temporary:
        data, file = temporary / f"{out.name}_data", temporary / out.name
        fill([model], opened, data, EXTERNAL_THRESHOLD if external else EVERYTHING_INSIDE)
        move_inside(model, STEPS)
        file.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
        if not text:  # the checker knows no operators but ONNX's and ONNX Runtime's
            onnx.checker.check_model(file, full_check=True)
    return out


def _source(file: Path) -> str | None:
    """The digest of the weights that a file of this project was made from."""
    try:
        model = onnx.load_from_string(read_protobuf(file))
    except Exception:  # protobuf's errors have no public name
        return None
    return {entry.key: entry.value for entry in model.metadata_props}.get(SOURCE)


def _judge(checkpoint: str | Path, out: Path, **options: Any) -> None:
    """`UserError` if a package of this precision would be refused."""
    with TemporaryDirectory() as folder:
        package = Path(folder) / "package"
        try:
            export_onnx(checkpoint, package, **options)
        except UserError as error:
            raise UserError(str(error).replace(str(package), str(out))) from None
