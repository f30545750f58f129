"""The facts of a run for the model card: languages, origin, and the scores of its validation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mlx_transformer.core.card import RESULTS, begin_card, carried
from mlx_transformer.core.checkpoint import resolve
from mlx_transformer.data import built_in
from mlx_transformer.data.line_files import unpacked_suffix
from mlx_transformer.data.pair_files import language_pair
from mlx_transformer.generation.scoring import score
from mlx_transformer.system.files import read_bytes
from mlx_transformer.system.front_matter import front_matter, keys_of

from .recipe import Recipe
from .run_folder import MAX_LOG_BYTES, METRICS

LANGUAGE = re.compile(r"\.([a-z]{2})")
TASKS = {"translation": "translation", "classification": "text-classification"}
TASKS |= dict.fromkeys(("contrastive", "distillation"), "sentence-similarity")
SECONDS = {"perplexity": "perplexity a token"}
SCORES = {"bleu": "BLEU", "chrf": "chrF"}


def model_card(run: Path, recipe: Recipe, made_of: dict[str, Any]) -> str:
    """Return the begin of the card of OUT/model. made_of: what run.json says of its weights; those of one step have the
    scores of its validation, if there was one then."""
    start = recipe.training.start_from
    known = {} if start is None else keys_of(carried(resolve(start)))
    steps = made_of["steps"] if made_of["final"] in ("last", "best") else []
    scores = [scores for step in steps if (scores := _validation(run / METRICS, step))]
    index = _index(recipe, scores[0]) if scores else None
    return front_matter({**known, **keys_of(begin_card(language=languages(recipe), **{RESULTS: index}))})


def languages(recipe: Recipe) -> list[str] | None:
    """Return the codes of the languages, as the recipe or the names of its files have them; None where they don't."""
    data, names = recipe.data, list[str]()
    if data.corpus is not None:
        names = built_in.languages(data.corpus)
    for options in (data, *data.corpora):
        if options.languages is not None:
            names += language_pair(options.languages)
        elif options.source is not None and options.target is not None:
            codes = [LANGUAGE.fullmatch(unpacked_suffix(Path(place))) for place in (options.source, options.target)]
            names += [code[1] for code in codes if code is not None and None not in codes]
    return list(dict.fromkeys(names)) or None


def _validation(log: Path, step: int) -> dict[str, Any]:
    """Return the scores of the validation at a step, {} if there was none."""
    if log.exists():
        for line in reversed(read_bytes(log, MAX_LOG_BYTES).splitlines()):
            if line.startswith(b'{"kind": "valid"') and (entry := json.loads(line))["step"] == step:
                return entry
    return {}


def _index(recipe: Recipe, scores: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the Hub's form of scores: those of translations, and the one that the objective has beside its loss."""
    signatures = score(["text"], ["text"]) if SCORES.keys() & scores.keys() else {}
    metrics: list[dict[str, Any]] = [
        {"type": key, "name": name, "value": scores[key], "args": {"signature": signatures[f"{key}_signature"]}}
        for key, name in SCORES.items()
        if key in scores
    ]
    second = recipe.objective.step.second
    metrics.append({"type": second, "name": SECONDS.get(second, second), "value": round(scores[second], 3)})
    data = recipe.data
    text = data.corpus or data.valid_source or data.valid_pairs or data.valid_text or data.valid_labelled
    name = "set aside of the training text" if text is None else Path(text).name
    result = {
        "task": {"type": TASKS.get(recipe.training.objective, "text-generation")},
        "dataset": {"type": "validation", "name": f"{name}, validation"},
        "metrics": metrics,
    }
    return [{"name": "mlx-transformer", "results": [result]}]
