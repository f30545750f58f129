"""What the machine allows: GEMM speed and read bandwidth, measured, and the time a model's work needs at that speed.

    python -m engines.floor FOLDER THREADS PRECISION        prints {"gemm": operations/s, "bandwidth": bytes/s}

Shapes: B sentences, S source tokens, T target tokens, M rows of a product, D model, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BYTES = {"float32": 4, "int8": 1}
ROWS = 128


@dataclass(frozen=True)
class Shape:
    layers: int
    """Of the encoder, and of the decoder."""
    d_model: int
    d_ff: int
    vocab_size: int

    @classmethod
    def of(cls, published: Path) -> Shape:
        config = json.loads((published / "config.json").read_text())
        of_t5 = config["model_type"] == "t5"
        layers, d_ff = ("num_layers", "d_ff") if of_t5 else ("encoder_layers", "encoder_ffn_dim")
        return cls(*(config[key] for key in (layers, "d_model", d_ff, "vocab_size")))

    def weights(self) -> tuple[int, int]:
        """Weights of the encoder's pass, and of one decoder step (the logits' included): products' matrices alone.

        Of cross-attention, keys' and values' matrices belong to the former, the other two to the latter.
        """
        attention, feed_forward = 4 * self.d_model**2, 2 * self.d_model * self.d_ff
        layer = attention + attention // 2 + feed_forward
        return self.layers * layer, self.layers * layer + self.d_model * self.vocab_size

    def seconds(
        self, precision: str, rates: dict[str, float], batch: int, beam: int, source: float, length: float
    ) -> float:
        """Least time of one batch: each pass takes its multiplications at GEMM speed, or one reading of its weights.

        source, length: mean tokens of a source and an output. Padding and attention itself are left out.
        """

        def passes(weights: int, rows: float) -> float:
            return max(2 * weights * rows / rates["gemm"], weights * BYTES[precision] / rates["bandwidth"])

        encoder, step = self.weights()
        return passes(encoder, batch * source) + length * passes(step, batch * beam)


def gemm(shape: Shape, threads: int, precision: str) -> float:
    """Operations/s of (M, D) x (D, F) in ONNX Runtime; in float32, NumPy's if that is faster."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    d_model, d_ff = shape.d_model, shape.d_ff
    rng = np.random.default_rng(0)
    if precision == "float32":
        x, w = (rng.standard_normal(shape, np.float32) for shape in ((ROWS, d_model), (d_model, d_ff)))
        node, kinds = "MatMul", (TensorProto.FLOAT, TensorProto.FLOAT)
    else:
        x = rng.integers(0, 255, (ROWS, d_model), np.uint8)
        w = rng.integers(-127, 127, (d_model, d_ff), np.int8)
        node, kinds = "MatMulInteger", (TensorProto.UINT8, TensorProto.INT32)
    graph = helper.make_graph(
        [helper.make_node(node, ["x", "w"], ["y"])],
        "gemm",
        [helper.make_tensor_value_info("x", kinds[0], x.shape)],
        [helper.make_tensor_value_info("y", kinds[1], (ROWS, d_ff))],
        [numpy_helper.from_array(w, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    best = fastest(lambda: session.run(None, {"x": x}))
    if precision == "float32":
        halves = np.array_split(x, threads)
        with ThreadPoolExecutor(threads) as pool:  # one thread of BLAS in each
            best = min(best, fastest(lambda: list(pool.map(lambda half: half @ w, halves))))
    return 2 * ROWS * d_model * d_ff / best


def bandwidth(shape: Shape, threads: int, precision: str) -> float:
    """Bytes/s at which all threads together read as many bytes as one decoder step's weights have, again and again."""
    array = np.ones(shape.weights()[1] * BYTES[precision] // 4, np.float32)
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:
        return array.nbytes / fastest(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))


def fastest(call: Callable[[], object], budget: float = 1.0) -> float:
    """Seconds of the fastest of as many calls as the budget allows."""
    end, best = time.perf_counter() + budget, float("inf")
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    chosen, threads, precision = Shape.of(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    print(json.dumps({"gemm": gemm(chosen, threads, precision), "bandwidth": bandwidth(chosen, threads, precision)}))
