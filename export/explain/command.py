"""The command `explain`: open the models, run one sentence, write the page and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.options import Options
from mlx_transformer.system.durable import write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import quiet_progress

from .content import content
from .opening import open_model, open_other
from .page import page
from .sentence import CONTINUATION, read_sentence
from .trace import trace

MARK = '<script type="application/json" id="data">'
"""Only pages of ours hold it: another file is not replaced."""


def explain(
    model: Path,
    texts: Sequence[str],
    *,
    target: str | None = None,
    out: Path = Path("explain.html"),
    figures: Path | None = None,
    beside: str | None = None,
    runtime: str | None = None,
    precision: str | None = None,
    beam: int = 1,
    length_penalty: float = 0.6,
    max_new_tokens: int | None = None,
    top_k: int = 5,
    threads: int | None = None,
    verify: bool = True,
    force: bool = False,
) -> str:
    """Write the page `out` about one sentence, and the same figures into the folder `figures`; what was written, in a
    line. beside: a second model, or another runtime of the first. `UserError` for what can't be explained."""
    if len(texts) != 1:
        given = f"{len(texts)} of them are given" if texts else "none is given"
        raise UserError(f"explain takes one sentence in quotes; {given}")
    if not 1 <= top_k <= 50:
        raise UserError(f"top_k={top_k}: give 1 to 50")
    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "max_new_tokens": max_new_tokens}
    Options(**options)  # checked before the model is read
    if precision is not None:
        if runtime is not None:
            raise UserError("--precision and --runtime exclude each other: name it as in onnxruntime:cpu:all:int8")
        runtime = f"onnxruntime:cpu:all:{precision}"
    if target is not None and beam > 1:
        raise UserError("--beam and --target exclude each other: a given target is not searched for")
    check_page(out, force)
    if figures is not None:
        from .figures import check_figures

        check_figures(figures, force)
    with quiet_progress("explain") as watch:
        watch(0.0, "reading the model")
        models = [open_model(model, runtime, threads, verify)]
        if beside is not None:
            models.append(open_other(beside, models[0], threads, verify))
        watch(0.3, "reading the sentence")
        sentence = read_sentence(models[0], texts[0], target, _options(models[0].config, options))
        traces = []
        for i, each in enumerate(models):
            watch(0.4 + 0.2 * i, f"running {each.label}")
            traces.append(trace(each, sentence))
        watch(0.8, "writing")
        data = content(models, sentence, traces, min(top_k, models[0].config.vocab_size))
        text = page(data)
        write_text(out, text)
        written = [f"{out}: {len(text.encode()) / 1e6:.2f} MB"]
        if figures is not None:
            from .figures import write_figures

            written.append(f"{figures}: {write_figures(figures, sentence, traces, data)} figures")
    return "; ".join(written)


def check_page(out: Path, force: bool) -> None:
    """Raise `UserError` unless a page may be written there: what exists is an earlier one, and `force` replaces it."""
    if out.is_dir():
        raise UserError(f"{out}: is a folder; --out needs the name of a page")
    if not out.is_file():
        return
    if MARK.encode() not in out.read_bytes():
        raise UserError(f"{out}: is no page of explain; choose another name")
    if not force:
        raise UserError(f"{out}: holds another page; choose another name, or --force to replace it")


def _options(config: TransformerConfig, options: dict[str, Any]) -> Options:
    if config.architecture == "decoder" and options["max_new_tokens"] is None:
        options = options | {"max_new_tokens": CONTINUATION}
    return Options(**options)
