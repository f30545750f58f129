"""Fast matrix products for MLX on Linux CPUs; does nothing on macOS, with CUDA, or where the parts are missing.

MLX's Linux wheel is linked to the reference BLAS, 15 to 60 times slower than OpenBLAS at float32 matmul. OpenBLAS
comes from PyPI as `scipy-openblas32`, built for the same 32-bit integer interface but with prefixed names
(`scipy_cblas_sgemm`), so preloading it changes nothing. Instead the three `cblas_*gemm` slots of libmlx.so's own jump
table (the ELF relocations of type JUMP_SLOT, in which the dynamic linker keeps the addresses of imported functions)
are pointed at OpenBLAS. Nothing on disk is touched and no other library in the process is affected.
MLX_TRANSFORMER_BLAS=wheel leaves MLX as it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

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
