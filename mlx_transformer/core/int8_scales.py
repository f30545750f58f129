"""int8_scales.json in a checkpoint's folder: scales for computing its matrix products in int8.

    {"format": 1,
     "origin": {"text": "valid.en", "sha256": "...", "sentences": 300, "rule": "largest"},
     "products": {"embedding.weight": {"activation": 8.778, "weight": 254.1},
                  "decoder.layers.0.feed_forward.up_proj.weight": {"activation": 12.5},
                  "decoder.layers.0.feed_forward.down_proj.weight": {"activation": 40.25, "steps": 255}, ...}}

There is an entry for each matrix W of a linear map or an embedding, by parameter name. The activations x that W is
multiplied with are quantised with `activation` (a) and `steps`, and W with `weight` (m):

    x   steps 127   round_half_even(clip(x a, -127, 127))
              128   round_half_even(clip(x a, -128, 127)): the whole range of int8, so a graph needs no clipping
              255   round_half_even(clip(x a, 0, 255)), for x that is never negative, e.g. after a ReLU
    W               round_half_even(W m)

Without `activation`, each token's scale is computed from its largest magnitude at run time. Without `weight`, each row
of W has its own scale. Embeddings that are only looked up have no `activation`. Numbers are float32 and are read back
bit for bit.

{"float32": true}, in encoder-only models, leaves a matrix and its activations in float32. Options and reports name such
a layer without the projection, e.g. embedding, encoder.layers.0.self_attention or encoder.layers.0.feed_forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.fields import unknown_keys
from mlx_transformer.system.files import read_json

from .config import TransformerConfig
from .parameters import embedding_names, output_weight_name, quantizable_shapes

INT8_SCALES = "int8_scales.json"
FORMAT = 1
SYMMETRIC, SIGNED, UNSIGNED = 127, 128, 255
"""Values of `steps`: -127 to 127, -128 to 127, and 0 to 255 (e.g. after a ReLU)."""
STEPS = (SYMMETRIC, SIGNED, UNSIGNED)


@dataclass(frozen=True)
class ProductScales:
    """Scales of a matrix and its activations; None: computed from the numbers themselves (see above)."""

    activation: np.float32 | None = None
    steps: int = SYMMETRIC
    weight: np.float32 | None = None
    float32: bool = False
    """The matrix and its activations stay float32."""


FLOAT32 = ProductScales(float32=True)


@dataclass(frozen=True)
class Int8Scales:
    """Scales of all matrices. origin: their source, e.g. the calibration text and its SHA-256."""

    products: Mapping[str, ProductScales]
    origin: Mapping[str, str | int | float] = field(default_factory=dict)

    def of(self, name: str) -> ProductScales:
        """The scales of a matrix; the default if it has no entry."""
        return self.products.get(name, ProductScales())

    @property
    def is_fixed(self) -> bool:
        """Whether any scale is fixed in advance."""
        return any(entry.activation is not None or entry.weight is not None for entry in self.products.values())

    @property
    def may_overflow(self) -> bool:
        """Whether a sum of two products may exceed the 16 bits that x86 processors without VNNI have for it.

        Scales from this project's calibration avoid that; scales from other sources may not.
        """
        multiplied = any(entry.weight is not None for entry in self.products.values())
        ours = "percentile" in self.origin and any(entry.steps != SYMMETRIC for entry in self.products.values())
        return multiplied and not ours

    @property
    def float32(self) -> list[str]:
        """The layers left in float32, in network order; single matrices if only part of a layer does."""
        matrices = []
        for layer, names in layers_of(self.products).items():
            whole = [name for name in names if self.of(name).float32]
            matrices += [layer] if whole == names else [name.removesuffix(".weight") for name in whole]
        return matrices

    def leaving(self, layers: Iterable[str], config: TransformerConfig) -> Int8Scales:
        """The same scales with these layers left in float32. Raises `UserError` for layers missing from the model.

        layers: prefixes of parameter names, e.g. "encoder.layers.0" for a whole layer, or
        "encoder.layers.0.feed_forward.down_proj" for one matrix.
        """
        matrices, unquantised = quantizable_shapes(config), set[str]()
        for layer in layers:
            names = [name for name in matrices if f"{name}.".startswith(f"{layer}.")]
            if config.architecture != "encoder":
                raise UserError(f"float32 layer {layer!r}: only an encoder alone has layers that int8 leaves so")
            if not names:
                raise UserError(f"float32 layer {layer!r}: the model has {first_of(list(layers_of(matrices)), ', ')}")
            unquantised |= {*names}
        if not unquantised:
            return self
        return Int8Scales({name: FLOAT32 if name in unquantised else self.of(name) for name in matrices}, self.origin)

    def json(self) -> str:
        """The text of int8_scales.json."""
        products = {name: dict(_written(entry)) for name, entry in self.products.items()}
        return json.dumps({"format": FORMAT, "origin": {**self.origin}, "products": products}, indent=2) + "\n"

    @classmethod
    def parse(cls, values: Any, config: TransformerConfig, where: str) -> Int8Scales:
        """Build from the file's JSON values. Raises `UserError`, starting with `where`, with all problems."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            form = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise UserError(f"{where}: format {form!r} is not known to this version (it reads format {FORMAT})")
        problems = [f"unknown key {key!r}" for key in values if key not in ("format", "origin", "products")]
        origin, products = values.get("origin", {}), values.get("products")
        if not isinstance(origin, dict) or not all(isinstance(value, str | int | float) for value in origin.values()):
            problems.append("origin must be an object of text and numbers")
        if not isinstance(products, dict):
            problems.append("products must be an object with an entry for each matrix")
            products = {}
        else:
            problems += _problems(products, config)
        if problems:
            raise UserError(f"{where}: {first_of(problems)}")
        return cls({name: _read(products[name]) for name in quantizable_shapes(config)}, origin)


def read_int8_scales(folder: Path, config: TransformerConfig) -> Int8Scales | None:
    """Read a folder's int8_scales.json; None if there is none. Raises `UserError` if it is damaged or doesn't fit."""
    file = folder / INT8_SCALES
    return Int8Scales.parse(read_json(file), config, str(file)) if file.is_file() else None


def multiplied_names(config: TransformerConfig) -> set[str]:
    """Matrices used in products with activations, i.e. all except embeddings that are only looked up."""
    classifier = {output_weight_name(config)} if config.head.classifies else set()
    return set(quantizable_shapes(config)) - (embedding_names(config) - classifier)


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """{layer: its matrices} of an encoder, e.g. "encoder.layers.0.self_attention": its four projections."""
    layers: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        layers.setdefault(".".join(parts[:4] if parts[0] == "encoder" else parts[:1]), []).append(name)
    return layers


def _problems(products: Mapping[str, Any], config: TransformerConfig) -> Iterator[str]:
    matrices, multiplied = quantizable_shapes(config), multiplied_names(config)
    for name in matrices:
        if name not in products:
            yield f"missing {name}"
    for name, entry in products.items():
        if name not in matrices:
            yield f"unknown {name}"
        elif not isinstance(entry, dict):
            yield f"{name} must be an object"
        else:
            yield from (f"{name}: {problem}" for problem in unknown_keys(entry, ProductScales))
            for key in ("activation", "weight"):
                if key in entry and not _is_multiplier(entry[key]):
                    yield f"{name}: {key}={entry[key]!r} must be a positive float32 number, and so its reciprocal"
            if type(steps := entry.get("steps", SYMMETRIC)) is not int or steps not in STEPS:
                yield f"{name}: steps={steps!r} must be one of {', '.join(map(str, STEPS))}"
            if "float32" in entry and (entry["float32"] is not True or len(entry) > 1):
                yield f"{name}: float32={entry['float32']!r} must be true, and alone"
            elif "float32" in entry and config.architecture != "encoder":
                yield f"{name}: float32: only an encoder alone has layers that int8 leaves so"
            if name not in multiplied and entry.keys() & {"activation", "steps"}:
                yield f"{name} is only looked up: nothing is multiplied with it"


def _is_multiplier(value: Any) -> bool:
    """Whether a number and its reciprocal are positive normal float32 numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    least, most = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    return least <= value <= most and least <= 1 / value <= most


def _written(entry: ProductScales) -> Iterator[tuple[str, float | bool]]:
    if entry.float32:
        yield "float32", True
    if entry.activation is not None:
        yield "activation", float(entry.activation)
    if entry.steps != SYMMETRIC:
        yield "steps", entry.steps
    if entry.weight is not None:
        yield "weight", float(entry.weight)


def _read(entry: Mapping[str, Any]) -> ProductScales:
    activation, weight = (np.float32(entry[key]) if key in entry else None for key in ("activation", "weight"))
    return ProductScales(activation, entry.get("steps", SYMMETRIC), weight, entry.get("float32", False))
