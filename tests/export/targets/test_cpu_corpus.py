"""Held-out phrases of the built-in corpus, translated by a model trained for 600 steps: the same tokens everywhere."""

import subprocess

import pytest
from tiny_run import COMMAND

from export import OnnxTransformer, export_onnx
from mlx_transformer import Transformer
from mlx_transformer.data import built_in
from mlx_transformer.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    subprocess.run([*COMMAND, "train", "quickstart", "--steps", "600", "--out", str(run)], check=True)
    return run / "model"


@pytest.mark.slow
def test_three_hundred_sentences(checkpoint, tmp_path):
    folders = {target: export_onnx(checkpoint, tmp_path / target, target=target) for target in ("portable", "cpu")}
    models = {target: OnnxTransformer(folder, threads=2) for target, folder in folders.items()}
    lines = list(built_in.build("cldr:en-de").held_out.select(list(range(300))).source)
    rows = Tokenizer.load(checkpoint / "tokenizer.json").encode_batch(lines)
    mlx = Transformer.load(checkpoint)
    for beam in (1, 4):
        expected = mlx.generate(rows, beam=beam)
        assert len({len(row) for row in expected}) > 5  # they end by themselves, at different steps
        for target, model in models.items():
            differing = [i for i, row in enumerate(model.generate(rows, beam=beam)) if row != expected[i]]
            assert not differing, (target, beam, differing, lines[differing[0]])
