"""translate, evaluate, score, serve: a model at work on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from export.settings import ServeSettings
from mlx_transformer.generation.options import Options, OverlongPair, TextSettings
from mlx_transformer.system.errors import UserError

from .models import facts_of, open_folder, open_model
from .models import serve as serve_models
from .settings import Folder, Model, OverlongOption, RuntimeSettings, Shown, TranslatingSettings, chosen

BEST = "beam length_penalty penalty_form max_new_tokens repetition_penalty no_repeat_ngram"
"""The options that have to do with the best translation alone."""
SEARCH = f"{BEST} n_best min_new_tokens early_stopping sample temperature top_k top_p seed"

Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The file to write; it appears whole or not at all.", show_default="stdout"),
]


def translate(
    model: Model,
    text: Annotated[
        list[str] | None, typer.Argument(help="Text, each argument a line; in place of --input.", show_default=False)
    ] = None,
    *,
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help="Text, one sentence a line.", show_default="stdin")
    ] = None,
    out: Out = None,
    settings: Annotated[TextSettings, Shown()],
    search: Annotated[Options, Shown("Search", SEARCH)],
    runtime: Annotated[TranslatingSettings, Shown("Runtime")],
) -> None:
    """Translate text: one line in, one line out."""
    from mlx_transformer.generation.files import translate_stream

    def model_facts() -> dict[str, str]:
        listed = {} if runtime.shortlist is None else {"shortlist": str(runtime.shortlist)}
        return {**facts_of(model, runtime)(), **listed}

    opened, weights = open_model(model, **vars(runtime)), None
    if settings.alignment and not opened.shows_attention:
        if model.is_file():
            raise UserError(f"{model}: returns no attention; export it with --search --attention")
        from export.explain.opening import cross_weights

        weights = cross_weights(model, runtime.threads, runtime.precision, runtime.verify)
    options = chosen(search, SEARCH)
    translate_stream(
        opened, input, out, settings, text=text or (), cross_weights=weights, model_facts=model_facts, **options
    )


def evaluate(
    model: Model,
    *,
    source: Annotated[Path | None, typer.Option(help="Source sentences, one a line.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Their translations, line by line.")] = None,
    text: Annotated[str | None, typer.Option(help="For a decoder: plain text, as train --text takes it.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Keep the translations in this file, one a line.", show_default=False),
    ] = None,
    overlong: OverlongOption = "error",
    search: Annotated[Options, Shown("Search", BEST)],
    runtime: Annotated[TranslatingSettings, Shown("Runtime")],
) -> None:
    """Score translations: JSON with sacreBLEU, chrF, TER (and their signatures) and exact match; of a decoder alone the
    perplexity of a text."""
    if text is not None:
        if source is not None or reference is not None or out is not None:
            raise UserError("--text is for a decoder alone: leave out --source, --reference and --out")
        return _evaluate_text(model, text, runtime)
    if source is None or reference is None:
        missing = "--source" if source is None else "--reference"
        raise UserError(f"Missing option '{missing}' (or, of a decoder alone, '--text')")
    from mlx_transformer.data.corpus import read_parallel
    from mlx_transformer.generation.lines import one_line
    from mlx_transformer.generation.scoring import score
    from mlx_transformer.system.durable import check_unread, write_text
    from mlx_transformer.system.progress import quiet_progress

    options = chosen(search, BEST)
    pairs = read_parallel(source, reference)
    if out is not None:
        check_unread(out, source, reference)
    long: list[int] = []
    opened = open_model(model, **vars(runtime))
    with quiet_progress("evaluate") as report:
        found = opened.n_best(
            pairs.source,
            overlong=overlong,
            scored=False,
            on_overlong=long.append,
            done=lambda share: report(share, f"{round(share * len(pairs)):,} of {len(pairs):,} lines"),
            **options,
        )
    hypotheses = [best[0].text for best in found]
    if out is not None:
        write_text(out, "".join(f"{one_line(line)}\n" for line in hypotheses))
    treated = {"overlong": {"lines": len(long), "treated_by": overlong}} if long else {}
    used = {**chosen(Options(), BEST), **{n: x for n, x in opened.generation.items() if n in BEST.split()}, **options}
    results = {"model": str(model), **used, **treated, **score(hypotheses, pairs.target, ter=True)}
    print(json.dumps(results, indent=2, ensure_ascii=False))


def _evaluate_text(model: Path, text: str, runtime: RuntimeSettings) -> None:
    from mlx_transformer.data.documents import read_documents
    from mlx_transformer.system.progress import quiet_progress

    documents, _ = read_documents(text)
    opened = open_folder(model, **vars(runtime))
    with quiet_progress("evaluate") as report:
        found = opened.perplexity(documents.texts, lambda share: report(share, ""))
    print(json.dumps({"model": str(model), **found}, indent=2, ensure_ascii=False))


def score(
    model: Folder,
    *,
    source: Annotated[Path, typer.Option(help="Source sentences, one a line.")],
    reference: Annotated[Path, typer.Option(help="Their translations, line by line.")],
    out: Out = None,
    json: Annotated[bool, typer.Option("--json", help="Write each pair as JSON, with its tokens.")] = False,
    overlong: Annotated[
        OverlongPair, typer.Option(help="A pair that is longer than the model takes ends the command, or stays empty.")
    ] = "error",
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Log-probabilities of given translations: a line each, the sum, a tab, and those of the tokens."""
    from mlx_transformer.generation.pairs import score_pairs

    if model.is_file():
        raise UserError(f"{model}: gives whole translations, not the probability of given ones; score needs a folder")
    scorer = open_model(model, **vars(runtime))
    score_pairs(scorer, scorer.translator.tokenizer, source, reference, out, json=json, overlong=overlong)


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL | SOURCE-TARGET=MODEL ...]",
            help="A folder that `export` wrote, one file with the search, or a checkpoint; several are named by their "
            "languages, en-de=DIR.",
            show_default=False,
        ),
    ] = None,
    *,
    web: Annotated[Path | None, typer.Option(help="In place of a model: a site that `web` wrote.")] = None,
    settings: ServeSettings,
) -> None:
    """Answer requests over HTTP, with dynamic batching; SIGTERM or Ctrl-C finish what runs, then end it."""
    from export.serve import serve_site

    if (not models) == (web is None):
        raise UserError("serve takes a model, or a site by --web: give one of them")
    if web is not None:
        serve_site(web, **vars(settings))
    elif models:
        serve_models(models, **vars(settings))
