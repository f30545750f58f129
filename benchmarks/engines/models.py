"""The models that the engines load, kept in one folder and made when missing.

FOLDER/published              the Hugging Face folder that everything is made from
FOLDER/checkpoint             the same as our checkpoint
FOLDER/packed                 of a decoder: our checkpoint with integers, the maker's own where there are some
FOLDER/ct2-*, optimum-*, genai-*, mlx-lm-*  for the peers, made by `prepare.py` in their interpreter
FOLDER/llama-*                GGUF files of ours
FOLDER/ours-TARGET-PRECISION[-CHOICE]  our exports, made anew in every run
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import EngineName
from .process import BENCHMARKS, last_line


class PreparationError(Exception):
    """A model that an engine needs could not be made."""


class Preparation:
    def __init__(self, models: Path, peers_python: str):
        self.models = models
        self.python = peers_python
        self.published = models / "published"
        self.checkpoint = models / "checkpoint"
        self.packed = models / "packed"
        self.exported: set[Path] = set()
        models.mkdir(parents=True, exist_ok=True)

    def random(self, size: str) -> None:
        from mlx_transformer.convert import import_huggingface

        if not self.published.exists():
            self._peers("random", size, self.published)
        if not self.checkpoint.exists():
            import_huggingface(self.published, self.checkpoint)

    def published_decoder(self, gguf: Path) -> None:
        """A published GGUF file, and the same numbers as floats."""
        from mlx_transformer.convert import import_huggingface, to_huggingface

        if not self.packed.exists():
            import_huggingface(gguf, self.packed)
        if not self.published.exists():
            to_huggingface(self.packed, self.published)
        if not self.checkpoint.exists():
            import_huggingface(self.published, self.checkpoint)

    def random_decoder(self, size: str, tokenizer: Path) -> None:
        """tokenizer: a published folder whose tokenizer the peers' programs find beside the weights."""
        if not self.published.exists():
            self._peers("random", size, self.published)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tokenizer / name, self.published)
        self.random(size)
        if not self.packed.exists():
            self._quantised(self.packed, 4, 32)

    def from_checkpoint(self, checkpoint: Path) -> None:
        """Everything is made anew: the checkpoint may be another one than before."""
        from mlx_transformer.convert import to_huggingface

        shutil.rmtree(self.models)
        self.models.mkdir(parents=True)
        to_huggingface(checkpoint, self.published)
        (self.published / "tokenizer.json").unlink(missing_ok=True)  # no peer needs it
        self.checkpoint = checkpoint

    def folder(self, engine_name: EngineName) -> Path:
        """What an engine loads. Raises `PreparationError`."""
        folder = engine_name.folder(self.models)
        family, precision = engine_name.family, engine_name.precision
        if family == "ours" and engine_name.parts[1] == "mlx":
            return self._in_mlx(precision, folder)
        if family == "llama":
            return self._gguf(precision, folder.with_suffix(".gguf"))
        if not engine_name.is_peer:
            self._export(engine_name, folder)
        elif not folder.exists():
            if family in ("genai", "mlx-lm"):
                self._peers(family, self.published, folder, precision)
            elif family == "ct2":
                self._peers("ct2", self.published, folder, engine_name.precision)
            elif engine_name.precision == "float32":
                self._peers("optimum", self.published, folder)
            else:
                exported = self.folder(EngineName("", ["optimum", "float32"]))
                self._peers("quantise", exported, folder)
        return folder

    def _in_mlx(self, precision: str, folder: Path) -> Path:
        if precision == "float32":
            return self.checkpoint
        if precision == "packed":
            return self.packed
        if not folder.exists():
            self._quantised(folder, {"int8": 8, "int4": 4}[precision], 64)
        return folder

    def _quantised(self, folder: Path, bits: int, group_size: int) -> None:
        from mlx_transformer.convert.quantize import quantize_checkpoint
        from mlx_transformer.core.quantization import Scheme

        quantize_checkpoint(self.checkpoint, folder, Scheme(group_size, bits))

    def _gguf(self, kind: str, file: Path) -> Path:
        from mlx_transformer.convert import to_gguf

        if not file.exists():
            to_gguf(self.checkpoint, file, kind.lower())
        return file

    def _export(self, engine_name: EngineName, folder: Path) -> None:
        """In a process of its own, from the repository's root; once in a run."""
        if folder in self.exported:
            return
        self.exported.add(folder)
        function, out = (
            ("export_onnx", folder) if engine_name.family == "ours" else ("export_search", folder / "search.onnx")
        )
        code = (
            "import sys, export; _, checkpoint, out, target, precision, *choice = sys.argv;"
            " choices = {'int8_scales' if precision == 'int8' else 'activations': choice[0]} if choice else {};"
            f" export.{function}(checkpoint, out, target=target, precision=precision, force=True, accept_loss=True,"
            " **choices)"
        )
        if engine_name.family == "loop":
            folder.mkdir(exist_ok=True)
        checkpoint = self.packed if engine_name.precision == "packed" else self.checkpoint
        paths = [str(path.absolute()) for path in (checkpoint, out)]
        done = subprocess.run(
            [sys.executable, "-c", code, *paths, *(part for part in engine_name.parts[1:] if "=" not in part)],
            cwd=BENCHMARKS.parent,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise PreparationError(f"export: {last_line(done.stderr)}")

    def _peers(self, step: str, *arguments: object) -> None:
        """A step of `prepare.py`; its output appears only when it is complete."""
        out = next(Path(str(a)) for a in arguments if isinstance(a, Path) and not a.exists())
        temporary = out.with_name(out.name + ".part")
        shutil.rmtree(temporary, ignore_errors=True)
        given = [str(temporary if a == out else a) for a in arguments]
        environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
        try:
            done = subprocess.run(
                [self.python, "-m", "engines.prepare", step, *given], env=environment, capture_output=True, text=True
            )
        except OSError as error:
            raise PreparationError(f"{self.python}: {error.strerror}; give --peers-python") from error
        if done.returncode or not temporary.exists():
            raise PreparationError(f"{self.python} -m engines.prepare {step}: {last_line(done.stderr)}")
        temporary.rename(out)
