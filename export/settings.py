"""The settings of each command: names, types, bounds, defaults and help, for the command line and for Python.

The string under a field is its help; the words after "unset:" say what None means
(`mlx_transformer/commands/settings.py`). Imports almost nothing, so that help needs no ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from mlx_transformer.system.errors import UserError, joined
from mlx_transformer.system.fields import ADVANCED, Bounds, check_fields
from mlx_transformer.system.files import read_text

TargetName = Literal["portable", "cpu", "web", "cuda"]
"""The rows of `targets/table.py`."""
PrecisionName = Literal["float32", "float16", "bfloat16", "int8", "int8-weights", "int4", "packed"]
ActivationsName = Literal["int8", "float32"]
ScalesName = Literal["fixed", "token"]

OUT = ("--out", "-o")

Count = Annotated[int, Bounds(at_least=1)]
Seconds = Annotated[float, Bounds(at_least=0.01, at_most=3600)]


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of an export. `package/plan.py` checks them against the checkpoint."""

    target: TargetName = "portable"
    """Where the graphs will run: any ONNX runtime (portable), ONNX Runtime on a CPU (cpu), a browser (web) or an NVIDIA
    GPU (cuda)."""
    precision: Sequence[PrecisionName] | PrecisionName = ("float32",)
    """Precision of the weights; repeat the option to write several side by side into one folder."""
    activations: ActivationsName | None = field(default=None, metadata=ADVANCED)
    """Type of the activations in products with int8-weights, int4 and packed weights; unset: int8."""
    int8_scales: ScalesName | None = field(default=None, metadata=ADVANCED)
    """Scales of int8's activations: fixed (computed from a text), or one per token; unset: fixed if that loses
    nothing."""
    calibrate: Path | str | None = field(default=None, metadata=ADVANCED)
    """Text to compute int8's fixed scales from, one sentence a line; unset: the model's int8_scales.json, or its run's
    validation text."""
    float32_layers: Sequence[str] = field(default=(), metadata=ADVANCED)
    """Layer of an encoder that int8 keeps in float32, e.g. embedding, encoder.layers.0 or
    encoder.layers.0.feed_forward; repeat it for several."""
    least_neighbours: float | None = field(default=None, metadata=ADVANCED)
    """Share of each text's ten nearest neighbours, among the gate's sentences, that int8 must keep, e.g. 0.99; as few
    matrices as necessary stay in float32 for it; unset: none."""
    attention: bool = False
    """Also return cross-attention: how much each output token attends to each source token."""
    attention_layer: int | None = field(default=None, metadata=ADVANCED)
    """Decoder layer to return the attention of, from 0; unset: the layer that aligns best."""
    inputs_embeds: bool = field(default=False, metadata=ADVANCED)
    """The encoder takes vectors (inputs_embeds) instead of input_ids."""
    dimensions: int | None = field(default=None, metadata=ADVANCED)
    """Keep only this many first numbers of a text's vector, scaled to length 1 again if the model does so; for encoders
    trained for it (Matryoshka); unset: all."""
    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """Shortlist in Marian's format for later searches: restricts a translation to likely target tokens of its source
    tokens; none: all tokens; unset: as the model's settings say."""
    gate_source: Path | str | None = None
    """The quality gate's sentences, one a line: lower precisions are compared with float32 on them."""
    gate_reference: Path | str | None = None
    """Reference translations of the gate's sentences, line by line."""
    accept_loss: bool = field(default=False, metadata=ADVANCED)
    """Write the model even if the quality gate finds that it translates worse."""
    force: bool = False
    """Replace another model in OUT."""


@dataclass(frozen=True, kw_only=True)
class ExplainSettings:
    """Settings of an `explain` page. Raises `UserError` for a value out of bounds."""

    translation: str | None = None
    """Translation to look at; unset: the model's own."""
    source_language: str | None = None
    """Language of the text, for a multilingual model: its code in the model, e.g. eng_Latn."""
    target_language: str | None = None
    """Language to translate into, for a multilingual model, e.g. deu_Latn."""
    task_prefix: str | None = None
    """Text to put before the sentence, e.g. T5's 'translate English to German: '."""
    out: Path = field(default=Path("explain.html"), metadata={"option": OUT})
    """HTML page to write."""
    figures: Path | None = None
    """Folder for the figures as PNG and SVG files; unset: none."""
    beside: str | None = field(default=None, metadata={"option": ("--with",)})
    """Second model folder to show side by side, or MODEL itself for another runtime."""
    runtime: str | None = None
    """Runtime for MODEL, by its name in validate --runtimes; unset: MLX or ONNX Runtime."""
    precision: PrecisionName | None = None
    """Precision to open, if MODEL is an ONNX folder with several; unset: float32, or the only precision."""
    top_k: Annotated[int, Bounds(at_least=1, at_most=50)] = 5
    """Number of likeliest tokens to show at each step."""
    threads: int | None = field(default=None, metadata=ADVANCED)
    """Threads of ONNX Runtime for one operator; unset: one for each core."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Check the model's files against the SHA-256 digests in their manifest."""
    force: bool = False
    """Replace an earlier page, and earlier figures."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """Settings of a site."""

    title: str | None = None
    """Heading of the page; unset: the first model's name."""
    assets: Path | str | None = None
    """Place of onnxruntime-web (for a chat also of @huggingface/transformers): a node_modules folder or a .tgz; unset:
    node_modules here, else npm fetches the pinned version."""
    force: bool = False
    """Replace another site in OUT."""
    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """Shortlist in Marian's format: restricts a translation to likely target tokens of its source tokens; none: all
    tokens; unset: as the models' settings say."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Check the models' files against the SHA-256 digests in their manifests."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of a server. Raises `UserError` for a value out of bounds."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all of the machine's."""
    port: Annotated[int, Bounds(at_least=0, at_most=65535)] = 8000
    """Port to listen on; 0 takes any free port."""
    max_batch: Annotated[int, Bounds(at_least=1, at_most=4096)] = 32
    """Most sentences of a batch."""
    max_wait_ms: Annotated[float, Bounds(at_least=0, at_most=60_000)] = field(default=5.0, metadata=ADVANCED)
    """Milliseconds for which a sentence waits for others to join its batch while nothing runs."""
    max_queue: Annotated[int, Bounds(at_least=1, at_most=1_000_000)] = 1024
    """Most sentences waiting, at most three quarters of them from one client; further requests get 503."""
    max_sentences: Annotated[int, Bounds(at_least=1, at_most=1_000_000)] = field(default=512, metadata=ADVANCED)
    """Most sentences in a request; longer requests get 413."""
    max_connections: Annotated[int, Bounds(at_least=8, at_most=1_000_000)] = field(default=4096, metadata=ADVANCED)
    """Most open connections; beyond it, those that have been idle or sending for the longest time are closed."""
    threads: Count | None = None
    """Threads of ONNX Runtime for one operator; unset: one for each core."""
    workers: Annotated[int, Bounds(at_least=1, at_most=256)] = 1
    """Batches computed at the same time; each uses --threads threads."""
    prefix_megabytes: Annotated[int, Bounds(at_least=0, at_most=2**30)] = field(default=256, metadata=ADVANCED)
    """Memory for the caches of a decoder's finished texts: a prompt with the same beginning, e.g. the next turn of a
    chat, computes only its other tokens; 0: none."""
    precision: PrecisionName | None = None
    """Precision to open, if MODEL is an ONNX folder with several; unset: float32, or the only precision."""
    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """Shortlist in Marian's format: restricts a translation to likely target tokens of its source tokens; none: all
    tokens; unset: as each model's settings say."""
    date: str | None = None
    """The current date for chat templates, e.g. 2026-01-31, so that prompts stay the same; unset: today."""
    access_log: bool = False
    """Log every request."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Check the models' files against the SHA-256 digests in their manifests."""
    cors: Sequence[str] = ()
    """Origin whose pages may read the answers, e.g. https://example.org, or * for all; repeat it for several."""
    api_key_file: Path | str | None = None
    """File with API keys, one a line; requests must then send a key, except to /health, /docs etc."""
    header_seconds: Seconds = field(default=10.0, metadata=ADVANCED)
    """Seconds a client has to send a request's head."""
    body_seconds: Seconds = field(default=30.0, metadata=ADVANCED)
    """Seconds a client has to send a request's body."""
    idle_seconds: Seconds = field(default=60.0, metadata=ADVANCED)
    """Seconds a connection may stay open between requests."""
    grace_seconds: Annotated[float, Bounds(at_least=0, at_most=3600)] = field(default=30.0, metadata=ADVANCED)
    """Seconds running requests have to finish when the server is stopped."""

    def __post_init__(self) -> None:
        _check(self)
        if isinstance(self.cors, str) or not all(isinstance(origin, str) for origin in self.cors):
            raise UserError("{cors!r} must be a list of origins", cors=self.cors)
        try:
            datetime.fromisoformat(self.date or "2026-01-31")
        except (TypeError, ValueError):
            raise UserError("{date!r} is no date: write it as in 2026-01-31", date=self.date) from None
        for origin in self.cors:
            if origin != "*" and not _is_origin(origin):
                raise UserError(
                    "{cors!r} is no origin: give scheme and host, as https://example.org, or *", cors=origin
                )

    def api_keys(self) -> list[str]:
        """Read the keys of `api_key_file`, without empty lines and lines that begin with #; [] without a file.

        Raises `UserError` if the file holds no key, or a key with other characters than printable ASCII.
        """
        if self.api_key_file is None:
            return []
        lines = [line.strip() for line in read_text(self.api_key_file).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        for number, line in enumerate(lines, 1):
            if line in keys and not (line.isascii() and line.isprintable() and " " not in line):
                raise UserError(f"{self.api_key_file}, line {number}: a key must be ASCII characters without spaces")
        if not keys:
            raise UserError(f"{self.api_key_file}: has no key; add a line with the output of: openssl rand -hex 32")
        return keys


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return port_is_fine and bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """How `validate` and `validate.compare` judge runtimes."""

    threads: int | None = field(default=None, metadata=ADVANCED)
    """Threads of ONNX Runtime for one operator; unset: one for each core."""
    gradients: bool = field(default=False, metadata=ADVANCED)
    """Also check MLX's gradients against finite differences."""
    names: str | Mapping[str, str] | None = field(default=None, metadata=ADVANCED)
    """Names of inputs and outputs in ONNX files by another exporter, e.g. input_ids=NAME,logits=NAME; unset: Hugging
    Face's."""
    against: Literal["transformers", "mlx-lm", "marian"] | None = None
    """Also compare with the imported network itself, in float64: transformers or mlx-lm runs it, marian reads its file
    again."""
    original: Path | str | None = field(default=None, metadata=ADVANCED)
    """The imported file or folder, for --against; unset: the place in the checkpoint's record, if it is unchanged."""
    thorough: bool = field(default=False, metadata=ADVANCED)
    """Judge a large model on as many rows, sentences and tokens as a small model, which takes long."""
    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """Shortlist in Marian's format; searches are also compared among its candidates; none: among half of all tokens, as
    without a shortlist; unset: as the model's settings say."""


@dataclass(frozen=True, kw_only=True)
class ValidateSettings(JudgeSettings):
    """Settings of `validate`: runtimes, inputs and reports."""

    runtimes: str | Sequence[str] | None = None
    """Runtimes to judge, separated by commas (--explain lists them); a missing runtime ends with exit status 3; unset:
    mlx,onnxruntime."""
    seed: int | None = None
    """Seed of the random inputs, to repeat a run; unset: a new seed."""
    json: Path | str | None = None
    """JSON file to write the report to."""
    html: Path | str | None = None
    """HTML page to write the report to."""
    force: bool = False
    """Replace an earlier report."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Check the model's files against the SHA-256 digests in their manifest."""


def _check(settings: object) -> None:
    if problems := check_fields(settings):
        raise UserError(joined(problems))
