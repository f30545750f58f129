"""distil: a small model that learns a large one's translations, for Marian's engines.

    OUT/distil.json         teacher and text that the folder was begun with
    OUT/translations.txt    the teacher's translations of the sources, on which the student is trained
    OUT/model ...           the student's run, as `train` leaves it
    OUT/shortlist.bin       which target tokens the student's source tokens become
    OUT/marian              what Marian's engines read

Each part is kept where it is whole, and what was interrupted goes on.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from click.exceptions import Exit

from mlx_transformer.system.errors import UserError

from .converting import write_shortlist
from .parameters import Option
from .settings import Model

if TYPE_CHECKING:
    from mlx_transformer.training.recipe import Recipe

RECORD, TRANSLATIONS, SHORTLIST, MARIAN = "distil.json", "translations.txt", "shortlist.bin", "marian"
FORMAT = 1
FIRST = 50
"""Tokens that every sentence's translation may have, the commonest ones."""


@dataclass(frozen=True, kw_only=True)
class DistilSettings:
    """How a student is made."""

    valid_source: Path | None = None
    """Source sentences for validation; unset: one in a hundred is set aside."""
    valid_target: Path | None = None
    """Their translations by people."""
    recipe: str = "distil"
    """The student: a TOML recipe, or the name of a built-in one."""
    epochs: float | None = None
    """End after so many passes over the text; unset: the recipe's."""
    minutes: float | None = None
    """End after so many minutes; unset: the recipe's."""
    beam: int = 4
    """Translations that the teacher's search keeps at a time."""
    threads: int | None = None
    """Threads of an ONNX teacher's operators; unset: one for each core."""


def distil(
    teacher: Model,
    source: Annotated[Path, Option(help="Sentences for the teacher to translate, one a line.")],
    out: Annotated[Path, Option("--out", "-o", help="The folder of the student's run.")],
    *,
    settings: DistilSettings,
) -> None:
    """Train a small model on a large one's translations of --source, and write it for Marian's engines, Firefox's among
    them. The same command goes on with what was interrupted."""
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
    for _ in line_blocks(source):  # translating would replace bytes that are no text, and training refuse them
        pass
    if s.valid_source is not None and s.valid_target is not None:
        read_parallel(s.valid_source, s.valid_target)  # what is wrong with them is said before hours go into it
    with _locked(out):
        begun = _check_out(out, teacher, recipe)  # another process may have begun there meanwhile
        _begin(out, begun, {"teacher": fingerprint(teacher), "source": sha256(source), "beam": s.beam})
        _translate(teacher, source, out / TRANSLATIONS, s)
        _train(recipe, out)
        _write(out, source)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Make the folder, and let no other `distil` write there meanwhile. (A run locks its folder itself.)"""
    from mlx_transformer.system.locks import alone

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
    """Raise `UserError` where Marian's engines couldn't read the student, before hours go into it."""
    from mlx_transformer.families.marian_files.writing import check_network

    if recipe.training.start_from is not None:
        return
    if recipe.data.tokenizer is None and recipe.data.vocab_model != "unigram":
        raise UserError(f"{name}: vocab_model={recipe.data.vocab_model!r}: Marian's engines read unigram alone")
    size = recipe.data.vocab_size
    ids = dict(pad_id=size - 1, bos_id=size - 1, eos_id=0)
    check_network(replace(recipe.config(size), **ids), (size - 1, size - 1), Path(name))


def _check_out(out: Path, teacher: Path, recipe: Recipe) -> bool:
    """Return whether the folder holds what the command has begun; `UserError` where it may not be written."""
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
    """Write down what the folder is made of; `UserError` if it was begun with something else."""
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
    """Train the student, or go on, or find it trained. Ends the command where a signal ended the run."""
    from mlx_transformer.training.run_folder import RECORD as RUN
    from mlx_transformer.training.trainer import Trainer

    result = Trainer(recipe, out, resume=(out / RUN).exists()).run()
    print(f"{result.model}: {result.parameters:,} parameters, {result.state.step:,} steps")
    if result.interrupted is not None:
        print(f"saved; the same command goes on with {shlex.quote(str(out))}", file=sys.stderr)
        raise Exit(128 + result.interrupted)


def _write(out: Path, source: Path) -> None:
    """Write OUT/marian, unless it is that of the weights."""
    from export import marian_scales
    from mlx_transformer.convert import to_marian
    from mlx_transformer.core.checkpoint import open_checkpoint, weights_digest
    from mlx_transformer.core.outputs import claim
    from mlx_transformer.core.shortlist import read_shortlist
    from mlx_transformer.families.marian_files.folder import holds_marian
    from mlx_transformer.families.marian_files.writing import MARIAN as MARIAN_FOLDER
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
