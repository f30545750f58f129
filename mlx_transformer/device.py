"""MLX's devices: their differences in one place (`tuning`), and fast matrix products on Linux CPUs (`use_fast_blas`).

`tuning()` says how to use MLX's default device, e.g. whether to compile the training step; inside `mx.stream(mx.cpu)`
it is the CPU's. To try a GPU's choices on a machine without one, set MLX_TRANSFORMER_DEVICE_CHOICES=gpu, or use
`deciding_as("gpu")` for a block. MLX_TRANSFORMER_DEVICE=cpu uses the CPU even if there is a GPU.

MLX's Linux wheel is linked to the reference BLAS, which is 15 to 60 times slower than OpenBLAS for float32 matrix
products. PyPI has OpenBLAS as `scipy-openblas32`, with the same 32-bit integer interface but prefixed names
(`scipy_cblas_sgemm`), so preloading it wouldn't replace anything. Instead, `use_fast_blas` overwrites three entries of
libmlx.so's jump table, where the dynamic linker keeps the addresses of imported functions (ELF relocations of type
JUMP_SLOT). The `cblas_*gemm` entries then point to OpenBLAS. Files and other libraries in the process are unaffected.
MLX_TRANSFORMER_BLAS=wheel turns this off.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import fast_cores

_GEMMS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_JUMP_SLOT = {"x86_64": 7, "aarch64": 1026}
"""{machine: relocation type}: R_X86_64_JUMP_SLOT and R_AARCH64_JUMP_SLOT."""
# Tags of the ELF dynamic section.
_PLTRELSZ, _STRTAB, _SYMTAB, _JMPREL = 2, 5, 6, 23


@cache
def use_fast_blas() -> str:
    """Make MLX use OpenBLAS for matrix products on Linux CPUs, once per process.

    Returns a text for the run's record: "openblas <config>", or "mlx (<reason>)" if nothing was changed. Never raises:
    without OpenBLAS, MLX is only slower.
    """
    if sys.platform != "linux" or platform.machine() not in _JUMP_SLOT:
        return f"mlx ({sys.platform} {platform.machine()})"
    if os.environ.get("MLX_TRANSFORMER_BLAS", "").lower() == "wheel":
        return "mlx (MLX_TRANSFORMER_BLAS=wheel)"
    openblas = _openblas()
    if openblas is None:
        return "mlx (scipy-openblas32 is not installed)"
    import mlx.core  # noqa: F401 - loads libmlx.so

    libmlx = _loaded("libmlx.so")
    if libmlx is None:
        return "mlx (libmlx.so not found in this process)"
    patched = [name for name, slot in _jump_slots(*libmlx).items() if _point(slot, openblas, name)]
    if not patched:
        return "mlx (libmlx.so imports no cblas_*gemm)"
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        # Several threads wait for each other by spinning: next to other work, decoding took six times as long.
        openblas.scipy_openblas_set_num_threads(1)
    openblas.scipy_openblas_get_config.restype = ctypes.c_char_p
    return "openblas " + openblas.scipy_openblas_get_config().decode().removeprefix("OpenBLAS").strip()


def set_blas_threads(threads: int) -> None:
    """Set OpenBLAS's threads per matrix product. The default of 1 is best for decoding and for parallel streams."""
    openblas = _openblas() if use_fast_blas().startswith("openblas") else None
    if openblas is not None:
        openblas.scipy_openblas_set_num_threads(threads)


@cache
def _openblas() -> ctypes.CDLL | None:
    # Found, not imported: the package looks up its own version, which takes as long as opening a small model.
    package = find_spec("scipy_openblas32")
    folders = (package.submodule_search_locations or ()) if package else ()
    files = [file for folder in folders for file in Path(folder, "lib").glob("libscipy_openblas*")]
    try:
        return ctypes.CDLL(str(files[0])) if files else None
    except OSError:
        return None


def _loaded(library: str) -> tuple[int, int] | None:
    """(base address, address of the dynamic section) of a loaded library, from the dynamic linker; None if unknown."""
    address = ctypes.c_void_p()
    try:
        handle = ctypes.CDLL(library, os.RTLD_NOW | os.RTLD_NOLOAD)._handle
        failed = ctypes.CDLL(None).dlinfo(ctypes.c_void_p(handle), 2, ctypes.byref(address))  # RTLD_DI_LINKMAP
    except (OSError, AttributeError):  # not loaded, or a C library other than glibc
        return None
    if failed or address.value is None:
        return None
    # struct link_map: l_addr at 0, l_name at 8, l_ld at 16.
    base, dynamic = (ctypes.c_uint64.from_address(address.value + at).value for at in (0, 16))
    return base, dynamic


def _jump_slots(base: int, dynamic: int) -> dict[str, int]:
    """{function: address of its jump table entry} for the gemm functions that the library imports."""
    tags: dict[int, int] = {}
    while (tag := ctypes.c_int64.from_address(dynamic).value) != 0:
        tags[tag] = ctypes.c_uint64.from_address(dynamic + 8).value
        dynamic += 16
    if not {_PLTRELSZ, _STRTAB, _SYMTAB, _JMPREL} <= tags.keys():
        return {}
    # After loading, glibc stores absolute addresses in these entries; other linkers store offsets.
    strings, symbols, relocations = (tags[t] if tags[t] > base else base + tags[t] for t in (_STRTAB, _SYMTAB, _JMPREL))
    slots = {}
    for entry in range(relocations, relocations + tags[_PLTRELSZ], 24):
        offset, info = (ctypes.c_uint64.from_address(entry + at).value for at in (0, 8))
        if info & 0xFFFFFFFF == _JUMP_SLOT[platform.machine()]:
            name_at = ctypes.c_uint32.from_address(symbols + 24 * (info >> 32)).value
            name = ctypes.string_at(strings + name_at).decode()
            if name in _GEMMS:
                slots[name] = base + offset
    return slots


def _point(slot: int, openblas: ctypes.CDLL, name: str) -> bool:
    function = getattr(openblas, "scipy_" + name, None)
    if function is None:
        return False
    page = os.sysconf("SC_PAGESIZE")
    writable = ctypes.CDLL(None).mprotect(ctypes.c_void_p(slot & -page), ctypes.c_size_t(page), 3)  # read and write
    if writable != 0:
        return False
    ctypes.c_void_p.from_address(slot).value = ctypes.cast(function, ctypes.c_void_p).value
    return True


DEVICE = "MLX_TRANSFORMER_DEVICE"
VARIABLE = "MLX_TRANSFORMER_DEVICE_CHOICES"


class Tuning(NamedTuple):
    """How to use a kind of device, CPU or GPU."""

    compiles: bool
    """Compile the training step and activations. On Linux CPUs `mx.compile` starts a C++ compiler at run time and gains
    nothing; there the step is split over streams, one for each core."""
    few_shapes: bool
    """Make training batches of few shapes, as a compiled function is compiled again for each shape. Otherwise batches
    have as little padding as possible."""
    shortest: int
    """Least length of a training batch. On GPUs, MLX's fused attention has no gradient for 8 queries or fewer (it may
    throw), so the value is 16 there."""
    exp_as_power: bool
    """Compute e^x as a power of two. MLX's CPU backend takes that from the C library, 2.5 times faster."""
    check_every: int
    """Steps between a search's checks whether all rows have finished. On a GPU each check waits for all queued work."""
    drop_below: float
    """A search drops finished rows once at most this share is unfinished. On a GPU a smaller batch costs nearly the
    same, so rows are dropped late, which also gives fewer shapes."""
    unpack_from: float
    """Rows of activations from which a quantised matrix is dequantised before the product. MLX's CPU backend
    multiplies packed integers one by one (4 bits, 256 x 256, 512 rows: 29 ms, dequantised 0.8 ms); GPU kernels are as
    fast with packed integers."""


CPU = Tuning(
    compiles=False, few_shapes=False, shortest=1, exp_as_power=True, check_every=1, drop_below=0.75, unpack_from=4
)
GPU = Tuning(
    compiles=True, few_shapes=True, shortest=16, exp_as_power=False, check_every=8, drop_below=0.5, unpack_from=math.inf
)
_TUNINGS = {"cpu": CPU, "gpu": GPU}

_overrides: list[str] = []
_tf32: list[bool] = []


def _use_device() -> None:
    """Apply MLX_TRANSFORMER_DEVICE, before anything is computed."""
    named = os.environ.get(DEVICE, "")
    if named not in ("", *_TUNINGS):
        raise UserError(f"{DEVICE}={named}: choose cpu or gpu, or unset it")
    if named:
        device = mx.Device(mx.cpu if named == "cpu" else mx.gpu)
        if not mx.is_available(device):
            raise UserError(f"{DEVICE}={named}: MLX sees no GPU here; choose cpu, or unset it")
        mx.set_default_device(device)


def _fill_cpu_streams() -> None:
    """Raise MLX's limit for breadth-first scheduling, so that all CPU streams have work.

    If the graph is wider than the limit (default 20 arrays), MLX schedules one branch after another, and streams wait
    for each other. With 4000, a training step of `base` uses 1.9 of 2 cores instead of 1.4, in the same memory. MLX
    reads the variable once per process, before the first array.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        os.environ.setdefault("MLX_BFS_MAX_WIDTH", "4000")


_use_device()
_fill_cpu_streams()


def tuning() -> Tuning:
    """The tuning for MLX's default device, unless overridden (see the module's docstring).

    Raises `UserError` if MLX_TRANSFORMER_DEVICE_CHOICES is neither cpu nor gpu.
    """
    kind = _overrides[-1] if _overrides else os.environ.get(VARIABLE, "")
    if kind and kind not in _TUNINGS:
        raise UserError(f"{VARIABLE}={kind}: choose cpu or gpu, or unset it")
    if kind == "gpu" and not _on_gpu() and not _overrides:
        _set_fusing(False)
    return _TUNINGS[kind or ("gpu" if _on_gpu() else "cpu")]


@contextmanager
def deciding_as(kind: str) -> Iterator[None]:
    """Use the tuning of a "cpu" or "gpu" within the block, in all threads; MLX's device stays the same."""
    _overrides.append(kind)
    rehearsed = kind == "gpu" and not _on_gpu()
    if rehearsed:
        _set_fusing(False)
    try:
        yield
    finally:
        _overrides.pop()
        if rehearsed:
            _set_fusing(True)


def device_kind() -> str:
    """MLX's default device: "cpu", "metal" or "cuda"."""
    if not _on_gpu():
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def device_record() -> str:
    """The device for a run's record, e.g. "metal", or "cpu, deciding as a gpu" if the tuning is overridden."""
    device_tuning = GPU if _on_gpu() else CPU
    kind = next(kind for kind, one in _TUNINGS.items() if one == tuning())
    return device_kind() if tuning() == device_tuning else f"{device_kind()}, deciding as a {kind}"


def gradient_device(queries: int) -> mx.Device:
    """A device on which attention with this many queries has a gradient: MLX's default device, else the CPU."""
    return mx.default_device() if queries >= tuning().shortest else mx.Device(mx.cpu)


def cpu_streams() -> list[mx.Stream]:
    """A new CPU stream for each fast core this process may use, as an MLX stream runs on one core.

    On a GPU only its default stream.
    """
    if _on_gpu():
        return [mx.default_stream(mx.default_device())]
    return [mx.new_stream(mx.cpu) for _ in range(fast_cores())]


@contextmanager
def training_memory(cache: float | None, most: float | None = None) -> Iterator[None]:
    """Set MLX's memory limits for training on a GPU; does nothing on a CPU.

    cache: bytes of freed arrays that are kept for reuse; None: MLX's default. most: further limit in bytes on Metal.

    On Metal, arrays up to the size that macOS recommends stay resident (from macOS 15 on). Beyond that, or beyond
    `most`, MLX waits for running work before it allocates more. By default it would allocate half as much again, at
    which a Mac swaps.
    """
    if not _on_gpu():
        yield
        return
    limits: list[tuple[Callable[[int], int], int]] = []
    if cache is not None:
        limits.append((mx.set_cache_limit, int(cache)))
    if device_kind() == "metal":
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        limits.append((mx.set_memory_limit, recommended if most is None else min(recommended, int(most))))
        limits.append((mx.set_wired_limit, recommended))
    before = [(set_limit, set_limit(limit)) for set_limit, limit in limits]
    try:
        yield
    finally:
        for set_limit, limit in before:
            set_limit(limit)


def set_tf32(on: bool) -> None:
    """Allow or forbid TF32 rounding in a GPU's float32 products, which some GPUs use by default.

    Call it before the first product, as MLX reads the setting once per process. Raises `UserError` if it was set to the
    other value before.
    """
    if _tf32 not in ([], [on]):
        raise UserError("mlx:gpu: float32 and tf32 can't be compared in one run: MLX takes one setting a process")
    _tf32[:] = [on]
    os.environ["MLX_ENABLE_TF32"] = "1" if on else "0"


def check_float32(device: mx.Device) -> None:
    """Raise `UserError` if the device multiplies in TF32, whose 10 bits round 1 + 2^-12 to 1."""
    with mx.stream(device):
        ones = mx.ones((256, 256))
        product = ((1 + 2.0**-12) * ones @ ones)[0, 0].item()
    if product != 256 + 2.0**-4:
        raise UserError(
            f"MLX multiplies in TF32 on {device} in this process: set MLX_ENABLE_TF32=0 before its first product"
        )


def _on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def _set_fusing(on: bool) -> None:
    """Turn the fusing of compiled functions into kernels on or off. They are traced and simplified in both cases.

    Trying a GPU's tuning on a CPU needs only the tracing. Fusing would start a C++ compiler, which takes minutes for a
    training step. MLX offers CompileMode {disabled, no_simplify, no_fuse, enabled} only in C++.
    """
    library = next(Path(mx.__file__).parent.glob("lib/libmlx.*"), None)
    set_mode = None if library is None else getattr(ctypes.CDLL(str(library)), _SET_MODE, None)
    if on:
        mx.enable_compile()
    elif set_mode is not None:
        set_mode(ctypes.c_int(2))
    else:
        mx.disable_compile()  # another build of MLX: run uncompiled, without tracing


_SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
