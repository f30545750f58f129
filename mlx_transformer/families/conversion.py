"""Published checkpoints to this project's and back: one module a model family, with tables of names and fields.

A family's module has its `Family`: `model_type` of config.json, `read(folder) -> (config, weights, notes)` and
`write(checkpoint) -> (config.json, weights)`, which writes what `read` would read back equal and refuses the rest;
`folder.py` knows the folders they are kept in. NumPy alone.
"""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.core.checkpoint import holds_checkpoint, holds_theirs, open_checkpoint, save_checkpoint
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.system.durable import check_free
from mlx_transformer.system.errors import UserError

from .folder import read_folder, read_tokenizer, write_folder
from .marian import MARIAN
from .pegasus import PEGASUS

FAMILIES = {family.model_type: family for family in (MARIAN, PEGASUS)}


def import_huggingface(folder: str | Path, out: str | Path, force: bool = False) -> list[str]:
    """Write the model of a Hugging Face folder (config.json, model.safetensors) as this project's checkpoint `out`.

    Returns notes: what of the folder was left behind. `out` is new or empty, or with `force` a checkpoint that is
    replaced; it is written durably, as by `save_checkpoint`. Raises `UserError` for a folder that is damaged or of no
    family in `FAMILIES`, and for whatever in it our config can't express.
    """
    folder, out = Path(folder), Path(out)
    check_free(out, "checkpoint", holds_checkpoint, force, folder)
    source = read_folder(folder)
    model_type = source.config.get("model_type")
    if model_type not in list(FAMILIES):
        raise UserError(f"{folder}: model_type is {model_type!r}; these can be imported: {', '.join(sorted(FAMILIES))}")
    config, weights, notes = FAMILIES[model_type].read(source)
    tokenizer, note = read_tokenizer(folder, config)
    save_checkpoint(out, config, weights, tokenizer)
    return [*notes, *note]


def to_huggingface(checkpoint: str | Path, out: str | Path, family: str | None = None, force: bool = False) -> Path:
    """Write a checkpoint (or a run's folder) as a Hugging Face folder `out` that `transformers` reads.

    `family` is a key of `FAMILIES`; by default the one whose norms stand where the model's do: "marian" behind each
    sub-layer, "pegasus" before it.

    `out` is new or empty, or with `force` such a folder that is replaced. Raises `UserError` with every reason why the
    family has no such model.
    """
    opened = open_checkpoint(checkpoint)
    check_free(Path(out), "Hugging Face folder", holds_theirs, force, opened.folder)
    tokenizer = opened.tokenizer_json()
    if tokenizer is not None and side_texts(tokenizer) is not None:
        raise UserError(
            f"{opened.folder}: has a vocabulary for each language; a folder for transformers holds one tokenizer.json"
        )
    if family is None:
        family = next(f.model_type for f in FAMILIES.values() if f.norm_placement == opened.config.norm_placement)
    config, weights = FAMILIES[family].write(opened)
    return write_folder(Path(out), opened.config, config, weights, tokenizer)
