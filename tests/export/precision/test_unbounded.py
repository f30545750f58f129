"""T5 in float16: what its feed-forward nets add to the stream may be beyond the type's range, and stays float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import thinned
from random_models import random_weights

from export import OnnxTransformer, export_onnx
from export.precision import half
from export.validate import compare
from export.validate.engines.graph_runtimes import EvaluatorSession
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

T5 = TransformerConfig.from_dict(
    dict(vocab_size=40, d_model=16, heads=3, d_k=6, d_v=6, d_ff=20, encoder_layers=2, decoder_layers=2)
    | dict(norm="rmsnorm", norm_placement="pre", positions="relative", feed_forward_bias=False, gated=True)
    | dict(scale_embeddings=False, attention_scale=1.0, activation="gelu_tanh", tie_embeddings="source-target")
    | dict(max_positions=20)
)
ROWS = [[5, 6, 7, 8, 2], [9, 2], [10, 11, 12, 2]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of its encoder go up to 10^6, where float16 ends at 65504; each weight is one of float16's numbers."""
    weights = random_weights(T5, 3)
    for name in weights:
        if name.startswith("encoder") and name.endswith(("up_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * np.float32(400)
        weights[name] = weights[name].astype(np.float16).astype(np.float32)
    return save_checkpoint(tmp_path_factory.mktemp("unbounded") / "model", T5, weights)


def memories(folder: Path, suffix: str) -> np.ndarray:
    """The encoder's output, by arithmetic of sixteen bits where the graph says so."""
    session = EvaluatorSession(onnx.load(folder / "onnx" / f"encoder_model{suffix}.onnx"))
    ids = np.array([row + [0] * (5 - len(row)) for row in ROWS])
    (found,) = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)})
    return found


@pytest.mark.fast("web")
@pytest.mark.parametrize("target", ["portable", "web"])
def test_sums_beyond_the_range_are_float32(target: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = export_onnx(
        checkpoint, tmp_path / "onnx", target=target, precision=["float32", "float16"], accept_loss=True
    )
    exact, found = memories(folder, ""), memories(folder, "_fp16")
    assert np.abs(found - exact).max() <= 0.02 * np.abs(exact).max()
    expected = OnnxTransformer(folder, precision="float32", threads=1).generate(ROWS, max_new_tokens=8)
    assert OnnxTransformer(folder, precision="float16", threads=1).generate(ROWS, max_new_tokens=8) == expected


def test_they_would_overflow(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "_keep_sums", lambda model: set())
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="float16", accept_loss=True)
    assert not np.isfinite(memories(folder, "_fp16")).all()


def test_matrices_of_such_products_are_stored_exactly_and_others_by_halves(checkpoint: Path, tmp_path: Path) -> None:
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="float16", accept_loss=True)
    model = onnx.load(folder / "onnx" / "encoder_model_fp16.onnx")
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer if tensor.name.endswith("proj.weight")}
    wide = {name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT}
    assert wide == {name for name in kinds if name.endswith(".down_proj.weight")} != set()
    assert {kind for name, kind in kinds.items() if name not in wide} == {onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_validate_knows_which_they_are(target: str, tmp_path: Path) -> None:
    """In a file that computes in float16; `cpu` only stores sixteen bits, of these matrices too."""
    checkpoint = save_checkpoint(tmp_path / "model", T5, random_weights(T5, 4))
    folder = export_onnx(checkpoint, tmp_path / "onnx", target=target, precision="float16", accept_loss=True)
    weights = compare(checkpoint, folder, ["onnxruntime"], seed=1, threads=1, longest=8, searches=False).weights
    assert weights
    assert all(check.passed for check in weights), [check for check in weights if not check.passed]
