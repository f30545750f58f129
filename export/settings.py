"""The settings of what this side does, by command: their names, types, bounds and defaults, and what each means.

One definition for the command line and for Python. The string under a field is its help, and what follows "unset:" says
what None stands for (`mlx_transformer/commands/settings.py`). Imports next to nothing: help needs no ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """The settings of an export. `package/plan.py` checks it, with the checkpoint."""

    target: TargetName = "portable"
    """The device or runtime that the graphs are made for."""
    precision: Sequence[PrecisionName] | PrecisionName = ("float32",)
    """Precision of the weights; for several, side by side in the folder, give it again."""
    activations: ActivationsName | None = field(default=None, metadata=ADVANCED)
    """The type that the weights of int8-weights, int4 and packed are multiplied with; unset: int8."""
    int8_scales: ScalesName | None = field(default=None, metadata=ADVANCED)
    """Scales of int8's activations: fixed ones, or one a token; unset: fixed ones where they lose nothing."""
    calibrate: Path | str | None = field(default=None, metadata=ADVANCED)
    """Text to take int8's fixed scales from; unset: the model's int8_scales.json, or its run's validation text."""
    float32_layers: Sequence[str] = field(default=(), metadata=ADVANCED)
    """Layer of an encoder that int8 leaves in float32: embedding, encoder.layers.0, encoder.layers.0.feed_forward; for
    several give it again."""
    least_neighbours: float | None = field(default=None, metadata=ADVANCED)
    """Share of each text's ten nearest neighbours on gate_source, such as 0.99, for which int8 leaves matrices of an
    encoder in float32, as few as it takes; unset: none."""
    attention: bool = False
    """Return from which source tokens each token was written, too."""
    attention_layer: int | None = field(default=None, metadata=ADVANCED)
    """The decoder layer whose attention that is, from 0; unset: the one that aligns best."""
    inputs_embeds: bool = field(default=False, metadata=ADVANCED)
    """The encoder reads vectors, inputs_embeds, in place of input_ids."""
    dimensions: int | None = field(default=None, metadata=ADVANCED)
    """Numbers of a text's vector, the first ones, at length 1 again where vectors are, for encoders that were trained
    to be cut (Matryoshka); unset: all."""
    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """File of Marian's that names which tokens each source token may become, for searches to come; none: all; unset:
    what the model's settings name."""
    gate_source: Path | str | None = None
    """Sentences on which lower precisions are judged."""
    gate_reference: Path | str | None = None
    """Their translations, line by line."""
    accept_loss: bool = field(default=False, metadata=ADVANCED)
    """Write it even if the quality gate says that it translates worse."""
    force: bool = False
    """Replace another model that OUT holds."""


@dataclass(frozen=True, kw_only=True)
class ExplainSettings:
    """The settings of a page: the model and sentence, and where it goes. `UserError` for a value out of bounds."""

    translation: str | None = None
    """A translation to look at; unset: the model's own."""
    source_language: str | None = None
    """The text's language, by its code in a model of several: eng_Latn."""
    target_language: str | None = None
    """The language that it is translated into, likewise."""
    task_prefix: str | None = None
    """Text before the sentence, as T5 wants it: 'translate English to German: '."""
    out: Path = field(default=Path("explain.html"), metadata={"option": OUT})
    """The HTML page to write."""
    figures: Path | None = None
    """Folder for the same figures as PNG and SVG; unset: none."""
    beside: str | None = field(default=None, metadata={"option": ("--with",)})
    """Another folder to show beside it, or the same one in another runtime."""
    runtime: str | None = None
    """The runtime that runs MODEL, as in validate --runtimes; unset: MLX or ONNX Runtime."""
    precision: PrecisionName | None = None
    """Which of an ONNX folder's precisions; unset: float32, or the only one."""
    top_k: Annotated[int, Bounds(at_least=1, at_most=50)] = 5
    """Tokens shown at each step, the likeliest ones."""
    threads: int | None = field(default=None, metadata=ADVANCED)
    """Threads of one ONNX Runtime operator; unset: one for each core."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Compare the files with the digests in their manifest."""
    force: bool = False
    """Replace an earlier page, and earlier figures."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """How a site is made."""

    title: str | None = None
    """Heading of the page; unset: the first model's name."""
    assets: Path | str | None = None
    """A node_modules with onnxruntime-web, or its .tgz; unset: this folder's, else the pinned version by npm."""
    force: bool = False
    """Replace another site that OUT holds."""
    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """File of Marian's that names which tokens each source token may become, others aren't written; none: all may be;
    unset: what the models' settings name."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Compare the models with the digests in their manifests."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a model is served. `UserError` for a value out of bounds."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one."""
    port: Annotated[int, Bounds(at_least=0, at_most=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    max_batch: Annotated[int, Bounds(at_least=1, at_most=4096)] = 32
    """Most sentences computed together."""
    max_wait_ms: Annotated[float, Bounds(at_least=0, at_most=60_000)] = field(default=5.0, metadata=ADVANCED)
    """Longest wait of a sentence for others when nothing runs."""
    max_queue: Annotated[int, Bounds(at_least=1, at_most=1_000_000)] = 1024
    """Most sentences waiting, three quarters of them of one client; beyond them requests get 503."""
    max_sentences: Annotated[int, Bounds(at_least=1, at_most=1_000_000)] = field(default=512, metadata=ADVANCED)
    """Most sentences of one request; beyond them it gets 413."""
    max_connections: Annotated[int, Bounds(at_least=8, at_most=1_000_000)] = field(default=4096, metadata=ADVANCED)
    """Most open connections; for a new one those are closed that have been idle or sending for longest."""
    threads: Count | None = None
    """Threads of one ONNX Runtime operator; unset: one for each core."""
    workers: Annotated[int, Bounds(at_least=1, at_most=256)] = 1
    """Batches computed at the same time, each with so many threads."""
    precision: PrecisionName | None = None
    """Which of an ONNX folder's precisions; unset: float32, or the only one."""
    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """File of Marian's that names which tokens each source token may become, others aren't written; none: all may be;
    unset: what each model's settings name."""
    access_log: bool = False
    """Log every request."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Compare the files with the digests in their manifest."""
    cors: Sequence[str] = ()
    """Origin whose pages may read the answers, such as https://example.org, or * for all; for several give it again."""
    api_key_file: Path | str | None = None
    """Keys, one a line, of which requests must then bring one; not those for /health, /docs and the like."""
    header_seconds: Seconds = field(default=10.0, metadata=ADVANCED)
    """Time that a client has to send the head of a request."""
    body_seconds: Seconds = field(default=30.0, metadata=ADVANCED)
    """Time that a client has to send the body of a request."""
    idle_seconds: Seconds = field(default=60.0, metadata=ADVANCED)
    """How long a connection may stay open between requests."""
    grace_seconds: Annotated[float, Bounds(at_least=0, at_most=3600)] = field(default=30.0, metadata=ADVANCED)
    """How long running requests may take when the server ends."""

    def __post_init__(self) -> None:
        _check(self)
        if isinstance(self.cors, str) or not all(isinstance(origin, str) for origin in self.cors):
            raise UserError("{cors!r} must be a list of origins", cors=self.cors)
        for origin in self.cors:
            if origin != "*" and not _is_origin(origin):
                raise UserError(
                    "{cors!r} is no origin: give scheme and host, as https://example.org, or *", cors=origin
                )

    def api_keys(self) -> list[str]:
        """Return the keys of `api_key_file`; empty lines and those that begin with # are none. `UserError` without
        any."""
        if self.api_key_file is None:
            return []
        lines = [line.strip() for line in read_text(self.api_key_file).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        for number, line in enumerate(lines, 1):
            if line in keys and not (line.isascii() and line.isprintable() and " " not in line):
                raise UserError(f"{self.api_key_file}, line {number}: a key is of ASCII characters without spaces")
        if not keys:
            raise UserError(f"{self.api_key_file}: holds no key; write one on a line: openssl rand -hex 32")
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
    """How runtimes are judged, from Python (`validate.compare`) as on the command line."""

    threads: int | None = field(default=None, metadata=ADVANCED)
    """Threads of one ONNX Runtime operator; unset: one for each core."""
    gradients: bool = field(default=False, metadata=ADVANCED)
    """Check MLX's gradients against finite differences too."""
    names: str | Mapping[str, str] | None = field(default=None, metadata=ADVANCED)
    """Inputs and outputs of somebody else's ONNX files: input_ids=NAME,logits=NAME; unset: Hugging Face's."""
    against: Literal["transformers", "marian"] | None = None
    """Compare with the imported network itself too, in float64: transformers runs it, marian reads its file anew."""
    original: Path | str | None = field(default=None, metadata=ADVANCED)
    """The file or folder that was imported, for --against; unset: what the checkpoint says, if it is as it was."""
    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """File of Marian's whose candidates searches are compared among as well; none: half of all tokens, as of a model
    without one; unset: what the model's settings name."""


@dataclass(frozen=True, kw_only=True)
class ValidateSettings(JudgeSettings):
    """The settings of a comparison: its parts, and where the report goes."""

    runtimes: str | Sequence[str] | None = None
    """Runtimes to judge, separated by commas; one that isn't there is exit 3, see --explain; unset: mlx,onnxruntime."""
    seed: int | None = None
    """Seed of the inputs; unset: fresh."""
    json: Path | str | None = None
    """Write the report to this file as JSON."""
    html: Path | str | None = None
    """Write the report to this file as a page."""
    force: bool = False
    """Replace an earlier report."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Compare the files with the digests in their manifest."""


def _check(settings: object) -> None:
    if problems := check_fields(settings):
        raise UserError(joined(problems))
