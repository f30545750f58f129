"""The command line: the one place, with quickstart.py, that joins the MLX side and the ONNX side.

Each command imports what it needs when it runs, so `--help` is instant and the ONNX commands work without MLX.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from .spec.errors import UserError

app = typer.Typer(
    name="mlx-transformer",
    help="Train a Transformer with MLX, deploy it as ONNX, and prove that both compute the same function.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Backend(Enum):
    mlx = "mlx"
    onnx = "onnx"


class PenaltyForm(Enum):
    gnmt = "gnmt"
    length = "length"


class Overlong(Enum):
    error = "error"
    truncate = "truncate"
    split = "split"


Model = Annotated[Path, typer.Argument(help="A checkpoint folder (or a run's folder), or an ONNX folder.")]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint folder, or the folder of a training run.")]
Onnx = Annotated[Path, typer.Argument(help="A folder written by `export`.")]
Beam = Annotated[int, typer.Option(help="Hypotheses kept a sentence; 1 is greedy.")]
LengthPenalty = Annotated[float, typer.Option(help="Alpha of the length penalty; 0 compares bare probabilities.")]
FormOfPenalty = Annotated[
    PenaltyForm, typer.Option(help="Of n tokens: ((5+n)/6)^alpha (gnmt) or n^alpha (length), as in transformers.")
]
MinNew = Annotated[int, typer.Option(help="Fewest new tokens a sentence, its end token counted.")]
MaxNew = Annotated[int | None, typer.Option(help="Most new tokens a sentence.", show_default="source length + 50")]
EarlyStopping = Annotated[
    bool, typer.Option("--early-stopping", help="Stop a sentence once BEAM hypotheses are finished.")
]
OverlongOption = Annotated[Overlong, typer.Option(help="What to do with a line longer than the model takes.")]
BackendOption = Annotated[Backend | None, typer.Option(help="Runtime.", show_default="what MODEL is made for")]


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for everything it makes.")] = Path("quickstart"),
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 3.5,
    seed: Annotated[int, typer.Option(help="Seed of corpus, weights and dropout.")] = 1,
) -> None:
    """The whole path in minutes: corpus, training, score, ONNX, proof, translations from both runtimes."""
    from .quickstart import run

    raise typer.Exit(run(out, minutes, seed))


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="The run's folder; the trained model is OUT/model.")],
    recipe: Annotated[str | None, typer.Argument(help="A TOML recipe or the name of a built-in one.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Built-in corpus, e.g. cldr:en-de.")] = None,
    source: Annotated[str | None, typer.Option(help="Source sentences, one a line.")] = None,
    target: Annotated[str | None, typer.Option(help="Their translations, line by line.")] = None,
    valid_source: Annotated[str | None, typer.Option(help="Source sentences for validation.")] = None,
    valid_target: Annotated[str | None, typer.Option(help="Their translations.")] = None,
    preset: Annotated[str | None, typer.Option(help="Size: tiny, small, base or big.", show_default="small")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of the joint vocabulary.", show_default="8000")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Target tokens a batch.", show_default="2000")] = None,
    steps: Annotated[int | None, typer.Option(help="Train for so many steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Train for so many passes over the data.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for so many minutes.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order, weights and dropout.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")] = False,
) -> None:
    """Train an encoder-decoder on parallel text or on the built-in corpus."""
    from .training.recipe import load_recipe
    from .training.trainer import Trainer

    if corpus is not None and (source is not None or target is not None):
        raise UserError("--corpus and --source/--target exclude each other")
    files = {"source": source, "target": target, "valid_source": valid_source, "valid_target": valid_target}
    data = {"corpus": corpus, "vocab_size": vocab_size, "batch_tokens": batch_tokens, **files}
    training = {"steps": steps, "epochs": epochs, "minutes": minutes, "seed": seed}
    chosen = load_recipe(recipe, {"data": data, "model": {"preset": preset}, "training": training})
    result = Trainer(chosen, out, resume).run()
    state = result.state
    print(f"{result.model}: {result.parameters:,} parameters, {state.step} steps, {state.seconds:.0f} s")
    if result.interrupted is not None:
        print("interrupted; continue with --resume", file=sys.stderr)
        raise typer.Exit(128 + result.interrupted)


@app.command()
def translate(
    model: Model,
    input: Annotated[
        Path | None, typer.Option("--input", help="Text, one sentence a line.", show_default="stdin")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Where to write.", show_default="stdout")] = None,
    beam: Beam = 1,
    length_penalty: LengthPenalty = 0.6,
    penalty_form: FormOfPenalty = PenaltyForm.gnmt,
    n_best: Annotated[int, typer.Option(help="Translations a sentence, tab-separated on its line, best first.")] = 1,
    min_new_tokens: MinNew = 0,
    max_new_tokens: MaxNew = None,
    early_stopping: EarlyStopping = False,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random instead of taking the best.")] = False,
    temperature: Annotated[float, typer.Option(help="Of sampling; below 1 is safer.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    overlong: OverlongOption = Overlong.error,
    stream: Annotated[bool, typer.Option("--stream", help="Write text as it is decided, line by line.")] = False,
    backend: BackendOption = None,
) -> None:
    """Translate text: one line in, one line out."""
    from .generation.options import Options
    from .generation.translate import translate_stream

    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "n_best": n_best}
    options |= {"early_stopping": early_stopping, "penalty_form": penalty_form.value}
    options |= {"min_new_tokens": min_new_tokens, "max_new_tokens": max_new_tokens, "seed": seed}
    options |= {"sample": sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    Options(**options)  # before the model is read
    translator = _translator(model, backend)
    translate_stream(translator, input, output, overlong=overlong.value, stream=stream, **options)


@app.command()
def serve(
    model: Onnx,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Most sentences computed together.")] = 32,
    max_wait_ms: Annotated[float, typer.Option(help="Longest wait of a sentence for others when nothing runs.")] = 5.0,
    max_queue: Annotated[int, typer.Option(help="Most sentences waiting; beyond them requests get 503.")] = 1024,
    threads: Annotated[
        int | None, typer.Option(help="Threads of one operator.", show_default="one for each core")
    ] = None,
    workers: Annotated[int, typer.Option(help="Batches computed at the same time.")] = 1,
    precision: Annotated[
        str | None, typer.Option(help="Weights to use, one of the folder's.", show_default="float32, or the only one")
    ] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
) -> None:
    """Answer translation requests over HTTP, with dynamic batching; SIGTERM or Ctrl-C finish what runs, then end it."""
    from export.serve import serve as run

    run(model, host, port, max_batch, max_wait_ms, max_queue, threads, workers, precision, access_log)


@app.command()
def evaluate(
    model: Model,
    source: Annotated[Path, typer.Option(help="Source sentences, one a line.")],
    reference: Annotated[Path, typer.Option(help="Their translations, line by line.")],
    beam: Beam = 1,
    length_penalty: LengthPenalty = 0.6,
    penalty_form: FormOfPenalty = PenaltyForm.gnmt,
    max_new_tokens: MaxNew = None,
    overlong: OverlongOption = Overlong.error,
    backend: BackendOption = None,
) -> None:
    """Score translations: JSON with sacreBLEU (and its signature), chrF and exact match."""
    from .data.corpus import read_parallel
    from .generation.options import Options
    from .scoring import score

    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "max_new_tokens": max_new_tokens}
    options |= {"penalty_form": penalty_form.value}
    Options(**options)  # before the files and the model are read
    text = read_parallel(source, reference)
    hypotheses = _translator(model, backend).translate(text.source, overlong=overlong.value, **options)
    print(json.dumps({"model": str(model), **options, **score(hypotheses, text.target)}, indent=2, ensure_ascii=False))


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="Folder to write; consumers load it as it is. With --search a file.")],
    target: Annotated[
        str, typer.Option(help="What the graphs are made for: portable (any runtime), cpu, web, cuda, coreml.")
    ] = "portable",
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="float32, float16, bfloat16, int8, int8-weights, int4, packed; several: give the option several times."
        ),
    ] = None,
    fixed_shape: Annotated[
        str | None, typer.Option(help="Of target coreml: ROWSxSOURCExTARGET, such as 1x64x64.")
    ] = None,
    gate_source: Annotated[Path | None, typer.Option(help="Sentences on which lower precisions are judged.")] = None,
    gate_reference: Annotated[Path | None, typer.Option(help="Their translations, line by line.")] = None,
    force: Annotated[bool, typer.Option(help="Write a precision that translates worse than it may.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Write one file, OUT.onnx, that holds the search too: ids in, n best out.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="As --search, with the tokenizer inside: strings in, strings out.")
    ] = False,
) -> None:
    """Write a checkpoint as ONNX models for ONNX Runtime, Optimum and transformers.js."""
    from export import export_onnx, export_search
    from export.quality import recorded

    gate: dict[str, Any] = {"gate_source": gate_source, "gate_reference": gate_reference, "force": force}
    if search or text:
        if fixed_shape is not None or len(precision or []) > 1:
            raise UserError("--search and --text write one file: of one precision, and of no fixed shape")
        export_search(checkpoint, out, target=target, precision=(precision or ["float32"])[0], text=text, **gate)
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
        return
    export_onnx(checkpoint, out, target=target, precision=precision or "float32", fixed_shape=fixed_shape, **gate)
    for quality in recorded(out):
        print(quality)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    print(f"{out}: {len(files)} files, {size / 1e6:.1f} MB")


def _explain(wanted: bool) -> None:
    if wanted:
        from export.validate import explain

        print(explain())
        raise typer.Exit()


@app.command()
def validate(
    checkpoint: Checkpoint,
    onnx: Onnx,
    runtimes: Annotated[
        str | None,
        typer.Option(
            help="Runtimes to judge, separated by commas; one that isn't there is exit 3. See --explain.",
            show_default="mlx,onnxruntime",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs.", show_default="fresh")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of one ONNX Runtime operator.", show_default="one for each core")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Check MLX's gradients against finite differences too.")
    ] = False,
    names: Annotated[
        str | None,
        typer.Option(
            help="Inputs and outputs of somebody else's ONNX files: input_ids=NAME,logits=NAME.",
            show_default="Hugging Face's",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report to this file as a page.")] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", callback=_explain, is_eager=True, help="Print the rule and the runtimes, and end."),
    ] = False,
) -> None:
    """Prove that MLX, ONNX Runtime and a float64 reference compute the same function.

    Exit status: 0 equal, 1 mismatch, 2 bad input, 3 a requested runtime is not available.
    """
    from export.validate import runtime_names, validate_command

    raise typer.Exit(
        validate_command(
            checkpoint,
            onnx,
            json_file,
            runtime_names(runtimes),
            seed,
            threads,
            html=html_file,
            gradients=gradients,
            names=names,
        )
    )


@app.command("import")
def import_command(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face Marian folder: config.json and model.safetensors.")],
    out: Annotated[Path, typer.Argument(help="The checkpoint folder to write.")],
) -> None:
    """Make a checkpoint of a model that `transformers` has saved."""
    from .convert import import_huggingface

    notes = import_huggingface(folder, out)
    print("; ".join([f"{out}: imported", *notes]))


@app.command("to-huggingface")
def to_huggingface_command(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="Folder to write, new or empty.")],
) -> None:
    """Write a checkpoint as a Marian model for `transformers`, and so for PyTorch, Optimum and CTranslate2."""
    from .convert import to_huggingface

    print(f"{to_huggingface(checkpoint, out)}: written; pad its inputs on the right")


@app.command()
def quantize(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="The quantised checkpoint's folder.")],
    bits: Annotated[int, typer.Option(help="Of one weight: 2, 3, 4, 5, 6 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale and a bias: 32, 64 or 128.")] = 64,
) -> None:
    """Store a checkpoint's matrices as small integers, as MLX does; every other command takes the result."""
    from .nn.quantize import quantize_checkpoint
    from .spec.quantization import Scheme

    print(f"{out}: {quantize_checkpoint(checkpoint, out, Scheme(group_size, bits))}")


@app.command()
def info(path: Annotated[Path, typer.Argument(help="A checkpoint, a run's folder or an ONNX folder.")]) -> None:
    """Describe a folder: what it is, its config, sizes and parameters."""
    from export.inspect import graph_facts

    from .info import describe

    console = Console(highlight=False)
    with console.capture() as text:  # rich would end the process by itself when nobody reads
        console.print(describe(path, graph_facts))
    print(text.get(), end="")


def _translator(model: Path, backend: Backend | None) -> Any:
    """Something with `.translate(lines, **options)` for a checkpoint (MLX) or an ONNX folder (ONNX Runtime)."""
    from .spec.folders import is_onnx_folder

    onnx = is_onnx_folder(model)
    if backend is Backend.onnx and not onnx:
        raise UserError(f"{model}: not an ONNX folder; write one with: mlx-transformer export {model} OUT")
    if backend is Backend.mlx and onnx:
        raise UserError(f"{model}: an ONNX folder runs with --backend onnx; MLX needs the checkpoint folder")
    if onnx:
        from export import OnnxTransformer

        return OnnxTransformer(model)
    from .generation.with_mlx import MlxTranslator
    from .nn.loading import load

    return MlxTranslator(*load(model))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: every error a person can cause is one line on standard error and exit 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        with command.make_context("mlx-transformer", given or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        raise SystemExit(done.exit_code) from None
    except _USAGE_ERROR as error:
        path = error.ctx.command_path if error.ctx is not None else "mlx-transformer"
        _fail(f"{' '.join(error.format_message().split())} (see {path} --help)")
    except UserError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:  # who reads our output has gone; Python must not try to write the rest of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except MemoryError as error:
        _fail(f"out of memory ({error}); try smaller batches or a smaller model", 1)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mlx":
            raise
        _fail("MLX is not installed; ONNX folders work without it (python -m export)")


# Wrong options and arguments; typer exports only the classes below this one.
_USAGE_ERROR: Any = typer.BadParameter.__base__


def _fail(message: str, status: int = 2) -> NoReturn:
    print("mlx-transformer:", " ".join(message.splitlines()), file=sys.stderr)
    raise SystemExit(status) from None
