"""Fast matrix products for MLX on Linux CPUs; does nothing on macOS, with CUDA, or where the parts are missing.

MLX's Linux wheel is linked to the reference BLAS, 15 to 60 times slower than OpenBLAS at float32 matmul. OpenBLAS
comes from PyPI as `scipy-openblas32`, built for the same 32-bit integer interface but with prefixed names
(`scipy_cblas_sgemm`), so preloading it changes nothing. Instead the three `cblas_*gemm` slots of libmlx.so's own jump
table (the ELF relocations of type JUMP_SLOT, in which the dynamic linker keeps the addresses of imported functions)
are pointed at OpenBLAS. Nothing on disk is touched and no other library in the process is affected.
MLX_TRANSFORMER_BLAS=wheel leaves MLX as it is.

The differences between MLX's devices, decided in one place: what is compiled, how batches are cut, when the host
asks.

`tuning()` follows MLX's default device, and with it `mx.stream(mx.cpu)`. Where there is no GPU its choices can be
rehearsed on the CPU: for a whole process by MLX_TRANSFORMER_DEVICE_CHOICES=gpu, for a block by `deciding_as("gpu")`.
MLX_TRANSFORMER_DEVICE=cpu takes the CPU of a machine that has a GPU.
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
"""R_X86_64_JUMP_SLOT and R_AARCH64_JUMP_SLOT: the type of relocation by the machine's name."""
# Tags of the ELF dynamic section.
_PLTRELSZ, _STRTAB, _SYMTAB, _JMPREL = 2, 5, 6, 23


@cache
def use_fast_blas() -> str:
    """Point MLX's matrix products at OpenBLAS, once a process; returns what is in use, for the run's record.

    "openblas <config>" after a change, otherwise "mlx" with the reason. Never raises: without it MLX is only slower.
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
        # Two threads would wait for each other by spinning: beside other work, decoding took six times as long.
        openblas.scipy_openblas_set_num_threads(1)
    openblas.scipy_openblas_get_config.restype = ctypes.c_char_p
    return "openblas " + openblas.scipy_openblas_get_config().decode().removeprefix("OpenBLAS").strip()


def set_blas_threads(threads: int) -> None:
    """Threads of one matrix product; 1, the default, is right for decoding and for streams side by side."""
    openblas = _openblas() if use_fast_blas().startswith("openblas") else None
    if openblas is not None:
        openblas.scipy_openblas_set_num_threads(threads)


@cache
def _openblas() -> ctypes.CDLL | None:
    # The package is found, not imported: it looks up its own version, which takes as long as to open a small model.
    package = find_spec("scipy_openblas32")
    folders = (package.submodule_search_locations or ()) if package else ()
    files = [file for folder in folders for file in Path(folder, "lib").glob("libscipy_openblas*")]
    try:
        return ctypes.CDLL(str(files[0])) if files else None
    except OSError:
        return None


def _loaded(library: str) -> tuple[int, int] | None:
    """Return (base address, address of the dynamic section) of a library of this process, from the linker's own
    list."""
    address = ctypes.c_void_p()
    try:
        handle = ctypes.CDLL(library, os.RTLD_NOW | os.RTLD_NOLOAD)._handle
        failed = ctypes.CDLL(None).dlinfo(ctypes.c_void_p(handle), 2, ctypes.byref(address))  # RTLD_DI_LINKMAP
    except (OSError, AttributeError):  # it isn't loaded, or another C library
        return None
    if failed or address.value is None:
        return None
    # struct link_map: l_addr at 0, l_name at 8, l_ld at 16.
    base, dynamic = (ctypes.c_uint64.from_address(address.value + at).value for at in (0, 16))
    return base, dynamic


def _jump_slots(base: int, dynamic: int) -> dict[str, int]:
    """Return {function name: address of its slot} for the gemms that the library imports."""
    tags: dict[int, int] = {}
    while (tag := ctypes.c_int64.from_address(dynamic).value) != 0:
        tags[tag] = ctypes.c_uint64.from_address(dynamic + 8).value
        dynamic += 16
    if not {_PLTRELSZ, _STRTAB, _SYMTAB, _JMPREL} <= tags.keys():
        return {}
    # glibc stores absolute addresses in these entries after loading, other linkers offsets.
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
    """How to use one kind of device."""

    compiles: bool
    """The training step and the activations are compiled functions. On Linux CPUs `mx.compile` would start a C++
    compiler at run time and gain nothing; there the step is split over streams, one a core."""
    few_shapes: bool
    """Training batches come in few shapes, for a compiled function is built again for each. Otherwise each is tight."""
    shortest: int
    """Positions that a training batch has at least. On GPUs the fused attention for 8 queries or fewer has no gradient
    (it may throw), so that those take 16."""
    exp_as_power: bool
    """e^x is computed as a power of two, which MLX's CPU backend takes from the C library, 2.5 times faster."""
    check_every: int
    """A search asks "all finished?" after so many steps: on a GPU each question waits for the work in its queue."""
    drop_below: float
    """A search drops finished rows when at most this share still runs. On a GPU a smaller batch costs nearly the same,
    so that few shapes occur."""
    unpack_from: float
    """Rows of activations from which an adapter's base is multiplied as the numbers that its integers stand for. MLX's
    CPU backend multiplies integers one by one (4 bits, 256 x 256, 512 rows: 29 ms, unpacked 0.8), its GPUs' kernels as
    fast as numbers."""


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
    """Use the device that the variable names, before anything is computed."""
    named = os.environ.get(DEVICE, "")
    if named not in ("", *_TUNINGS):
        raise UserError(f"{DEVICE}={named}: choose cpu or gpu, or unset it")
    if named:
        device = mx.Device(mx.cpu if named == "cpu" else mx.gpu)
        if not mx.is_available(device):
            raise UserError(f"{DEVICE}={named}: MLX sees no GPU here; choose cpu, or unset it")
        mx.set_default_device(device)


def _fill_cpu_streams() -> None:
    """Let MLX order its work across the streams of a CPU. Beyond a width (20 arrays, if nobody says otherwise) it goes
    down one branch after another, so that streams wait for each other: a step of `base` used 1.4 cores of 2, now 1.9,
    with the same memory. MLX reads its setting once a process, before the first array."""
    if mx.default_device().type == mx.DeviceType.cpu:
        os.environ.setdefault("MLX_BFS_MAX_WIDTH", "4000")


_use_device()
_fill_cpu_streams()


def tuning() -> Tuning:
    """Return the choices of MLX's default device, unless overridden. `UserError` if the variable names no device."""
    kind = _overrides[-1] if _overrides else os.environ.get(VARIABLE, "")
    if kind and kind not in _TUNINGS:
        raise UserError(f"{VARIABLE}={kind}: choose cpu or gpu, or unset it")
    if kind == "gpu" and not _on_gpu() and not _overrides:
        _set_fusing(False)
    return _TUNINGS[kind or ("gpu" if _on_gpu() else "cpu")]


@contextmanager
def deciding_as(kind: str) -> Iterator[None]:
    """Decide as for a "cpu" or a "gpu" in this block, in every thread, whatever MLX's default device is."""
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
    """Return MLX's default device: cpu, metal or cuda."""
    if not _on_gpu():
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def device_record() -> str:
    """Return the device as a run's record has it: with another one's choices it is another one."""
    device_tuning = GPU if _on_gpu() else CPU
    kind = next(kind for kind, one in _TUNINGS.items() if one == tuning())
    return device_kind() if tuning() == device_tuning else f"{device_kind()}, deciding as a {kind}"


def gradient_device(queries: int) -> mx.Device:
    """Return where attention over sequences of this length has a gradient: MLX's default device, or else the CPU."""
    return mx.default_device() if queries >= tuning().shortest else mx.Device(mx.cpu)


def cpu_streams() -> list[mx.Stream]:
    """Return one new stream for each fast core that this process may use (a container or `taskset` may allow fewer than
    there are): one MLX stream runs on one core. On a GPU its own."""
    if _on_gpu():
        return [mx.default_stream(mx.default_device())]
    return [mx.new_stream(mx.cpu) for _ in range(fast_cores())]


@contextmanager
def training_memory(cache: float | None, most: float | None = None) -> Iterator[None]:
    """Set memory for a run that trains on a GPU: freed arrays are kept for reuse up to `cache` bytes (None: as MLX
    does). On Metal arrays stay resident up to what the system recommends (macOS 15; earlier ones ignore it), and beyond
    it, or beyond `most` bytes if that is less, MLX waits for running work before it takes more; left alone it goes on
    to half as much again, where a Mac swaps."""
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
    """Set whether a GPU's float32 products may round to TF32, as they do by default on some. Before the first product:
    MLX reads its setting once a process. `UserError` where it is too late, or was set otherwise before."""
    if _tf32 not in ([], [on]):
        raise UserError("mlx:gpu: float32 and tf32 can't be compared in one run: MLX takes one setting a process")
    _tf32[:] = [on]
    os.environ["MLX_ENABLE_TF32"] = "1" if on else "0"


def check_float32(device: mx.Device) -> None:
    """Raise `UserError` where a product of this device isn't float32's. In TF32's 10 bits 1 + 2^-12 is 1."""
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
    """Set whether compiled functions are fused into kernels as well. Traced and simplified they are either way, which
    is what a rehearsal needs, but on a CPU fusing starts a C++ compiler (minutes for a training step).

    MLX's CompileMode {disabled, no_simplify, no_fuse, enabled} is known to its C++ interface alone.
    """
    library = next(Path(mx.__file__).parent.glob("lib/libmlx.*"), None)
    set_mode = None if library is None else getattr(ctypes.CDLL(str(library)), _SET_MODE, None)
    if on:
        mx.enable_compile()
    elif set_mode is not None:
        set_mode(ctypes.c_int(2))
    else:
        mx.disable_compile()  # another build: run as written, never traced


_SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
