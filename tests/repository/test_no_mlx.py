"""A machine without MLX exports and translates, to MLX's tokens: NumPy, onnxscript and onnx_ir are enough."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from small_models import encoder_decoder, random_weights
from without_mlx import WITHOUT_MLX

from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def test_export_and_run_without_mlx(tmp_path):
    # A random model with tied embeddings says the same token for ever.
    config = dataclasses.replace(encoder_decoder("modern"), tie_embeddings="none")
    save_checkpoint(tmp_path / "model", config, random_weights(config))
    rows = [[5, 6, 2], [7, 2], [*range(20, 30), 2], [40, 31, 12, 6, 2]]
    expected = Transformer.load(tmp_path / "model").generate(rows, max_new_tokens=12)
    assert len({token for row in expected for token in row}) > 2, expected
    script = f"""
from export.__main__ import main
assert main(["build", {str(tmp_path / "model")!r}, {str(tmp_path / "onnx")!r}]) == 0
assert "onnxruntime" not in sys.modules, "building needs no runtime"
from export import OnnxTransformer
print(OnnxTransformer({str(tmp_path / "onnx")!r}, threads=1).generate({rows}, max_new_tokens=12))
assert not [name for name in sys.modules if name.partition(".")[0] == "mlx"]
"""
    done = subprocess.run([sys.executable, "-c", WITHOUT_MLX + script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
