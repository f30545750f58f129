"""int8_scales.json in a checkpoint's folder: the scales with which its products are computed in int8.

    {"format": 1,
     "origin": {"text": "valid.en", "sha256": "...", "sentences": 300, "rule": "largest"},
     "products": {"embedding.weight": {"activation": 8.778, "weight": 254.1},
                  "decoder.layers.0.feed_forward.up_proj.weight": {"activation": 12.5},
                  "decoder.layers.0.feed_forward.down_proj.weight": {"activation": 40.25, "steps": 255}, ...}}

An entry for each matrix of a linear map or an embedding, by the name of its parameter. `activation` a and `steps` say
how what is multiplied with it becomes integers, `weight` m how it does itself, a row of it at a time where m is absent:

    x   steps 127   round_half_even(clip(x a, -127, 127))
              128   round_half_even(clip(x a, -128, 127)): all that a byte holds, which saves a graph the clipping
              255   round_half_even(clip(x a, 0, 255)), of what is never negative
    W               round_half_even(W m)

Without `activation` each token has a scale of its own, from its largest magnitude: nobody has seen what comes there. An
embedding that is only looked up has none. Numbers are float32, and come back bit for bit.

{"float32": true}, of an encoder alone, says that a matrix is no integers at all: it, and what is multiplied with it,
stay float32. Its layer, in options and reports, is what bears its name up to the projection: embedding,
encoder.layers.0.self_attention, encoder.layers.0.feed_forward.
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
"""Steps on either side of zero, of which the last two have one more below it; and from zero up, as behind a ReLU."""
STEPS = (SYMMETRIC, SIGNED, UNSIGNED)


@dataclass(frozen=True)
class ProductScales:
    """The multipliers of one matrix and of what is multiplied with it, float32; None: not fixed."""

    activation: np.float32 | None = None
    steps: int = SYMMETRIC
    weight: np.float32 | None = None
    float32: bool = False
    """Nothing of it is an integer."""


FLOAT32 = ProductScales(float32=True)


@dataclass(frozen=True)
class Int8Scales:
    """The scales of all products. `origin`: where they come from, numbers and text by name."""

    products: Mapping[str, ProductScales]
    origin: Mapping[str, str | int | float] = field(default_factory=dict)

    def of(self, name: str) -> ProductScales:
        """Return a matrix's; without an entry nothing is fixed."""
        return self.products.get(name, ProductScales())

    @property
    def is_fixed(self) -> bool:
        """Whether there are any scales."""
        return any(entry.activation is not None or entry.weight is not None for entry in self.products.values())

    @property
    def may_overflow(self) -> bool:
        """Whether a sum of two products may need more than 16 bits, which x86 processors without VNNI give it: a
        calibration of this project takes no such multipliers, those of a file are as they are."""
        multiplied = any(entry.weight is not None for entry in self.products.values())
        ours = "percentile" in self.origin and any(entry.steps != SYMMETRIC for entry in self.products.values())
        return multiplied and not ours

    @property
    def float32(self) -> list[str]:
        """The layers that stay float32, in the order of the network; single matrices where not all of a layer do."""
        matrices = []
        for layer, names in layers_of(self.products).items():
            whole = [name for name in names if self.of(name).float32]
            matrices += [layer] if whole == names else [name.removesuffix(".weight") for name in whole]
        return matrices

    def leaving(self, layers: Iterable[str], config: TransformerConfig) -> Int8Scales:
        """Return the same but for these layers, or parts of them, which stay float32: encoder.layers.0 is all of a
        layer, encoder.layers.0.feed_forward.down_proj one matrix. `UserError` for one that the model hasn't."""
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
        """Write the text of the file."""
        products = {name: dict(_written(entry)) for name, entry in self.products.items()}
        return json.dumps({"format": FORMAT, "origin": {**self.origin}, "products": products}, indent=2) + "\n"

    @classmethod
    def parse(cls, values: Any, config: TransformerConfig, where: str) -> Int8Scales:
        """Read what `json` writes, for a model of this config. `UserError` lists all that is wrong with it."""
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
    """Read the file in a folder; None if there is none. `UserError` if it is damaged or doesn't fit the model."""
    file = folder / INT8_SCALES
    return Int8Scales.parse(read_json(file), config, str(file)) if file.is_file() else None


def multiplied_names(config: TransformerConfig) -> set[str]:
    """Matrices that activations are multiplied with: all but the tables that are only looked up."""
    classifier = {output_weight_name(config)} if config.head.classifies else set()
    return set(quantizable_shapes(config)) - (embedding_names(config) - classifier)


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the layers of an encoder, and the matrices of each."""
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
    """Return whether a number and its reciprocal are normal float32 numbers."""
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
