"""Search, from text to server: an encoder that learns from nothing which sentence documents which function of the
standard library, is exported, proved and served. Half a minute of one core."""

import json
import time

import numpy as np
import pytest
from docstrings import pairs
from serving import client

from export import OnnxTransformer, export_onnx
from export.validate import validate_command
from mlx_transformer import load
from mlx_transformer.data.corpus import PairFiles
from mlx_transformer.data.matches import Matches, read_matches
from mlx_transformer.generation.evaluate import retrieval
from mlx_transformer.training.recipe import load_recipe
from mlx_transformer.training.trainer import Trainer

HELD_OUT = 500


@pytest.mark.slow
def test_a_contrastive_run_finds_what_an_untrained_encoder_does_not(tmp_path):
    rows = pairs()
    assert len(rows) > 3000
    for name, part in {"test": rows[:: len(rows) // HELD_OUT], "train": rows}.items():
        held_out = {sentence for _, sentence in rows[:: len(rows) // HELD_OUT]}
        kept = [row for row in part if name == "test" or row[1] not in held_out]
        (tmp_path / f"{name}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in kept), encoding="utf-8")
    text, _ = read_matches(PairFiles(pairs=str(tmp_path / "test.tsv")))
    flags = {"data": {"pairs": str(tmp_path / "train.tsv")}, "training": {"epochs": 1}}
    trainer = Trainer(load_recipe("contrastive", flags), tmp_path / "run")
    trainer.weights.save(tmp_path / "untrained", trainer.tokenizer.to_json())
    began = time.process_time()
    result = trainer.run()
    seconds = time.process_time() - began
    before, after = (retrieval(load(folder)[0], text) for folder in (tmp_path / "untrained", result.model))
    print(json.dumps({"untrained": before, "trained": after, "seconds of one core": round(seconds)}, indent=2))
    assert after["mrr"] > 1.5 * before["mrr"]
    assert after["recall@10"] > 1.5 * before["recall@10"]
    onnx = export_onnx(result.model, tmp_path / "onnx", target="cpu")
    assert validate_command(result.model, onnx) == 0
    some = Matches([column[:50] for column in text.columns])
    both = [retrieval(model, some) for model in (load(result.model)[0], OnnxTransformer(onnx, threads=1))]
    assert both[0] == both[1]
    with client(OnnxTransformer(onnx, threads=1)) as (http_, _):
        body = {"model": "alone", "input": text.columns[1][:5]}
        answer = http_.post("/v1/embeddings", json=body).json()
    served = np.array([each["embedding"] for each in answer["data"]], np.float32)
    np.testing.assert_array_equal(served, OnnxTransformer(onnx, threads=1).embed(text.columns[1][:5]))
