"""The command `explain`: open the models, run one sentence, write the page and the figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from export.settings import ExplainSettings
from export.validate.engines import full_name
from export.validate.opening import RUNTIMES, Opened, open_model
from mlx_transformer.core.folders import Place
from mlx_transformer.core.outputs import claim, page_kind
from mlx_transformer.decoding.options import Options
from mlx_transformer.families.conversion import as_checkpoint
from mlx_transformer.generation.settings import (
    SOURCE_LANGUAGE,
    TARGET_LANGUAGE,
    TASK_PREFIX,
    chosen_options,
    with_languages,
)
from mlx_transformer.system.durable import write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import changed
from mlx_transformer.system.progress import quiet_progress

from .content import content
from .inside import shipped
from .page import ROOM, links_from, page, walked
from .sentence import CONTINUATION, read_sentence, trace


def explain(
    model: Path | None = None,
    texts: Sequence[str] = (),
    settings: ExplainSettings = ExplainSettings(),
    search: Options = Options(),
    **changes: Any,
) -> str:
    """Write the page `settings.out` about one sentence, and the same figures into the folder `settings.figures`.

    Without a model the page shows the three models in this package. changes: fields of `settings` and options of the
    search, by name. Returns a line such as "explain.html: 1.20 MB". Raises UserError for inputs it can't explain.
    """
    s, options = changed(settings, changes)
    plain = Options()
    chosen = {each.name: getattr(search, each.name) for each in fields(plain)}
    chosen = {name: value for name, value in chosen.items() if value != getattr(plain, name)} | options
    if model is None:
        return _explain_shipped(s, chosen)
    if len(texts) not in (1, 2):
        count = f"{len(texts)} of them are given" if texts else "none is given"
        raise UserError(f"explain takes one sentence in quotes; {count}")
    out, figures = s.out, s.figures
    if s.precision is not None and s.runtime is not None:
        raise UserError("--precision and --runtime exclude each other: name it as in onnxruntime:cpu:all:int8")
    if s.translation is not None and chosen.get("beam", 1) > 1:
        raise UserError("--beam and --translation exclude each other: a given translation is not searched for")
    read = [Path(place) for place in (model, s.beside) if place is not None]
    page_output = claim(out, page_kind("explain"), s.force, *read)
    if figures is not None:
        from .figures import claim_figures

        figures = claim_figures(figures, s.force, *read)
    with ExitStack() as stack:
        watch = stack.enter_context(quiet_progress("explain"))
        watch(0.0, "reading the model")
        folder = stack.enter_context(as_checkpoint(model))
        models = [open_model(folder, s.runtime, s.threads, s.verify, s.precision)]
        config = models[0].config
        if s.beside is not None:
            other = str(stack.enter_context(as_checkpoint(s.beside)))
            models.append(open_other(other, models[0], s.threads, s.verify))
        watch(0.3, "reading the sentence")
        if config.architecture == "decoder":
            chosen.setdefault("max_new_tokens", CONTINUATION)
        languages = {
            name: getattr(s, name) for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE) if getattr(s, name) is not None
        }
        chosen = with_languages(models[0].settings, chosen | languages, lines=texts)
        around, search = chosen_options(models[0].settings, chosen)
        prefix = models[0].settings.get(TASK_PREFIX, "") if s.task_prefix is None else s.task_prefix
        sentence = read_sentence(models[0], texts, s.translation, search, around, prefix)
        traces = []
        for i, each in enumerate(models):
            watch(0.4 + 0.2 * i, f"running {each.label}")
            traces.append(trace(each, sentence))
        watch(0.8, "writing")
        data = content(models, sentence, traces, min(s.top_k, config.vocab_size))
        room = ROOM - len(json.dumps(data, ensure_ascii=False))
        text = page([walked(models[0], sentence, room)], data, links=links_from(page_output.path.parent))
        write_text(page_output, text)
        written = [f"{out}: {len(text.encode()) / 1e6:.2f} MB"]
        if figures is not None:
            from .figures import write_figures

            written.append(f"{figures}: {write_figures(figures, sentence, traces, data)} figures")
    return "; ".join(written)


def open_other(text: str, first: Opened, threads: int | None, verify: bool) -> Opened:
    """Open the model to show beside the first.

    text: another folder, or another runtime for the same folder, e.g. "onnxruntime". Raises UserError if the two can't
    be compared.
    """
    is_runtime = full_name(text).partition(":")[0] in RUNTIMES and not Path(text).exists()
    folder, runtime = (first.folder, text) if is_runtime else (Path(text), None)
    onnx = Place.of(folder).onnx
    other = open_model(folder, runtime, threads if onnx else None, verify)
    if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
        raise UserError(f"{text}: has another vocabulary than {first.folder}; compare models of the same tokens")
    for name in ("architecture", "encoder_layers", "decoder_layers", "decoder_self_attention", "heads", "d_model"):
        ours, theirs = getattr(first.config, name), getattr(other.config, name)
        if ours != theirs:
            raise UserError(f"{text}: {name}={theirs!r}, {first.folder} has {ours!r}; maps of these can't be compared")
    return other


def _explain_shipped(s: ExplainSettings, options: Mapping[str, Any]) -> str:
    if options or replace(s, out=Path("explain.html"), force=False) != ExplainSettings():
        raise UserError("explain without MODEL takes --out and --force alone: name a model and a sentence for the rest")
    output = claim(s.out, page_kind("explain"), s.force)
    text = page(shipped(), links=links_from(output.path.parent))
    write_text(output, text)
    return f"{s.out}: {len(text.encode()) / 1e6:.2f} MB"
