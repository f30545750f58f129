"""What the tests of the command line share: a model in both forms, and its calls in this process."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from export import export_onnx
from mlx_transformer import Transformer, cli
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.text.tokenizer import Tokenizer

LINES = ["one two", "", "three. four", "  ", "seven"]
TEXT = "".join(f"{line}\n" for line in LINES)


def ending_model(tokenizer: Tokenizer, **sizes: int) -> Transformer:
    """One layer a side and random weights, with a leaning to the end token: its outputs end."""
    mx.random.seed(4)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "max_positions": 40, **sizes}
    model = Transformer(TransformerConfig(vocab_size=tokenizer.vocab_size, output_bias=True, **sizes))
    bias = np.zeros(tokenizer.vocab_size, np.float32)
    bias[2] = 1.0
    model.output_proj.bias = mx.array(bias)
    return model


def both_models(tmp_path_factory) -> Path:
    """A fixture. FOLDER/model: random weights and a tokenizer; FOLDER/onnx: its export."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = Tokenizer.train(["one two three. four five six! seven " * 3], vocab_size=280)
    model = ending_model(tokenizer, d_model=16, heads=1, d_ff=16)
    save_checkpoint(folder / "model", model.config, model.weights(), tokenizer.to_json(), force=True)
    export_onnx(folder / "model", folder / "onnx", force=True)
    return folder


def caller(capfd, monkeypatch):
    """A fixture: call(*arguments, stdin="") -> (status, standard output, standard error)."""

    def run(*arguments: object, stdin: str | bytes = ""):
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        status = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as done:
            status = done.code
        return status, *capfd.readouterr()

    return run


PROGRESS = re.compile(r"^\w+ +\d+ %.*\n", re.MULTILINE)
"""What work that takes more than ten seconds says meanwhile."""


def refused(result, *parts: str) -> None:
    """One line on standard error that holds `parts`, exit 2, nothing on standard output."""
    status, out, error = result
    error = PROGRESS.sub("", error)
    assert status == 2, error
    assert out == ""
    assert error.count("\n") == 1, error
    assert error.startswith("mlx-transformer: ")
    for part in parts:
        assert part in error
