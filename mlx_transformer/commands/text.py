"""Commands that run a model on text.

translate, evaluate, score, serve: for any translator. generate, chat: for decoder-only models. fill, embed, classify,
rerank, tag, answer: for encoder-only models.
"""

from __future__ import annotations

import json
import json as to_json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

from export.settings import ServeSettings
from mlx_transformer.core.folders import check_there
from mlx_transformer.decoding.options import Options
from mlx_transformer.generation.text_options import (
    AnswerOptions,
    ClassifyOptions,
    EmbedOptions,
    PairSettings,
    RerankOptions,
    TextSettings,
)
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import check_text, parse_json, read_json

from .models import facts_of, open_folder, open_model, run_on_lines
from .models import serve as serve_models
from .parameters import Argument, Option
from .settings import (
    ContinuingSettings,
    Embedding,
    Folder,
    LineFiles,
    Model,
    OverlongOption,
    Replace,
    RuntimeSettings,
    Shown,
    Texts,
    TranslatingSettings,
    chosen,
)


def classify(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    options: Annotated[ClassifyOptions, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Classify texts with an encoder: writes JSON for each line, which is a text or two texts with a tab between."""
    from mlx_transformer.generation.files import classify_lines

    run_on_lines("classify", model, text, files, runtime, lambda opened, out: classify_lines(opened, options))


def rerank(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    options: Annotated[RerankOptions, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Order documents by how well they fit a query, with an encoder that reads both.

    A line is a query and its documents, separated by tabs; in a .jsonl file it is {"query": ..., "documents": [...]}.
    Writes JSON for each line.
    """
    from mlx_transformer.generation.files import rerank_lines

    as_json = files.input is not None and files.input.suffix == ".jsonl"
    run_on_lines("rerank", model, text, files, runtime, lambda opened, out: rerank_lines(opened, options, as_json))


def tag(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Find names and other labelled parts of a text, with an encoder.

    Writes JSON for each line, with labels, probabilities and places.
    """
    from mlx_transformer.generation.files import tag_lines

    run_on_lines("tag", model, text, files, runtime, lambda opened, out: tag_lines(opened))


def answer(
    model: Folder,
    text: Texts = None,
    *,
    files: LineFiles,
    options: Annotated[AnswerOptions, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Find the part of a text that answers a question, with an encoder.

    A line is a question, a tab and the text. Writes JSON for each line.
    """
    from mlx_transformer.generation.files import answer_lines

    run_on_lines("answer", model, text, files, runtime, lambda opened, out: answer_lines(opened, options))


SAMPLING = "max_new_tokens sample temperature top_k top_p min_p seed"
SAMPLING += " repetition_penalty presence_penalty frequency_penalty no_repeat_ngram speculate"
COMPLETION = f"{SAMPLING} min_new_tokens beam"


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Extra output of `generate` for each new token."""

    log_probabilities: bool = False
    """Write JSON with the new tokens and their log-probabilities."""
    likeliest: int = 0
    """Number of likeliest tokens at each place, also written as JSON."""


def generate(
    model: Folder,
    prompt: Annotated[
        list[str] | None,
        Argument(help="Prompts, in quotes; without any, standard input is the prompt.", show_default=False),
    ] = None,
    *,
    stop: Annotated[list[str] | None, Option(help="End the text before this word; repeat it for several.")] = None,
    json: Annotated[bool, Option("--json", help="Write each prompt and its continuation as JSON.")] = False,
    control_tokens: Annotated[
        bool, Option("--control-tokens", help="A prompt's <|im_start|> and the like are control tokens, not text.")
    ] = False,
    scores: Annotated[TokenScores, Shown()],
    search: Annotated[Options, Shown("Search", COMPLETION)],
    runtime: Annotated[ContinuingSettings, Shown("Runtime")],
) -> None:
    """Continue a prompt with a decoder-only model; text is written while it is decoded."""
    _check_draft(search, runtime)
    options: dict[str, Any] = chosen(search, COMPLETION)  # before reading the model, so that mistakes show at once
    options |= {"control_tokens": True} if control_tokens else {}
    opened = open_model(model, **vars(runtime))
    prompts = prompt or [_standard_input("the prompt")]
    as_json = json or scores != TokenScores()
    if opened.has_steps and len(prompts) == 1 and search.beam == 1 and not as_json:
        cut: list[int] = []
        for piece in opened.stream(prompts[0], stop=stop or (), on_limit=cut.append, **options):
            print(piece, end="", flush=True)
        print()
        _tell_limit(cut, opened)
        return
    options |= {"scored": scores.log_probabilities, "likeliest": scores.likeliest}
    outputs = opened.completions(prompts, stop=stop or (), **options)
    for beginning, output in zip(prompts, outputs, strict=True):
        print(to_json.dumps({"prompt": beginning, **output}, ensure_ascii=False) if as_json else output["text"])
    if not as_json and (count := sum(output["finish_reason"] == "length" for output in outputs)):
        print(f"{count} of {len(outputs)} texts ended at their limit; --max-new-tokens raises it", file=sys.stderr)


def _tell_limit(cut: Sequence[int], opened: Any) -> None:
    if cut:
        most = f"within the model's {opened.config.max_positions:,} positions"
        print(f"ended at the limit of {cut[-1]:,} new tokens; --max-new-tokens raises it, {most}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Inputs of a chat template."""

    system: str | None = None
    """The system prompt, before all messages."""
    messages: Path | None = field(default=None, metadata={"check": check_text})
    """JSON file with the conversation so far: [{"role": "user", "content": "..."}, ...]; the last one is answered."""
    tools: Path | None = field(default=None, metadata={"check": check_text})
    """JSON file with a list of the functions that the model may call."""
    template: str | None = None
    """The template's name, if the model has several; unset: "tool_use" with --tools, else "default"."""
    date: str | None = None
    """The current date for templates, e.g. 2026-01-31; unset: today, so that answers change from day to day."""
    variables: str | None = None
    """Other variables of the template, as a JSON object, e.g. '{"enable_thinking": false}'."""

    def begun(self) -> list[Any]:
        """The conversation so far, with the system prompt. Raises `UserError` for a file without messages."""
        said = [] if self.messages is None else read_json(self.messages)
        if not isinstance(said, list) or (self.messages is not None and not said):
            raise UserError(f'{self.messages}: is not a list of messages: write [{{"role": "user", "content": "..."}}]')
        return ([{"role": "system", "content": self.system}] if self.system else []) + said

    def told(self) -> dict[str, Any]:
        """The fields of `ChatOptions`. Raises `UserError` for other JSON."""
        tools = None if self.tools is None else read_json(self.tools)
        values = (
            {} if self.variables is None else parse_json(self.variables, "--variables: not JSON", "write an object")
        )
        if not isinstance(values, dict) or not isinstance(tools, (list, type(None))):
            raise UserError("--variables must be a JSON object, and --tools a JSON file with a list")
        return {"tools": tools, "template": self.template, "date": self.date, "variables": values}


def chat(
    model: Folder,
    message: Annotated[
        list[str] | None,
        Argument(
            help="Messages to answer, each after the last's answer; without any, a conversation.", show_default=False
        ),
    ] = None,
    *,
    settings: Annotated[ChatSettings, Shown()],
    stop: Annotated[list[str] | None, Option(help="End an answer before this word; repeat it for several.")] = None,
    json: Annotated[
        bool, Option("--json", help="Write the whole conversation as JSON, as --messages reads it.")
    ] = False,
    search: Annotated[Options, Shown("Search", SAMPLING)],
    runtime: Annotated[ContinuingSettings, Shown("Runtime")],
) -> None:
    """Talk with a decoder by its chat template; answers are written while they are decoded.

    In a conversation an empty line ends it, and Ctrl-C the answer. Without a terminal, standard input is the message.
    """
    _check_draft(search, runtime)
    options = chosen(search, SAMPLING) | settings.told()  # before reading the model, so that mistakes show at once
    said = settings.begun()
    talks = not message and not settings.messages and sys.stdin is not None and sys.stdin.isatty()
    shown = sys.stderr if json and talks else None if json else sys.stdout
    asked: Iterator[str | None] = iter(message or ())
    if not message:  # None: the file's last message is answered
        asked = _typed(shown) if talks else iter([None if settings.messages else _standard_input("the message")])
    opened: Any = open_model(model, **vars(runtime))
    opened.check_chat()
    try:
        for text in asked:
            begun, answer = said + ([] if text is None else [{"role": "user", "content": text}]), ""
            cut: list[int] = []
            try:
                for piece in opened.stream_chat(begun, stop=stop or (), on_limit=cut.append, **options):
                    answer += piece
                    print(piece, end="", flush=True, file=shown) if shown else None
            except KeyboardInterrupt:  # ends the answer
                if not talks:
                    raise
            except UserError as error:  # e.g. a text that was pasted is too long: what was said before isn't lost
                if not talks:
                    raise
                print(f"{error}; nothing was answered", file=sys.stderr)
                continue
            print(file=shown) if shown else None
            _tell_limit(cut, opened)
            said = [*begun, {"role": "assistant", "content": answer}]
    finally:
        if json and (talks or sys.exception() is None):
            print(to_json.dumps(said, ensure_ascii=False))


def _check_draft(search: Options, runtime: ContinuingSettings) -> None:
    if runtime.draft is not None and not search.speculate:
        raise UserError("{draft} guesses tokens ahead: say how many, as {speculate}", draft=runtime.draft, speculate=4)


def _typed(shown: TextIO | None) -> Iterator[str]:
    """Yield what somebody types, up to an empty line or the end of the input; shown: where the prompt is written."""
    while True:
        print("> ", end="", flush=True, file=shown)
        try:
            text = input().strip()
        except EOFError:
            print(file=shown)
            return
        if not text:
            return
        yield text


def fill(
    model: Folder,
    text: Annotated[
        list[str] | None,
        Argument(help="Text with <mask> or [MASK] in it; each argument is a line.", show_default=False),
    ] = None,
    *,
    files: LineFiles,
    top_k: Annotated[int, Option(help="Number of guesses for each <mask>.")] = 5,
    json: Annotated[
        bool, Option("--json", help="Write the guesses as JSON, one line of text a line; --out always does.")
    ] = False,
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Guess masked words with an encoder: the likeliest tokens for each <mask>, with their probabilities."""
    from mlx_transformer.generation.files import fill_lines

    run_on_lines(
        "fill", model, text, files, runtime, lambda opened, out: fill_lines(opened, top_k, json or out is not None)
    )


@dataclass(frozen=True, kw_only=True)
class VectorFiles(LineFiles):
    """Files of `embed`."""

    out: Path | None = field(default=None, metadata={"option": ("--out", "-o")})
    """File to write: JSON lines, or an array (lines, width) if its name ends in .npy; it appears whole or not at all;
    unset: stdout."""


def embed(
    model: Embedding,
    text: Texts = None,
    *,
    files: VectorFiles,
    options: Annotated[EmbedOptions, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Turn text into vectors with an encoder: one line in, one vector out."""
    from mlx_transformer.generation.files import embed_lines

    make = lambda opened, out: embed_lines(opened, options, out)  # noqa: E731
    run_on_lines("embed", model, text, files, runtime, make, open_model)


def _standard_input(what: str) -> str:
    if sys.stdin is None:
        raise UserError(f"standard input is closed; give {what} as an argument")
    data = sys.stdin.buffer.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input, byte {error.start + 1}: not UTF-8; convert it, e.g. with iconv") from None


BEST = "beam length_penalty penalty_form max_new_tokens repetition_penalty no_repeat_ngram"
"""Search options that affect the best translation."""
SEARCH = f"{BEST} n_best min_new_tokens early_stopping sample temperature top_k top_p seed"


@dataclass(frozen=True, kw_only=True)
class OtherText:
    """Text to score encoder-only and decoder-only models on."""

    text: str | None = None
    """For a decoder, scored by perplexity: plain text, as train --text takes it."""
    pairs: Path | None = None
    """For an encoder's vectors, scored by retrieval: .tsv or .jsonl with texts and their matches, each to be found
    among all matches."""
    similarity: Path | None = None
    """For an encoder's vectors, scored by rank correlation: .tsv or .jsonl with pairs of texts and a number, e.g. 0 to
    5 by people."""
    labelled: Path | None = None
    """For an encoder with a head: labelled text, as train --labelled takes it."""


@dataclass(frozen=True)
class ParallelFiles:
    """Text to score a translator on."""

    source: Path | None = None
    """Source sentences, one a line."""
    reference: Path | None = None
    """Reference translations of the source, line by line."""


Out = Annotated[
    Path | None,
    Option("--out", "-o", help="File to write; it appears whole or not at all.", show_default="stdout"),
]


def translate(
    model: Model,
    text: Texts = None,
    *,
    input: Annotated[
        Path | None,
        Option("--input", "-i", help="Text file, one sentence a line.", show_default="stdin", check=check_text),
    ] = None,
    out: Out = None,
    settings: Annotated[TextSettings, Shown()],
    search: Annotated[Options, Shown("Search", SEARCH)],
    runtime: Annotated[TranslatingSettings, Shown("Runtime")],
) -> None:
    """Translate text: one line in, one line out."""
    from mlx_transformer.generation.files import translate_stream
    from mlx_transformer.generation.output import claim_lines

    def model_facts() -> dict[str, str]:
        listed = {} if runtime.shortlist is None else {"shortlist": str(runtime.shortlist)}
        return {**facts_of(model, runtime)(), **listed}

    output = claim_lines("translate", out, settings.force, model, input, listed_file(runtime.shortlist))
    opened, weights = open_model(model, **vars(runtime)), None
    if settings.alignment and not opened.shows_attention:
        if model.is_file():
            raise UserError(f"{model}: returns no attention; export it with --search --attention")
        from export.validate import opening

        shown = opening.open_model(model, None, runtime.threads, runtime.verify, runtime.precision)
        weights = opening.cross_weights(shown)
    options = chosen(search, SEARCH)
    translate_stream(
        opened, input, output, settings, text=text or (), cross_weights=weights, model_facts=model_facts, **options
    )


def evaluate(
    model: Model,
    *,
    files: Annotated[ParallelFiles, Shown("Text")],
    others: Annotated[OtherText, Shown("Text for decoders and encoders")],
    out: Annotated[
        Path | None,
        Option("--out", "-o", help="File for the translations, one a line.", show_default=False),
    ] = None,
    overlong: OverlongOption = "error",
    force: Replace = False,
    search: Annotated[Options, Shown("Search", BEST)],
    runtime: Annotated[TranslatingSettings, Shown("Runtime")],
) -> None:
    """Score a model on text with references, and print JSON.

    A translator is scored with sacreBLEU, chrF and TER (with their signatures) and exact match; a decoder by the
    perplexity of a text; an encoder by retrieval or correlation with its vectors, or by the accuracy of its labels.
    """
    source, reference = files.source, files.reference
    if unread := [name for name, value in vars(others).items() if value is not None]:
        if source is not None or reference is not None or out is not None:
            raise UserError(f"--{unread[0]} is for decoders and encoders: leave out --source, --reference and --out")
        if len(unread) > 1:
            raise UserError(f"--{unread[0]} and --{unread[1]}: give one of them")
        return _evaluate_alone(model, unread[0], str(getattr(others, unread[0])), runtime)
    if source is None or reference is None:
        missing = "--source" if source is None else "--reference"
        raise UserError(f"Missing option '{missing}' (or '--text', '--pairs', '--similarity' or '--labelled')")
    check_text(source)
    check_text(reference)
    from mlx_transformer.data.corpus import read_parallel
    from mlx_transformer.generation.evaluate import score
    from mlx_transformer.generation.files import one_line
    from mlx_transformer.generation.output import claim_lines
    from mlx_transformer.system.durable import write_text
    from mlx_transformer.system.progress import quiet_progress

    options = chosen(search, BEST)
    output = claim_lines("translate", out, force, model, source, reference, listed_file(runtime.shortlist))
    pairs = read_parallel(source, reference)
    long: list[int] = []
    opened = open_model(model, **vars(runtime))
    with quiet_progress("evaluate") as report:
        translations = opened.n_best(
            pairs.source,
            overlong=overlong,
            scored=False,
            on_overlong=long.append,
            done=lambda share: report(share, f"{round(share * len(pairs)):,} of {len(pairs):,} lines"),
            **options,
        )
    hypotheses = [best[0].text for best in translations]
    if output is not None:
        write_text(output, "".join(f"{one_line(line)}\n" for line in hypotheses))
    treated = {"overlong": {"lines": len(long), "treated_by": overlong}} if long else {}
    used = {**chosen(Options(), BEST), **{n: x for n, x in opened.generation.items() if n in BEST.split()}, **options}
    results = {"model": str(model), **used, **treated, **score(hypotheses, pairs.target, ter=True)}
    print(json.dumps(results, indent=2, ensure_ascii=False))


def listed_file(shortlist: Path | str | None) -> Path | None:
    """The file that --shortlist names, if any."""
    return None if shortlist is None else Path(shortlist)


def _evaluate_alone(model: Path, what: str, where: str, runtime: RuntimeSettings) -> None:
    from mlx_transformer.data.corpus import PairFiles
    from mlx_transformer.data.documents import read_documents
    from mlx_transformer.data.labelled import read_labelled
    from mlx_transformer.data.matches import read_matches
    from mlx_transformer.generation.evaluate import labels, retrieval, similarity
    from mlx_transformer.generation.line_files import LineReport
    from mlx_transformer.system.progress import quiet_progress

    text: Any = {
        "text": lambda: read_documents(where),
        "pairs": lambda: read_matches(PairFiles(pairs=where)),
    }.get(what, lambda: read_labelled(where))()[0]
    opened = open_folder(model, **vars(runtime))
    long: list[int] = []
    with quiet_progress("evaluate") as report:
        done = lambda share: report(share, "")  # noqa: E731
        if what == "text":
            scores = opened.perplexity(text.texts, done)
        elif what == "labelled":
            scores = labels(opened, text, LineReport(1, long.append, done))
        else:
            scores = {"pairs": retrieval, "similarity": similarity}[what](opened, text, done)
    cut = {"overlong": {"lines": len(long), "treated_by": "cut"}} if long else {}
    print(json.dumps({"model": str(model), **cut, **scores}, indent=2, ensure_ascii=False))


def score(
    model: Folder,
    *,
    source: Annotated[
        Path | None,
        Option(
            help="Source sentences, or a decoder's prompts, one a line; without it a decoder scores each text from the "
            "beginning.",
            check=check_text,
        ),
    ] = None,
    reference: Annotated[
        Path, Option(help="Translations of the source, or what follows the prompts, line by line.", check=check_text)
    ],
    out: Out = None,
    settings: Annotated[PairSettings, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Print log-probabilities of given translations, or with a decoder of texts or continuations.

    For each line: the sum, a tab, and the log-probability of each token.
    """
    from mlx_transformer.generation.files import score_lines
    from mlx_transformer.generation.line_files import write_lines
    from mlx_transformer.generation.output import claim_lines

    output = claim_lines("score", out, settings.force, model, source, reference)
    if model.is_file():
        raise UserError(
            f"{model}: a file with the search inside can't score translations; give a checkpoint or an ONNX folder"
        )
    scorer = open_model(model, **vars(runtime))
    files = reference if source is None else (source, reference)
    write_lines(score_lines(scorer, settings, paired=source is not None), files, output)


def _check_named(model: str) -> None:
    name, equals, path = model.partition("=")
    if not equals or Path(model).exists():
        check_there(model)
    elif name and path:
        check_there(path)


def serve(
    models: Annotated[
        list[str] | None,
        Argument(
            metavar="[MODEL | SOURCE-TARGET=MODEL ...]",
            help="A folder or file written by `export`, or a checkpoint; name several by their languages, e.g. "
            "en-de=FOLDER de-en=FOLDER.",
            show_default=False,
            check=_check_named,
        ),
    ] = None,
    *,
    web: Annotated[Path | None, Option(help="Site written by `web`, to serve in place of a model.")] = None,
    settings: ServeSettings,
) -> None:
    """Answer requests over HTTP, batching them together. SIGTERM or Ctrl-C stops it once running requests are
    answered."""
    from export.serve import serve_site

    if (not models) == (web is None):
        raise UserError("serve takes a model, or a site with --web: give one of the two")
    if web is not None:
        serve_site(web, **vars(settings))
    elif models:
        serve_models(models, **vars(settings))
