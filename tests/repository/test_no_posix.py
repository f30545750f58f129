"""What runs models needs nothing of POSIX: the commands do on a system without it, as on Windows, what they do here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from as_windows import AS_WINDOWS
from imports import ROOT
from without_mlx import WITHOUT_MLX


def test_a_file_is_translated_to_a_file(text_folder: Path, tmp_path: Path) -> None:
    """Twice: a new one is written beside the old and put in its place."""
    lines, out = tmp_path / "lines.txt", tmp_path / "out.txt"
    lines.write_text("one two\nthree\n\nx\n", encoding="utf-8")
    command = ["translate", str(text_folder / "onnx"), "-i", str(lines), "-o", str(out)]
    done = run(command, [*command, "--force"], ["info", str(text_folder / "onnx")])
    assert done.returncode == 0, done.stderr
    assert "decoder_model_merged" in done.stdout
    assert out.read_text(encoding="utf-8").splitlines() == translated(text_folder, lines)


@pytest.mark.slow
def test_a_checkpoint_is_exported(text_folder: Path, tmp_path: Path) -> None:
    """To the same files, twice: the folder that is replaced is moved aside."""
    command = ["export", str(text_folder / "model"), "--out", str(tmp_path / "onnx")]
    done = run(command, [*command, "--force"])
    assert done.returncode == 0, done.stderr
    graphs = sorted((tmp_path / "onnx").rglob("*.onnx"))
    assert [each.read_bytes() for each in graphs] == [
        (text_folder / "onnx" / each.relative_to(tmp_path / "onnx")).read_bytes() for each in graphs
    ]


def run(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run them one after another in a process without POSIX and without MLX; its status is the first that isn't 0."""
    script = (
        f"from mlx_transformer.cli import main\nraise SystemExit(next(filter(None, map(main, {list(commands)!r})), 0))"
    )
    command = [sys.executable, "-c", WITHOUT_MLX + AS_WINDOWS + script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def translated(folder: Path, lines: Path) -> list[str]:
    from export import OnnxTransformer

    return OnnxTransformer(folder / "onnx", threads=1).translate(lines.read_text(encoding="utf-8").splitlines())
