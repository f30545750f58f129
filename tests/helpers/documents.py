"""The code blocks of a Markdown file, and a folder in which they run as a reader would run them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chat_templates import TEMPLATES, TOKENS
from forked import Process
from imports import ROOT
from makers_tokenizers import makers_json
from marian_folders import written
from marian_models import STUDENT, write_model
from random_models import random_weights
from waiting import PATIENCE, port_of
from web_package import write_packages

from mlx_transformer import cli
from mlx_transformer.convert import to_gguf
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.data import built_in
from mlx_transformer.generation.settings import settings_text
from mlx_transformer.text.tokenizer import Tokenizer

RUN = ("sh", "python")
"""Kinds of blocks that are run here. `js` is run by the consumers' tests, `text` is output or a picture."""


PROGRAM = ".venv/bin/mlx-transformer "


@dataclass(frozen=True)
class Block:
    line: int
    kind: str
    code: str


def write_gguf_chat(file: Path) -> None:
    """Write a small random decoder with a tokenizer and a chat template; beside it the checkpoint it is made of."""
    tokenizer, tokens = Tokenizer(text := makers_json("qwen2")), TOKENS["qwen2"]
    pad, eos = (tokenizer.encode_control(tokens[f"{name}_token"])[0] for name in ("pad", "eos"))
    config = TransformerConfig(
        **dict(architecture="decoder", encoder_layers=0, decoder_layers=1, tie_embeddings="target-output"),
        **dict(vocab_size=tokenizer.vocab_size, d_model=32, heads=1, d_ff=32, max_positions=64, dropout=0.0),
        **dict(norm="rmsnorm", norm_placement="pre", positions="rotary", gated=True, activation="silu"),
        **dict(scale_embeddings=False, attention_bias=False, feed_forward_bias=False),
        **dict(pad_id=pad, bos_id=pad, eos_id=eos),
    )
    texts = settings_text({"chat_templates": {"default": TEMPLATES["qwen2"]}})
    made = save_checkpoint(file.with_suffix(".made"), config, random_weights(config, 0), text, texts=texts)
    to_gguf(made, file, "q4_0")


def blocks(text: str) -> list[Block]:
    """Every fenced block, in order."""
    matches = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in matches]


class Reader:
    """A folder with what a reader has: the project with its `.venv`, files of text, a published Marian folder, a GGUF
    file of a chat model.

    What it shortens, and nothing else: `make test` gets ARGS that choose one file, the texts are a hundred phrases,
    the server's port is a free one, and npm's package one in name alone.
    at_once: Python and the command line run in this process, which has all libraries; what needs a shell has one.
    """

    ARGS = {"make test": "tests/repository/test_makefile.py"}  # noqa: RUF012

    def __init__(self, folder: Path, at_once: bool = False):
        self.folder, self.at_once, self.server = folder, at_once, None
        # Without what a `make test ARGS=...` around this would tell every make in here.
        given = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        self.environment = {**given, "PYTHONPATH": str(ROOT), "no_proxy": "localhost"}
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests", "export", "mlx_transformer"):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name, arguments in {"python": "", "pytest": "-m pytest", "mlx-transformer": "-m mlx_transformer"}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (programs / name).chmod(0o755)
        for name in (".installed", ".installed-dev"):  # younger than what they are made of
            (folder / ".venv" / name).touch()
        (folder / "opus-mt-en-de").symlink_to(written(folder / "opus"))
        write_model(folder / "firefox-en-pt", STUDENT, integers=True)
        write_gguf_chat(folder / "SmolLM2-135M-Instruct-Q4_K_M.gguf")
        write_packages(folder / "node_modules")
        self.port = ""

    def write_texts(self) -> None:
        corpus = built_in.build("cldr:en-de", train_pairs=100)
        valid, held_out = (text.select(list(range(20))) for text in (corpus.valid, corpus.held_out))
        parts = {"train": corpus.train, "val": valid, "test": held_out, "test_2016_flickr": held_out}
        for place in (self.folder, self.folder / "folder-with-the-files"):
            place.mkdir(exist_ok=True)
            for name, part in parts.items():
                part.write(place / f"{name}.en", place / f"{name}.de")
        labels = ["long" if len(line) > 20 else "short" for line in corpus.train.source]
        for name, column in {"pairs.tsv": corpus.train.target, "labelled.tsv": labels}.items():
            rows = (f"{line}\t{other}\n" for line, other in zip(corpus.train.source, column, strict=True))
            (self.folder / name).write_text("".join(rows), encoding="utf-8")

    def run(self, block: Block) -> str:
        """What the block prints; AssertionError if it fails. A server that it starts stays."""
        if block.kind == "python" and self.at_once:
            code = compile(block.code, f"line {block.line}", "exec")
            return self._here(lambda: exec(code, {"__name__": "block"}))
        if block.kind == "python":
            return self._ended([sys.executable, "-c", block.code])
        printed = ""
        for line in re.sub(r"\\\n\s*", "", block.code).splitlines():
            command = line.replace("8000", self.port)
            if " serve " in line:
                self._serve(line.replace("8000", "0"))
            elif self.at_once and command.startswith(PROGRAM):
                arguments = shlex.split(command.removeprefix(PROGRAM), comments=True)
                printed += self._here(lambda arguments=arguments: cli.main(arguments))
            else:
                arguments = next((value for line, value in self.ARGS.items() if command.startswith(line)), "")
                printed += self._ended(["bash", "-euo", "pipefail", "-c", command], ARGS=arguments)
        return printed

    def leave(self) -> None:
        """The server ends as it is told to, with 0."""
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            _, said = self.server.communicate(timeout=PATIENCE)
            assert self.server.returncode == 0, said

    def _here(self, run: Callable[[], object]) -> str:
        """What this prints in the reader's folder; whatever it raises, a status other than 0 included."""
        held = io.BytesIO()
        printed = io.TextIOWrapper(held, encoding="utf-8", write_through=True)
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
            try:
                run()
            except SystemExit as done:
                if done.code:
                    raise
        return held.getvalue().decode()

    def _ended(self, command: list[str], **variables: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env={**self.environment, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, command: str) -> None:
        shell = ["bash", "-c", f"exec {command}"]
        self.server = Process(shell, cwd=self.folder, env=self.environment, stderr=subprocess.PIPE, text=True)
        self.port = str(port_of(self.server))
