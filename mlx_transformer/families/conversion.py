"""Published models to checkpoints of ours and back: folders read, converted by their family's tables, and written."""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.core.checkpoint import CONFIG, holds_checkpoint, holds_theirs, open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.system.durable import check_free
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json

from .engine import Published, exported, imported
from .folder import read_folder, read_tokenizer, write_folder
from .table import FAMILIES, family_of


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
    config, weights = imported(FAMILIES[model_type], source)
    tokenizer, note = read_tokenizer(folder, config)
    save_checkpoint(out, config, weights, tokenizer)
    return [*_left_behind(source, config), *note]


def to_huggingface(checkpoint: str | Path, out: str | Path, family: str | None = None, force: bool = False) -> Path:
    """Write a checkpoint (or a run's folder) as a Hugging Face folder `out` that `transformers` reads.

    `family` is a key of `FAMILIES`; by default the first that has such a model.

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
    chosen = family_of(opened.config) if family is None else FAMILIES[family]
    config, weights = exported(chosen, opened.config, opened.tensors(), opened.folder)
    return write_folder(Path(out), opened.config, config, weights, tokenizer)


def pads_either_side(folder: str | Path) -> bool:
    """Return whether `transformers` computes the same of a folder of theirs whichever side is padded."""
    return FAMILIES[read_json(Path(folder) / CONFIG)["model_type"]].counts_tokens


def _left_behind(source: Published, c: TransformerConfig) -> list[str]:
    """Rules of its generation that our search doesn't have by itself: pad and the start token are never generated."""
    settings = {**source.config, **source.generation}
    banned = []
    for key in ("bad_words_ids", "suppress_tokens"):
        value = settings.get(key)
        never_generated = (c.pad_id, c.bos_id, [c.pad_id], [c.bos_id])
        banned += [ids for ids in value if ids not in never_generated] if isinstance(value, list) else []
    return [f"banned tokens left behind: {banned}"] if banned else []
