"""The README's code that uses nothing of ours, run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from small_models import SIZES, random_weights

from export import OnnxTransformer
from export.package import export_onnx
from mlx_transformer.spec.checkpoint import save_checkpoint
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.tokenizer import Tokenizer

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_onnxruntime_alone(tmp_path):
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import tokenizers" in block
    )
    assert not re.search(r"mlx_transformer|export", code)
    tokenizer = Tokenizer.train(["May 3, 2024", "3. Mai 2024"], 300)
    sizes = {**SIZES, "vocab_size": tokenizer.vocab_size, "max_positions": 128}
    config = TransformerConfig(**sizes, tie_embeddings="none", output_bias=True)
    weights = random_weights(config)
    # The lines ban nothing, ours does; and an end is to come, but not at once.
    weights["output_proj.bias"][[config.pad_id, config.bos_id]] = -100
    save_checkpoint(tmp_path / "model", config, weights, tokenizer.to_json())
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    expected = OnnxTransformer(tmp_path / "onnx").translate(["May 3, 2024"], max_new_tokens=99)
    assert len(set(expected[0])) > 5
    assert code.count("quickstart/onnx") == 1
    code = code.replace("quickstart/onnx", (tmp_path / "onnx").as_posix())
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected[0] + "\n"
