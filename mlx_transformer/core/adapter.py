"""Adapters: the changes that LoRA or DoRA has learned for some matrices of a checkpoint, the base.

An adapter is a folder of two files that can be shipped without the base. adapter.json holds the settings and the
SHA-256 of the base's model.safetensors. adapter.safetensors holds float32 arrays of rank R for each target, a linear
map with weight W (O, D):

    PATH.lora_a (R, D), PATH.lora_b (O, R)    U = W + alpha/R B A         LoRA: Hu et al. 2021, equation 3
    PATH.magnitude (O,), DoRA only            m U / ||U||                 DoRA: Liu et al. 2024, equation 5

||U|| is the norm of each row, i.e. of each output, as in DoRA's code.

Both files may also lie in the base's own folder, which then is the adapted model. Its quantised matrices stay integers,
as merging the adapter would round them a second time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.durable import Output, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import Checked, unknown_keys
from mlx_transformer.system.files import read_json
from mlx_transformer.system.manifest import read_manifest
from mlx_transformer.system.tensors import read_tensors, write_tensors

from .card import first_lines, keys_of, put_card
from .config import AdapterAlpha, AdapterKind, AdapterRank, Rate, TransformerConfig
from .folders import ADAPTER, ARRAYS
from .parameters import parameter_shapes

FORMAT = 1
A, B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
SMALLEST_NORM = float(np.finfo(np.float32).tiny)
"""Smallest divisor for DoRA's norm, so that a row of zeros stays zero."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Checked):
    """Settings of an adapter (adapter.json). Raises `UserError` for invalid values."""

    kind: AdapterKind
    rank: AdapterRank
    alpha: AdapterAlpha
    dropout: Rate = 0.0
    """Dropout of the adapter's inputs, in training only."""
    base: str
    """SHA-256 of the base's model.safetensors."""
    targets: tuple[str, ...]
    """The adapted linear maps, e.g. "decoder.layers.0.self_attention.query_proj"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets or not all(isinstance(target, str) for target in self.targets):
            raise UserError("targets must be names of linear maps")

    @property
    def factor(self) -> float:
        """The factor of B A: alpha / rank, as in section 4.1 of LoRA's paper."""
        return self.alpha / self.rank

    def shapes(self, config: TransformerConfig) -> dict[str, Shape]:
        """{name: shape} of all arrays. Raises `UserError` if the model lacks a target or the rank is too large."""
        maps, shapes = linear_maps(config), dict[str, Shape]()
        for path in self.targets:
            if path not in maps:
                raise UserError(f"{path}: the model has no such linear map")
            rows, width = maps[path]
            if self.rank > min(rows, width):
                raise UserError(f"{path} is {rows} x {width}: no change of it has a rank above {min(rows, width)}")
            shapes |= {f"{path}.{A}": (self.rank, width), f"{path}.{B}": (rows, self.rank)}
            shapes |= {f"{path}.{MAGNITUDE}": (rows,)} if self.kind == "dora" else {}
        return shapes


class WeightDelta(NamedTuple):
    """The change of a matrix W (O, D) by an adapter, computed in float64.

    a: (R, D); b: (O, R); magnitude: (O,) for DoRA, None for LoRA.
    """

    factor: float
    a: NDArray
    b: NDArray
    magnitude: NDArray | None = None

    def of(self, weight: NDArray) -> NDArray[np.float64]:
        """The adapted matrix (O, D), from W (O, D)."""
        changed = self._sum(weight)
        return changed if self.magnitude is None else changed * self._gain(changed)[:, None]

    def gain(self, weight: NDArray) -> NDArray[np.float64] | None:
        """DoRA's factor m / ||U|| of each row (O,), from W (O, D); None for LoRA."""
        return None if self.magnitude is None else self._gain(self._sum(weight))

    def _sum(self, weight: NDArray) -> NDArray[np.float64]:
        return weight.astype(np.float64) + self.factor * (self.b.astype(np.float64) @ self.a.astype(np.float64))

    def _gain(self, changed: NDArray[np.float64]) -> NDArray[np.float64]:
        assert self.magnitude is not None
        return self.magnitude / np.maximum(np.linalg.norm(changed, axis=1), SMALLEST_NORM)


@dataclass(frozen=True)
class Adapter:
    config: AdapterConfig
    arrays: Mapping[str, NDArray]

    def merged(self, name: str, weight: NDArray) -> NDArray:
        """Apply the adapter to a parameter, computed in float64 and rounded once to the parameter's own type."""
        change = self.delta(name)
        return weight if change is None else change.of(weight).astype(weight.dtype)

    def delta(self, name: str) -> WeightDelta | None:
        """The change of a parameter; None if it isn't adapted."""
        path = name.removesuffix(".weight")
        a, b, magnitude = (self.arrays.get(f"{path}.{part}") for part in (A, B, MAGNITUDE))
        return None if a is None or b is None else WeightDelta(self.config.factor, a, b, magnitude)

    def check_base(self, folder: Path, digest: str, where: str) -> None:
        """Raise `UserError` if the adapter was trained from other weights than those of a folder, of this SHA-256."""
        if self.config.base != digest:
            raise UserError(
                f"{where}: belongs to weights of SHA-256 {self.config.base[:12]}..., those of {folder} have "
                f"{digest[:12]}...; give the checkpoint that it was trained from"
            )

    def check_fits(self, config: TransformerConfig, where: str) -> None:
        """Raise `UserError` if an array is missing, unknown, or of the wrong shape for the model. where: the file named
        in the message."""
        try:
            expected = self.config.shapes(config)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        shapes = {name: tuple(array.shape) for name, array in self.arrays.items()}
        if wrong := sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name)):
            name = wrong[0]
            raise UserError(f"{where}: {name} is {shapes.get(name, 'missing')}, expected {expected.get(name, 'none')}")

    def json(self) -> str:
        """The text of adapter.json."""
        values = {"format": FORMAT, **asdict(self.config), "arrays": _digest(self.arrays)}
        return json.dumps(values, indent=2) + "\n"

    def write(self, folder: Path, card: str = "") -> None:
        """Write an adapter folder durably, with a model card; replaces an earlier adapter without asking.

        card: front matter to take over, e.g. from the base's card.
        """
        with replace_folder(Output.any(folder, "adapter")) as temporary:
            self.save(temporary)
            put_card(temporary, self._card(keys_of(card)), folder)

    def save(self, folder: Path) -> None:
        """Write adapter.json and adapter.safetensors into a folder."""
        (folder / ADAPTER).write_text(self.json(), encoding="utf-8")
        write_tensors(folder / ARRAYS, self.arrays)

    def _card(self, known: dict[str, str]) -> str:
        """The text of the model card. known: front matter to take over."""
        c, size = self.config, sum(array.size for array in self.arrays.values())
        made = {
            "library_name": "mlx-transformer",
            "tags": ["mlx", "transformer", c.kind],
            "base_model_relation": "adapter",
        }
        of_the_base = ("base_model", "pipeline_tag")
        return f"""{first_lines(made, {key: lines for key, lines in known.items() if key not in of_the_base})}
# An adapter: {"LoRA" if c.kind == "lora" else "DoRA"} of rank {c.rank}

What was learned on top of a model: a change of {len(c.targets)} of its matrices, {size:,} numbers. It means nothing
without that model, whose `model.safetensors` has the SHA-256 `{c.base}`. If it is on the Hub, name it above:
`base_model: ORG/NAME`.

```sh
mlx-transformer merge BASE ADAPTER --out MODEL
```
"""


def read_adapter(folder: str | Path) -> Adapter:
    """Read an adapter from its folder, a run's folder (which holds `adapter/`) or one of a run's checkpoints.

    Raises `UserError` if there is none or it is damaged.
    """
    places = [place for place in (Path(folder) / "adapter", Path(folder)) if (place / ADAPTER).is_file()]
    if not places:
        raise UserError(f"{folder}: holds no adapter ({ADAPTER}, {ARRAYS}); train --adapter lora makes one")
    return _read(places[0])


def attached_adapter(folder: Path, weights: Callable[[], str]) -> Adapter | None:
    """Read the adapter beside a checkpoint's weights; None if there is none or it is merged into the weights already.

    weights: returns the SHA-256 of the weights. The adapter in a run's checkpoint is merged already; the folder's
    manifest lists it. Raises `UserError` if the adapter is damaged or belongs to other weights.
    """
    if not (folder / ADAPTER).is_file():
        return None
    adapter = _read(folder)
    if (base := adapter.config.base) == (digest := weights()):
        return adapter
    if ADAPTER in (read_manifest(folder) or {}):
        return None
    raise UserError(
        f"{folder / ADAPTER}: belongs to weights of SHA-256 {base[:12]}..., those beside it have {digest[:12]}...; put "
        "it beside the checkpoint that it was trained from"
    )


def _read(folder: Path) -> Adapter:
    values = read_json(folder / ADAPTER)
    try:
        version, digest, targets = (values.pop(key) for key in ("format", "arrays", "targets"))
        if version != FORMAT:
            raise UserError(f"format {version!r} is not known to this version (it reads format {FORMAT})")
        if problems := unknown_keys(values, AdapterConfig):
            raise UserError(problems[0])
        config = AdapterConfig(**values, targets=tuple(targets))
    except (UserError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{folder / ADAPTER}: damaged ({error}); restore it from a copy") from error
    arrays = read_tensors(folder / ARRAYS)
    if _digest(arrays) != digest:
        raise UserError(f"{folder / ARRAYS}: damaged (its SHA-256 differs from {ADAPTER}'s); restore it from a copy")
    return Adapter(config, arrays)


def linear_maps(config: TransformerConfig) -> dict[str, Shape]:
    """{path: shape (O, D)} of all linear maps that can be adapted: those in the layers of encoder and decoder.

    The classifier can't: in most models it is an embedding, and it is as wide as the vocabulary.
    """
    return {
        name.removesuffix(".weight"): shape
        for name, shape in parameter_shapes(config).items()
        if name.endswith("_proj.weight") and ".layers." in name
    }


def _digest(arrays: Mapping[str, NDArray]) -> str:
    """The SHA-256 of all names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
