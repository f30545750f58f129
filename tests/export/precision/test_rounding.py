"""Quantised matrices: what NumPy makes of them, what the files hold, and what the graphs compute with them."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.precision.rounding import (
    PAIR,
    block_rows,
    from_block_rows,
    from_int8_rows,
    int8_matrix,
    int8_rows,
    one_multiplier,
    packed,
)

RNG = np.random.default_rng(0)


def matrices():
    w = RNG.standard_normal((40, 64)).astype(np.float32)
    outlier = w.copy()
    outlier[3, 7] = 30
    one_sign = np.abs(w)
    zero_row = w.copy()
    zero_row[5] = 0
    return {"normal": w, "outlier": outlier, "one sign": one_sign, "a row of zeros": zero_row, "odd": w[:, :33]}


@pytest.mark.parametrize("name", matrices())
def test_int8_rows_are_nearest_and_never_saturate(name):
    w = matrices()[name]
    q, scale = int8_rows(w)
    assert q.dtype == np.int8
    assert scale.dtype == np.float32
    assert np.all(np.abs(from_int8_rows(q, scale) - w) <= 0.5001 * scale[:, None])
    wide = np.pad(q, ((0, 0), (0, q.shape[1] % 2))).astype(int).reshape(len(q), -1, 2)
    assert np.maximum(wide, 0).sum(axis=2).max() <= PAIR
    assert np.maximum(-wide, 0).sum(axis=2).max() <= PAIR
    # Not coarser than that takes: seven bits would be 2.
    assert np.all(scale * 127 <= np.abs(w).max(axis=1) * 2.0 + (scale == 1) * 127)


@pytest.mark.parametrize("name", ["normal", "one sign", "a row of zeros", "odd"])
def test_one_scale_for_a_matrix_is_its_coarsest_row_s(name):
    w = matrices()[name]
    m = one_multiplier(w)
    assert m is not None
    q, scale = int8_matrix(w, m)
    each = int8_rows(w)[1][w.any(axis=1)]
    assert np.allclose(scale, each.max(), rtol=1e-6)
    wide = np.pad(q, ((0, 0), (0, q.shape[1] % 2))).astype(int).reshape(len(q), -1, 2)
    assert max(np.maximum(sign * wide, 0).sum(axis=2).max() for sign in (1, -1)) <= PAIR


def test_rows_that_differ_much_keep_their_own_scales():
    """From twice the root mean square of all steps on; rows of zeros have none that counts."""
    assert one_multiplier(matrices()["outlier"]) is None
    assert one_multiplier(np.zeros((3, 4), np.float32)) is None
    rows = np.ones((9, 4), np.float32)
    rows[0] = 2.4  # of the root mean square (2.4^2 + 8)/9: 1.94 times
    assert one_multiplier(rows) is not None
    rows[0] = 2.6  # 2.02 times
    assert one_multiplier(rows) is None
    assert one_multiplier(np.pad(rows, ((0, 99), (0, 0)))) is None


def test_the_product_is_exact_on_the_worst_activations():
    """255 wherever a weight of one sign is: the sums of pairs in 16 bits, where a CPU makes them, don't saturate."""
    w = RNG.standard_normal((24, 128)).astype(np.float32)
    q, _ = int8_rows(w)
    x = np.where(q[:12] > 0, 255, 0).astype(np.uint8)
    y = run("MatMulInteger", {"x": x}, {"w": np.ascontiguousarray(q.T)})
    assert np.array_equal(y, x.astype(np.int32) @ q.T.astype(np.int32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", matrices())
def test_blocks_are_nearest_for_the_scale_that_they_have(name, bits):
    w = matrices()[name]
    q, scale = block_rows(w, bits, 32)
    assert q.max() < 1 << bits
    again = from_block_rows(q, scale, bits, w.shape[1])
    steps = np.repeat(np.abs(scale), 32, axis=1)[:, : w.shape[1]]
    inside = (q.reshape(len(q), -1)[:, : w.shape[1]] > 0) & (q.reshape(len(q), -1)[:, : w.shape[1]] < (1 << bits) - 1)
    assert np.all(np.abs(again - w)[inside] <= 0.5001 * steps[inside])


def test_the_search_for_scales_pays():
    w = RNG.standard_normal((200, 256)).astype(np.float32)
    largest = np.abs(w.reshape(200, -1, 32)).max(axis=2, keepdims=True)
    plain = np.clip(np.rint(w.reshape(200, -1, 32) / (largest / 7)), -8, 7) * (largest / 7)
    q, scale = block_rows(w, 4, 32)
    assert rms(from_block_rows(q, scale, 4, 256) - w) < 0.9 * rms(plain.reshape(w.shape) - w)


@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_n_bits_reads_the_packed_blocks(bits):
    """ONNX Runtime's operator on these bytes is the product with the matrix that they stand for."""
    w = RNG.standard_normal((24, 64)).astype(np.float32)
    x = RNG.standard_normal((5, 64)).astype(np.float32)
    q, scale = block_rows(w, bits, 32)
    sizes = dict(K=64, N=24, bits=bits, block_size=32, accuracy_level=1)
    y = run("MatMulNBits", {"x": x}, {"w": packed(q, bits), "scale": scale}, domain="com.microsoft", **sizes)
    assert np.allclose(y, x @ from_block_rows(q, scale, bits, 64).T, atol=1e-5)


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


def run(operator, inputs, weights, domain="", **attributes):
    """The output of one operator."""
    kind = {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.float32): TensorProto.FLOAT}
    graph = helper.make_graph(
        [helper.make_node(operator, [*inputs, *weights], ["y"], domain=domain, **attributes)],
        "one",
        [helper.make_tensor_value_info(n, kind[x.dtype], x.shape) for n, x in inputs.items()],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]
