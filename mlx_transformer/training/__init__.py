"""Training as in section 5 of the paper: loss, schedule, optimizer step, run folder, trainer.

train("multi30k", out="runs/mine", source="train.en", target="train.de", steps=500)
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from .trainer import Result


def train(
    recipe: str | Path | None = None, *, out: str | Path, resume: bool = False, force: bool = False, **keys: Any
) -> Result:
    """Train as the command does, and return where the model is and how far the run came.

    recipe: a TOML file or the name of a built-in one. out: the run's folder. resume: continue the run in it. force:
    replace that run. keys: those of a recipe that differ, by their names, such as steps=500 or d_model=256. Progress is
    shown on standard error. `UserError` for a recipe, a text or a folder that won't do.
    """
    from pathlib import Path

    from mlx_transformer.training.group import joined
    from mlx_transformer.training.options import tables_of
    from mlx_transformer.training.recipe import load_recipe
    from mlx_transformer.training.run_folder import check_folder
    from mlx_transformer.training.trainer import Trainer

    out, group = Path(out), joined()
    if group.leads:
        check_folder(out, resume, force)  # before the recipe is read, which may be that of the run
    chosen = load_recipe(None if recipe is None else str(recipe), tables_of(keys), run=out if resume else None)
    return Trainer(chosen, out, resume, force=force, group=group).run()
