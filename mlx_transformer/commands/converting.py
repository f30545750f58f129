"""Commands that convert checkpoints: import, to-huggingface, to-peft, to-marian, to-gguf, quantize, merge, shortlist,
push and distil.

`distil` trains a small model on a large model's translations, for Marian's engines. It writes

    OUT/distil.json         the teacher and the text, to check that a later call continues the same
    OUT/translations.txt    the teacher's translations, on which the student is trained
    OUT/model ...           the student's run, as `train` writes it
    OUT/shortlist.bin       likely target tokens of each source token
    OUT/marian              the student for Marian's engines

A finished part is kept, and an interrupted part is continued.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
from click.exceptions import Exit

from mlx_transformer.core.folders import CONFIG, Place, check_there
from mlx_transformer.system.errors import UserError, joined
from mlx_transformer.system.fields import Bounds, check_fields
from mlx_transformer.system.files import check_text, read_object

from .parameters import Argument, Option
from .settings import Checkpoint, Folder, Force, Model, OutArgument, Reference

if TYPE_CHECKING:
    from mlx_transformer.system.durable import Output
    from mlx_transformer.training.recipe import Recipe


def import_command(
    model: Annotated[
        Path,
        Argument(
            help="A Hugging Face folder (config.json and weights) or a name on the Hub, ORG/NAME; a .gguf file; or "
            "Marian's .npz or .bin file, or its folder.",
            check=check_there,
        ),
    ],
    out: Annotated[Path, OutArgument("Checkpoint folder to write, new or empty.")],
    revision: Annotated[
        str | None, Option(help="Branch, tag or commit, for a name on the Hub.", show_default="main")
    ] = None,
    force: Force = False,
) -> None:
    """Turn a published model, in the format of `transformers`, llama.cpp or Marian, into a checkpoint."""
    from mlx_transformer.convert import import_huggingface, import_marian
    from mlx_transformer.core.checkpoint import open_checkpoint
    from mlx_transformer.core.parameters import parameter_shapes
    from mlx_transformer.system.progress import quiet_progress

    if Place.of(model).what == "a Marian model":
        notes = import_marian(model, out, force)
    else:
        with quiet_progress("import") as watch:
            notes = import_huggingface(model, out, force, revision, watch)
    read = open_checkpoint(out)
    size = sum(map(math.prod, parameter_shapes(read.config).values()))
    kind = "" if read.quantization else f" in {read.precision}"
    text = ", with its tokenizer" if read.tokenizer_path else ""
    print("; ".join([f"{out}: imported: {read.config.architecture}, {size:,} parameters{kind}{text}", *notes]))


def to_huggingface_command(
    checkpoint: Checkpoint,
    out: Annotated[Path, OutArgument("Folder to write, new or empty.")],
    mlx_lm: Annotated[
        bool, Option("--mlx-lm", help="Write mlx-lm's format: quantised matrices keep their integers (MLX only).")
    ] = False,
    force: Force = False,
) -> None:
    """Write a checkpoint in the format of `transformers`, also for PyTorch, Optimum and mlx-lm."""
    from mlx_transformer.convert import pads_either_side, to_huggingface
    from mlx_transformer.core.checkpoint import open_checkpoint
    from mlx_transformer.families.mlx_lm import unlike_mlx_lm

    written = to_huggingface(checkpoint, out, force=force, mlx_lm=mlx_lm)
    note = "" if pads_either_side(written) else "; pad its inputs on the right"
    unlike = unlike_mlx_lm(read_object(written / CONFIG)) if mlx_lm else []
    note += f"; mlx-lm will give other logits: {'; '.join(unlike)}" if unlike else ""
    if not mlx_lm and (integers := open_checkpoint(checkpoint, verify=False).quantization):
        note += f"; {len(integers)} quantised matrices became floats: --mlx-lm keeps them"
    print(f"{written}: written{note}")


def to_peft_command(
    base: Annotated[Path, Argument(help="Checkpoint that the adapter was trained from.", check=check_there)],
    adapter: Annotated[Path, Argument(help="Folder of the adapter, or of the run that trained it.", check=check_there)],
    out: Annotated[Path, OutArgument("Folder to write, new or empty.")],
    name: Annotated[
        str | None,
        Option("--base", help="Published model that PEFT should load.", show_default="the origin of BASE"),
    ] = None,
    rslora: Annotated[
        bool, Option("--rslora", help="Write rsLoRA's alpha (factor alpha / sqrt(rank)); the result is the same.")
    ] = False,
    mlx_lm: Annotated[bool, Option("--mlx-lm", help="Write mlx-lm's format instead.")] = False,
    force: Force = False,
) -> None:
    """Write an adapter in the format of PEFT (or of mlx-lm), for a published model."""
    from mlx_transformer.convert import to_peft

    print(f"{to_peft(base, adapter, out, name, rslora, force, mlx_lm)}: written")


def to_marian_command(
    checkpoint: Checkpoint,
    out: Annotated[Path, OutArgument("Folder to write, new or empty.")],
    calibrate: Annotated[
        Path | None,
        Option(
            help="Text to compute int8's fixed scales from, one sentence a line.",
            show_default="the model's int8_scales.json, or its run's validation text",
        ),
    ] = None,
    shortlist: Annotated[
        Path | None, Option(help="Shortlist to put beside the model.", show_default="the imported model's")
    ] = None,
    force: Force = False,
) -> None:
    """Write a checkpoint in Marian's format, for Marian, Bergamot and Firefox."""
    from mlx_transformer.convert import to_marian
    from mlx_transformer.core.checkpoint import open_checkpoint
    from mlx_transformer.core.int8_scales import INT8_SCALES
    from mlx_transformer.core.shortlist import read_shortlist

    scales, listed = None, None if shortlist is None else read_shortlist(shortlist)
    if calibrate is not None or not (open_checkpoint(checkpoint).folder / INT8_SCALES).is_file():
        from export import marian_scales

        scales = marian_scales(checkpoint, calibrate, print)
    print("; ".join([f"{out}: written", *to_marian(checkpoint, out, force, scales, listed)]))


def to_gguf_command(
    checkpoint: Checkpoint,
    out: Annotated[Path, OutArgument("File to write, NAME.gguf.")],
    type: Annotated[Literal["f32", "f16", "bf16", "q8_0", "q4_0"], Option(help="Type of the matrices.")] = "f32",
    force: Force = False,
) -> None:
    """Write a checkpoint in the format of llama.cpp."""
    from mlx_transformer.convert import to_gguf

    print("; ".join([f"{out}: written", *to_gguf(checkpoint, out, type, force)]))


def push(
    folder: Annotated[
        Path,
        Argument(
            help="Folder to upload: a checkpoint, a run, an ONNX folder or another that a command wrote.",
            check=check_there,
        ),
    ],
    repository: Annotated[str, Argument(help="Repository on the Hugging Face Hub: ORG/NAME.")],
    private: Annotated[bool, Option("--private", help="Make the repository private, if it is new.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Upload without asking.")] = False,
) -> None:
    """Upload a model's folder to the Hugging Face Hub; first shows what it would upload, and asks."""
    from mlx_transformer.families.push import check_repository, shipment
    from mlx_transformer.families.push import push as send

    files = shipment(folder)
    check_repository(repository)
    print(files)
    kind = "private" if private else "public"
    if not yes:
        if not sys.stdin or not sys.stdin.isatty():
            raise UserError(f"nothing was sent to {repository}: no terminal to ask on; --yes sends without asking")
        if not click.confirm(f"Send this to {repository} on the Hugging Face Hub, {kind} if it is new?"):
            raise UserError(f"nothing was sent to {repository}")
    print(send(files, repository, private))


def shortlist(
    model: Folder,
    out: Annotated[Path, OutArgument("File to write; it appears whole or not at all.")],
    *,
    source: Annotated[Path, Option(help="Source sentences of the training text, one a line.", check=check_text)],
    reference: Reference,
    best: Annotated[int, Option(type=click.IntRange(min=1), help="Most target tokens for one source token.")] = 50,
    first: Annotated[
        int,
        Option(type=click.IntRange(min=1), help="Allow tokens with ids below this, the commonest, in every sentence."),
    ] = 50,
    verify: Annotated[
        bool, Option(help="Check the model's files against the SHA-256 digests in their manifest.")
    ] = True,
    force: Force = False,
) -> None:
    """Write a shortlist, which makes translation faster: for each source token its likely target tokens.

    They are those that the model aligns with it in a parallel text. Use the file with translate --shortlist.
    """
    from mlx_transformer.core.outputs import claim
    from mlx_transformer.generation.alignment import SHORTLIST_FILE

    output = claim(out, SHORTLIST_FILE, force, model, source, reference)
    write_shortlist(model, output, source=source, reference=reference, first=first, best=best, verify=verify)


def write_shortlist(
    model: Path, out: Output, *, source: Path, reference: Path, first: int, best: int = 50, verify: bool = True
) -> None:
    """Build a shortlist, write it, and print its size."""
    from export.validate.opening import cross_weights, open_model
    from mlx_transformer.core.shortlist import shortlist_bytes
    from mlx_transformer.data.corpus import read_parallel
    from mlx_transformer.generation.alignment import built_shortlist
    from mlx_transformer.system.durable import write_bytes
    from mlx_transformer.system.progress import quiet_progress

    text = read_parallel(source, reference)
    opened = open_model(model, verify=verify)
    weights = cross_weights(opened)
    with quiet_progress("shortlist") as report:
        built, skipped = built_shortlist(
            *(opened.config, opened.tokenizer, weights, text),
            first=first,
            best=best,
            done=lambda share: report(share, f"{round(share * len(text)):,} of {len(text):,} pairs"),
        )
    write_bytes(out, shortlist_bytes(built))
    kinds = int((built.offsets[1:] > built.offsets[:-1]).sum())
    left_out = f"; {skipped:,} pairs longer than the model takes left out" if skipped else ""
    print(
        f"{out}: {len(built.ids):,} candidates of {kinds:,} source tokens, from {len(text) - skipped:,} pairs{left_out}"
    )


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """How a checkpoint is quantised."""

    bits: Annotated[float, Bounds(at_least=2, at_most=8)] | None = None
    """Bits per weight: 2, 3, 4, 5, 6 or 8, or a mean, e.g. 4.5: matrices that matter most for --text get more than
    others; unset: 4, or the mode's."""
    group_size: int | None = None
    """Weights that share a scale and a bias: 32, 64 or 128; unset: 64, or the mode's."""
    mode: Literal["affine", "mxfp4", "nvfp4", "mxfp8"] = "affine"
    """Integers (affine), or short floats."""
    method: Literal["nearest", "search", "gptq"] = "nearest"
    """Rounding: to the nearest integer, as in MLX (nearest); with the best of several ranges for each group (search);
    or so that outputs for --text change least (gptq). With search and gptq, embeddings and classifier have 8 bits,
    unless --bits is a mean."""
    text: Path | None = field(default=None, metadata={"check": check_text})
    """Text like the model's later input, a text per line: half of it calibrates, the other half measures the loss."""
    accept_loss: bool = False
    """Write the checkpoint even if it loses more on --text than the limit."""
    dequantize: bool = False
    """Store a quantised checkpoint's matrices as float32, without rounding, e.g. to quantise it in another way."""
    force: bool = False
    """Replace an earlier checkpoint in OUT."""

    def __post_init__(self) -> None:
        if self.dequantize and replace(self, dequantize=False, force=False) != QuantizeSettings():
            raise UserError("--dequantize takes only --force: leave out the other options")
        if problems := check_fields(self):
            raise UserError(joined(problems))


def quantize(
    checkpoint: Annotated[Path, Argument(help="A checkpoint, a run's folder or a published model.", check=check_there)],
    out: Annotated[Path, OutArgument("Folder of the quantised checkpoint to write, new or empty.")],
    settings: QuantizeSettings,
) -> None:
    """Store a checkpoint's matrices as small integers or floats, in MLX's format; all other commands read them."""
    from mlx_transformer.convert.quantize import Calibration, dequantize_checkpoint, quantize_checkpoint
    from mlx_transformer.core.quantization import BITS, Scheme
    from mlx_transformer.system.progress import quiet_progress

    if settings.dequantize:
        print(f"{out}: {dequantize_checkpoint(checkpoint, out, settings.force)}")
        return
    bits = None if settings.bits is None else max(each for each in BITS if each <= settings.bits)
    mean = settings.bits if bits != settings.bits else None
    how = Calibration(method=settings.method, text=settings.text, bits=mean, accept_loss=settings.accept_loss)
    scheme = Scheme.of(settings.mode, settings.group_size, bits)
    with quiet_progress("quantize") as watch:
        done = quantize_checkpoint(checkpoint, out, scheme, settings.force, watch, how)
    print(f"{out}: {done}")


def merge(
    base: Annotated[
        Path,
        Argument(help="Checkpoint or published model that the adapter was trained from.", check=check_there),
    ],
    adapter: Annotated[
        Path | None,
        Argument(
            help="Folder of the adapter, ours, PEFT's or mlx-lm's, or of the run that trained it. For PEFT's and "
            "mlx-lm's, which name their base, BASE may be left out.",
            check=check_there,
        ),
    ] = None,
    *,
    out: Annotated[Path, Option("--out", "-o", help="Checkpoint folder to write, new or empty.")],
    requantize: Annotated[
        bool, Option("--requantize", help="After merging, requantise the matrices that are quantised in BASE.")
    ] = False,
    keep: Annotated[
        bool, Option("--keep-adapter", help="Keep BASE's quantised matrices unchanged, and store ADAPTER beside them.")
    ] = False,
    float32: Annotated[
        bool, Option("--float32", help="Store float32 where BASE has 16 bits, so that the changes aren't rounded.")
    ] = False,
    force: Force = False,
) -> None:
    """Merge an adapter into its base: writes a checkpoint in BASE's precision; quantised matrices become float32."""
    from mlx_transformer.convert import import_huggingface
    from mlx_transformer.convert.merge import keep_adapter, merge_adapter
    from mlx_transformer.core.checkpoint import CHECKPOINT, open_checkpoint
    from mlx_transformer.core.outputs import claim
    from mlx_transformer.families.hub import find_model

    if adapter is None:
        output = claim(out, CHECKPOINT, force, base)
        if keep or requantize or Place.of(base).what != "a published adapter":
            raise UserError(f"{base}: give BASE and ADAPTER; only adapters of PEFT and mlx-lm name their base")
        print("; ".join([f"{out}: merged", *import_huggingface(base, output)]))
        return
    base = find_model(base).folder
    if keep and requantize:
        raise UserError("--keep-adapter keeps the integers, --requantize changes them: give one of the two")
    if float32 and (keep or requantize):
        raise UserError("--float32 stores no integers: leave out --keep-adapter and --requantize")
    if keep:
        print(f"{out}: {keep_adapter(base, adapter, out, force)}")
        return
    rounding = merge_adapter(base, adapter, out, requantize, force, float32)
    said = [f"{out}: merged", *([] if rounding is None else [str(rounding)])]
    if (precision := open_checkpoint(out).precision) != "float32" and rounding is None:
        said.append(f"rounded to {precision}, which moves logits: --float32 keeps what was trained")
    print("; ".join(said))


RECORD, TRANSLATIONS, SHORTLIST, MARIAN = "distil.json", "translations.txt", "shortlist.bin", "marian"
FORMAT = 1
FIRST = 50
"""The commonest tokens, which every translation may contain."""


@dataclass(frozen=True, kw_only=True)
class DistilSettings:
    """How the student is trained."""

    valid_source: Path | None = None
    """Source sentences for validation; unset: one in a hundred of --source."""
    valid_target: Path | None = None
    """Reference translations of --valid-source."""
    recipe: str = "distil"
    """The student's recipe: a TOML file, or the name of a built-in one."""
    epochs: float | None = None
    """Stop after this number of passes over the text; unset: as the recipe says."""
    minutes: float | None = None
    """Stop training after this number of minutes; unset: as the recipe says."""
    beam: int = 4
    """Beam width of the teacher's search."""
    threads: int | None = None
    """ONNX Runtime's threads per operator, for an ONNX teacher; unset: one per core."""


def distil(
    teacher: Model,
    source: Annotated[Path, Option(help="Source sentences for the teacher to translate, one a line.")],
    out: Annotated[Path, Option("--out", "-o", help="Folder for the student's run and everything else.")],
    *,
    settings: DistilSettings,
) -> None:
    """Train a small translator on a large translator's output for --source, and write it for Marian's engines, e.g. in
    Firefox.

    The same command continues an interrupted run.
    """
    from mlx_transformer.core.folders import fingerprint
    from mlx_transformer.data.corpus import read_parallel
    from mlx_transformer.data.line_files import line_blocks
    from mlx_transformer.system.manifest import sha256
    from mlx_transformer.training.recipe import load_recipe

    s = settings
    text = {
        "source": source,
        "target": out / TRANSLATIONS,
        "valid_source": s.valid_source,
        "valid_target": s.valid_target,
    }
    data = {name: None if path is None else str(path) for name, path in text.items()}
    recipe = load_recipe(s.recipe, {"data": data, "training": {"epochs": s.epochs, "minutes": s.minutes}})
    _check_out(out, teacher, recipe)
    _check_student(recipe, s.recipe)
    for _ in line_blocks(source):  # refuse bad UTF-8 now: translating would replace it, and training then fail
        pass
    if s.valid_source is not None and s.valid_target is not None:
        read_parallel(s.valid_source, s.valid_target)  # find mistakes now, not after hours
    with _locked(out):
        begun = _check_out(out, teacher, recipe)  # again: another process may have begun there
        _begin(out, begun, {"teacher": fingerprint(teacher), "source": sha256(source), "beam": s.beam})
        _translate(teacher, source, out / TRANSLATIONS, s)
        _train(recipe, out)
        _write(out, source)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Make the folder, and keep any other `distil` from writing there. (A training run locks its folder itself.)"""
    from mlx_transformer.system.durable import alone

    def busy(folder: Path) -> UserError:
        return UserError(f"{folder}: another process is distilling into this folder; wait for it or stop it")

    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(out / "distil", out, busy))
        except OSError as error:
            raise UserError(f"{out}: cannot be written ({error}); choose another --out") from error
        yield


def _check_student(recipe: Recipe, name: str) -> None:
    """Raise `UserError` if Marian's engines couldn't read the student, before hours of training."""
    from mlx_transformer.families.marian_files.conversion import check_network

    if recipe.training.start_from is not None:
        return
    if recipe.data.tokenizer is None and recipe.data.vocab_model != "unigram":
        raise UserError(f"{name}: vocab_model={recipe.data.vocab_model!r}: Marian's engines read only unigram")
    size = recipe.data.vocab_size
    ids = dict(pad_id=size - 1, bos_id=size - 1, eos_id=0)
    check_network(replace(recipe.config(size), **ids), (size - 1, size - 1), Path(name))


def _check_out(out: Path, teacher: Path, recipe: Recipe) -> bool:
    """Whether `distil` has begun in this folder before. Raises `UserError` if the folder holds anything else."""
    from mlx_transformer.core.outputs import check_outside, is_within
    from mlx_transformer.training.run_folder import RECORD as RUN
    from mlx_transformer.training.run_folder import check_folder
    from mlx_transformer.training.setup import check_apart

    if is_within(out, teacher) or any(is_within(teacher, out / part) for part in ("model", MARIAN)):
        inside = "is" if out.exists() and out.samefile(teacher) else "holds, or lies in,"
        raise UserError(f"{out}: {inside} the teacher, whose files would be lost; choose another --out")
    check_outside(out)
    check_apart(recipe, out)
    if out.is_dir() and (out / RECORD).is_file():
        return True
    if (out / RUN).exists():
        raise UserError(f"{out}: holds a run that distil did not begin; choose another --out")
    check_folder(out, resume=False)
    if there := [name for name in (TRANSLATIONS, SHORTLIST, MARIAN) if (out / name).exists()]:
        raise UserError(f"{out}: holds {there[0]} of something else; choose another --out")
    return False


def _begin(out: Path, begun: bool, facts: Mapping[str, Any]) -> None:
    """Record what the folder is made from. Raises `UserError` if it was begun with something else."""
    from mlx_transformer.system.durable import write_text
    from mlx_transformer.system.files import read_json

    file = out / RECORD
    if begun:
        begun = read_json(file)
        before = begun if isinstance(begun, dict) else {}
        if changed := [name for name, value in facts.items() if before.get(name) != value]:
            raise UserError(f"{out}: was begun with another {' and '.join(changed)}; choose another --out")
        return
    write_text(file, json.dumps({"format": FORMAT, **facts}, indent=2) + "\n")


def _translate(teacher: Path, source: Path, out: Path, settings: DistilSettings) -> None:
    from mlx_transformer.generation.files import translate_stream
    from mlx_transformer.system.durable import Output
    from mlx_transformer.system.machine import versions

    from .models import open_model

    if out.is_file():
        return
    model = open_model(teacher, threads=settings.threads)
    output = Output.any(out, "file of translations")
    translate_stream(model, source, output, overlong="skip", resume=True, beam=settings.beam, model_facts=versions)
    print(f"{out}: the teacher's translations")


def _train(recipe: Recipe, out: Path) -> None:
    """Train the student, continue its training, or find it trained. Exits if a signal interrupted the run."""
    from mlx_transformer.training.run_folder import RECORD as RUN
    from mlx_transformer.training.trainer import Trainer

    result = Trainer(recipe, out, resume=(out / RUN).exists()).run()
    print(f"{result.model}: {result.parameters:,} parameters, {result.state.step:,} steps")
    if result.interrupted is not None:
        print(f"saved; the same command goes on with {shlex.quote(str(out))}", file=sys.stderr)
        raise Exit(128 + result.interrupted)


def _write(out: Path, source: Path) -> None:
    """Write OUT/marian, unless it is already there for these weights."""
    from export import marian_scales
    from mlx_transformer.convert import to_marian
    from mlx_transformer.core.checkpoint import open_checkpoint, weights_digest
    from mlx_transformer.core.outputs import claim
    from mlx_transformer.core.shortlist import read_shortlist
    from mlx_transformer.families.marian_files.conversion import MARIAN as MARIAN_FOLDER
    from mlx_transformer.families.marian_files.options import holds_marian
    from mlx_transformer.system.durable import Output, write_text
    from mlx_transformer.system.files import read_json

    record, folder, digest = read_json(out / RECORD), out / MARIAN, weights_digest(out / "model")
    if record.get("written") == digest and holds_marian(folder):
        print(f"{folder}: as it was written")
        return
    scales = marian_scales(out, None, print) or marian_scales(out, source, print)
    first = min(FIRST, open_checkpoint(out).config.vocab_size - 1)
    listed = Output.any(out / SHORTLIST, "shortlist")
    write_shortlist(out, listed, source=source, reference=out / TRANSLATIONS, first=first)
    notes = to_marian(out, claim(folder, MARIAN_FOLDER, True, own=True), True, scales, read_shortlist(listed.path))
    print("; ".join([f"{folder}: written", *notes]))
    write_text(out / RECORD, json.dumps({**record, "written": digest}, indent=2) + "\n")
