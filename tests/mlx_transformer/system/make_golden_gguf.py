"""GGUF files by the package gguf itself: writes golden_blocks.gguf, golden_written.gguf and golden_gguf.npz beside it.

golden_blocks.gguf has random blocks of each type, and golden_gguf.npz their numbers. golden_written.gguf has the tensor
"rounded" of golden_gguf.npz in each type that we write, and a pair of each kind that we write.

Needs the package, which the tests don't; made by version 0.19.0:
    PEERS/bin/python tests/mlx_transformer/system/make_golden_gguf.py
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import gguf  # type: ignore[import-not-found]
import numpy as np

BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes at which float16 numbers stand, which must be finite."""
HERE = Path(__file__).parent


def random_blocks(random: np.random.Generator, name: str) -> np.ndarray:
    """Two rows of two blocks, as bytes."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    if name not in HALVES:
        numbers = random.standard_normal((2, 8)).astype(np.float32)
        return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[name])
    blocks = random.integers(0, 256, (2, 2, size), dtype=np.uint8)
    for at in HALVES[name]:
        blocks[..., at : at + 2] = random.standard_normal((2, 2, 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(2, -1)


def pairs(writer: gguf.GGUFWriter) -> None:
    writer.add_uint32("a.whole", 4_000_000_000)
    writer.add_float32("a.number", 1e-5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve ▁")
    writer.add_array("a.texts", ["", "\u0120t", "\U0001f600"])


def more_pairs(writer: gguf.GGUFWriter) -> None:
    for kind, value in (("uint8", 255), ("int8", -128), ("uint16", 65535), ("int16", -32768), ("int32", -(2**31))):
        getattr(writer, f"add_{kind}")(f"b.{kind}", value)
    for kind, value in (("uint64", 2**64 - 1), ("int64", -(2**63)), ("float64", 0.1)):
        getattr(writer, f"add_{kind}")(f"b.{kind}", value)
    for name, values in {"integers": [1, -2, 3], "numbers": [0.5, -0.25], "flags": [True, False]}.items():
        writer.add_array(f"b.{name}", values)
    writer.add_array("b.nested", [[1, 2], [3]])


def written(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    random, numbers = np.random.default_rng(20), {}
    writer = gguf.GGUFWriter(HERE / "golden_blocks.gguf", "llama")
    pairs(writer)
    more_pairs(writer)
    for name in BLOCKS:
        kind, raw = gguf.GGMLQuantizationType[name], random_blocks(random, name)
        writer.add_tensor(f"of.{name}", raw, raw_dtype=kind)
        numbers[name] = gguf.quants.dequantize(raw, kind).reshape(2, -1)
    written(writer)
    rounded = random.standard_normal((3, 64)).astype(np.float32)
    rounded[0, 32:] = 0
    rounded[1, :32] = np.round(rounded[1, :32] * 4) / 2  # halves
    rounded[2] *= np.float32(1e-7)
    writer = gguf.GGUFWriter(HERE / "golden_written.gguf", "llama")
    pairs(writer)
    for name in WRITTEN:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(f"of.{name}", gguf.quants.quantize(rounded, kind), raw_dtype=kind)
    written(writer)
    np.savez_compressed(HERE / "golden_gguf.npz", rounded=rounded, **numbers)
    print(f"gguf {version('gguf')}")
