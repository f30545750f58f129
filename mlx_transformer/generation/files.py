"""A file translated to a file, or a stream to a stream: one line out for each line in, in memory that doesn't grow.

check the whole input -> parts of some thousand lines -> translations -> written (`line_files.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import changed

from .alignment import CrossWeights
from .line_files import LineWork, write_lines
from .lines import Layout, LineReport, one_line
from .options import Options
from .settings import SOURCE_LANGUAGE, TARGET_LANGUAGE, TASK_PREFIX, language_id
from .text_options import TextSettings
from .verbs import TextVerbs

DONE_WITH = {
    "split": "translated in pieces",
    "truncate": "translated as far as it takes",
    "skip": "left empty",
}


def translate_stream(
    model: TextVerbs,
    input: Path | None = None,
    output: Target | None = None,
    settings: TextSettings = TextSettings(overlong="error"),
    *,
    text: Sequence[str] = (),
    cross_weights: CrossWeights | None = None,
    model_facts: Callable[[], Mapping[str, str]] = dict,
    **changes: Any,
) -> None:
    """Translate a file (default: `text`, or else standard input) to a file (default: standard output), one line out for
    each line in.

    Lines and their translations are as in `lines.py`. A file is read once before it is translated, so that what is
    wrong with a line of it is found before the first translation, not after the last hour; OUTPUT appears whole or not
    at all, and an interrupted one is continued by `resume` (`output.py`), with the same bytes in the end. How many
    lines were too long for the model is said on standard error, as is, for a file, how far it is.

    changes: by their names, fields of `TextSettings` that differ from `settings`, and the options of the search.
    cross_weights: what aligns, for a model whose search shows no attention. model_facts: what must not change between
    an interrupted translation and the one that continues it, by name, beside input and options. `UserError` for what
    can't be read, written or continued.
    """
    s, options = changed(settings, changes)
    for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE):
        if (code := getattr(s, name)) is not None:
            language_id(model.generation, code)
            options[name] = code
    if s.task_prefix is not None:
        options[TASK_PREFIX] = s.task_prefix
    if s.stream and (s.scores or s.json or s.resume or s.alignment):
        raise UserError(
            "{stream} writes bare text as it is decided: without scores, json, resume and alignment", stream=True
        )
    layout = Layout(n_best=options.get("n_best", 1), scores=s.scores, json=s.json, alignment=s.alignment)
    aligned = s.alignment and (cross_weights or True)

    def make(lines: Sequence[str], report: LineReport) -> bytes:
        translations = model.n_best(
            lines,
            overlong=s.overlong,
            first_line=report.first_line,
            scored=layout.scored,
            on_overlong=report.on_overlong,
            aligned=aligned,
            done=report.done,
            **options,
        )
        rows = (layout.line(*pair) + "\n" for pair in zip(lines, translations, strict=True))
        return "".join(rows).encode(errors="replace")

    def pieces(line: str, report: LineReport) -> Iterator[bytes]:
        begun = model.stream(
            line, overlong=s.overlong, line_number=report.first_line, on_overlong=report.on_overlong, **options
        )
        yield from (one_line(piece).encode(errors="replace") for piece in begun)

    check = partial(model.check_lines, overlong="error", task_prefix=s.task_prefix)
    chosen = {"overlong": s.overlong, "scores": s.scores, "json": s.json, "alignment": s.alignment}
    work = LineWork(
        name="translate",
        make=make,
        overlong=f"longer than the model takes, {DONE_WITH.get(s.overlong, 'an error')}",
        options={**asdict(Options()), **model.generation, **options, **chosen},
        check=check if s.overlong == "error" else None,
        pieces=pieces if s.stream else None,
    )
    write_lines(work, input, output, text=text, resume=s.resume, force=s.force, model_facts=model_facts)
