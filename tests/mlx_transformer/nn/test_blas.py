"""MLX's matrix products through OpenBLAS: in use where it is installed, exact, and never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from waiting import PATIENCE

from mlx_transformer import device as blas

linux = pytest.mark.skipif(
    sys.platform != "linux" or blas._openblas() is None, reason="needs Linux with scipy-openblas32"
)


def in_a_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@linux
def test_it_is_in_use():
    assert blas.use_fast_blas().startswith("openblas 0.")
    assert "USE64BITINT" not in blas.use_fast_blas(), "MLX passes 32-bit integers"


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-4), (mx.complex64, 1e-4)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (64, 33, 128), (1, 300, 2)])
def test_products_are_right(dtype, tolerance, shape):
    blas.use_fast_blas()
    rng = np.random.default_rng(0)
    n, k, m = shape
    a, b = rng.normal(size=(n, k)), rng.normal(size=(m, k))
    if dtype == mx.complex64:
        a, b = a + 1j * rng.normal(size=a.shape), b + 1j * rng.normal(size=b.shape)
    left, right = (mx.array(x.astype(np.complex64 if dtype == mx.complex64 else np.float32)) for x in (a, b))
    np.testing.assert_allclose(np.array(left @ right.T), a @ b.T, atol=tolerance)
    np.testing.assert_allclose(np.array(mx.addmm(mx.ones((n, m)), left, right.T)), 1 + a @ b.T, atol=tolerance)


@linux
def test_every_product_goes_to_openblas():
    """The slots through which libmlx.so calls its BLAS hold OpenBLAS's functions; before, they held others."""
    code = (
        "import ctypes, mlx.core\n"
        "from mlx_transformer import device as blas\n"
        "print(blas.use_fast_blas())\n"
        "slots = blas._jump_slots(*blas._loaded('libmlx.so'))\n"
        "address = lambda f: ctypes.cast(f, ctypes.c_void_p).value\n"
        "theirs = {n: address(getattr(blas._openblas(), 'scipy_' + n)) for n in slots}\n"
        "print(len(slots), sum(ctypes.c_void_p.from_address(slots[n]).value == theirs[n] for n in slots))"
    )
    fast, slow = (in_a_process(code, MLX_TRANSFORMER_BLAS=value).splitlines() for value in ("", "wheel"))
    assert fast[0].startswith("openblas")
    assert fast[1] == "3 3"
    assert slow == ["mlx (MLX_TRANSFORMER_BLAS=wheel)", "3 0"]


@linux
def test_threads_can_be_set():
    openblas = blas._openblas()
    assert openblas is not None
    before = openblas.scipy_openblas_get_num_threads()
    try:
        for threads in (2, 1):
            blas.set_blas_threads(threads)
            assert openblas.scipy_openblas_get_num_threads() == threads
    finally:
        blas.set_blas_threads(before)


@linux
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("blas._openblas = lambda: None", "mlx (scipy-openblas32 is not installed)"),
        ("blas._loaded = lambda library: None", "mlx (libmlx.so not found in this process)"),
        ("blas._jump_slots = lambda *a: {}", "mlx (libmlx.so imports no cblas_*gemm)"),
        ("blas.sys.platform = 'darwin'; blas.platform.machine = lambda: 'arm64'", "mlx (darwin arm64)"),
        ("blas.platform.machine = lambda: 'riscv64'", "mlx (linux riscv64)"),
    ],
)
def test_without_a_part_of_it_mlx_is_left_alone(code, said):
    rest = "import mlx.core as mx; a = mx.ones((4, 4)); assert (a @ a).sum().item() == 64; blas.set_blas_threads(2)"
    assert (
        in_a_process(f"from mlx_transformer import device as blas; {code}; print(blas.use_fast_blas()); {rest}") == said
    )


@linux
def test_only_what_is_loaded_is_found(monkeypatch):
    assert blas._loaded("libmlx.so") is not None
    assert blas._loaded("libnone.so") is None
    monkeypatch.setattr(blas.ctypes, "CDLL", lambda *_: SimpleNamespace(_handle=0))
    assert blas._loaded("libmlx.so") is None  # a C library without dlinfo
