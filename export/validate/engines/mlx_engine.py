"""MLX as an engine, and a context to show or replace the values between its model's modules (`replacing`).

MLX is imported inside functions, as ONNX folders can be validated without it. So is `unittest.mock`, which loads
asyncio.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case, full_pass, search_inputs, started
from export.validate.points import HEADS, inner_names, modules_between
from mlx_transformer.core.checkpoint import Checkpoint, stays_wide
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.decoding.options import Hypothesis, Options
from mlx_transformer.decoding.steps import Model
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.lazy import needs
from mlx_transformer.system.machine import versions
from mlx_transformer.system.tensors import Stored

from .protocol import Capabilities, ModelEngine, Placement, Unavailable, is_large

Array = NDArray
PRECISIONS = ("float32", "float16", "bfloat16", "tf32")


def has_gpu() -> bool:
    """Return whether MLX is installed and sees a GPU (Metal or CUDA)."""
    if find_spec("mlx") is None:
        return False
    import mlx.core as mx

    return mx.is_available(mx.Device(mx.gpu))


class MlxEngine(ModelEngine):
    """A checkpoint's MLX model.

    device: "cpu" or "gpu" (Metal or CUDA). precision: "float32" (without TF32), "float16", "bfloat16" or, on a GPU,
    "tf32".
    """

    name = "mlx"
    capabilities = Capabilities(isolates="mlx")

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu", precision: str = "float32"):
        if find_spec("mlx") is None:
            raise Unavailable(f"runtime mlx is not installed: {needs('train')}")
        if precision not in PRECISIONS or (precision == "tf32" and device == "cpu"):
            known = PRECISIONS if device != "cpu" else PRECISIONS[:-1]
            raise UserError(f"mlx:{device}:{precision}: choose {', '.join(known)}")
        self.precision = precision
        self._open(device)
        if checkpoint.quantization and precision in ("float16", "bfloat16"):
            raise UserError(f"mlx:{device}:{precision}: the weights of a quantised checkpoint are judged in float32")
        self.checkpoint, self._model = checkpoint, None
        self._wide = set[str]()
        # Its means add term by term, and so do its kernels for affine integers; those for short floats add in groups.
        if device == "cpu":
            schemes = checkpoint.quantization.items()
            integers = {name for name, each in schemes if each.affine and each.runs_in_mlx}
            norms = {name for name in parameter_shapes(checkpoint.config) if name.endswith("norm.weight")}
            self.single_sums = frozenset(integers | norms)
        self._rounds_once = device == "gpu" and bool(checkpoint.quantization)
        if not self._is_large:
            self._load()

    @property
    def _is_large(self) -> bool:
        return is_large(sum(stored.nbytes for stored in self.checkpoint.unread().values()))

    def _load(self) -> Any:
        from mlx_transformer.runtime.transformer import Transformer

        kind: Any = "float32" if self.precision == "tf32" else self.precision
        with self.stream():
            self._model = Transformer.load(self.checkpoint.folder, precision=kind)
        self._model.shortlist = None  # searches are compared among all tokens
        return self._model

    @property
    def model(self) -> Any:
        """The `Transformer`; a large one is loaded when it is needed."""
        return self._load() if self._model is None else self._model

    def rest(self) -> None:
        if self._is_large:
            self._model = None
            self.mx.clear_cache()

    def _open(self, device: str) -> None:
        import mlx.core as mx

        from mlx_transformer.device import check_float32, device_kind, set_tf32

        if device not in ("cpu", "gpu"):
            raise UserError(f"mlx:{device}: choose mlx:cpu or mlx:gpu")
        self.mx = mx
        self._device = mx.Device(mx.cpu if device == "cpu" else mx.gpu)
        if not mx.is_available(self._device):
            raise Unavailable("runtime mlx:gpu: MLX sees no GPU here")
        with self.stream():
            self.device = device_kind()
        if device == "gpu":
            set_tf32(self.precision == "tf32")
            if self.precision == "float32":
                check_float32(self._device)

    def stream(self) -> Any:
        """A context in which MLX computes on this device."""
        return self.mx.stream(self._device)

    @property
    def is_exact(self) -> bool:
        """See `Engine`. On a GPU, dequantising with fused multiply-add changes the last bits."""
        return super().is_exact and not self._rounds_once

    @property
    def config(self) -> TransformerConfig:  # type: ignore[override] - the model's: a test may change it
        return self.checkpoint.config if self._model is None else self._model.config

    @property
    def is_training(self) -> bool:  # type: ignore[override]
        return self.model.training

    def details(self) -> dict[str, str]:
        details = {"mlx": versions().get("mlx", ""), "device": str(self._device), "precision": self.precision}
        return details if self.device == "cpu" else details | {"MLX_ENABLE_TF32": os.environ["MLX_ENABLE_TF32"]}

    def placement(self) -> Placement:
        switched = {"1": "on", "0": "off"}.get(os.environ.get("MLX_ENABLE_TF32", "1"), "on")
        tf32 = "none" if self.device == "cpu" else f"{switched} (MLX_ENABLE_TF32)"
        libraries = {name: version for name, version in versions().items() if name.startswith(("mlx", "scipy"))}
        return Placement(self.name, self.device, tf32, "MLX's own", libraries)

    def parameters(self) -> Iterator[tuple[str, str, Array | Stored]]:
        from mlx_transformer.nn.parameters import dense_parameters, named_parameters
        from mlx_transformer.nn.quantize import Quantized

        where = "model in memory"
        if any(isinstance(module, Quantized) for _, module in self.model.named_modules()):
            yield from ((where, name, array) for name, array in dense_parameters(self.model).items())
            return
        for name, x in named_parameters(self.model):
            if x.dtype == self.mx.float32 and stays_wide(name, self.precision, self.config):
                self._wide.add(name)
            dtype = np.dtype(np.float16 if x.dtype == self.mx.float16 else np.float32)
            wide = lambda x=x: np.asarray(x) if x.dtype != self.mx.bfloat16 else self._numpy(x)  # noqa: E731 - no copy
            yield where, name, Stored(x.shape, dtype, lambda wide=wide, dtype=dtype: wide().astype(dtype, copy=False))

    def as_stored(self, where: str, name: str, array: Array) -> Array:
        """See `Engine`. Some parameters stay float32 (`stays_wide`)."""
        return array if name in self._wide else super().as_stored(where, name, array)

    def taps(self, case: Case) -> dict[str, Array]:
        taps: dict[str, Any] = {}
        with self.stream():
            full_pass(self.model, case, taps.__setitem__)
            self.mx.eval(list(taps.values()))
            return {name: self._numpy(value) for name, value in taps.items()}

    def logits(self, case: Case) -> Array:
        with self.stream():
            return self._numpy(full_pass(self.model, case))

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:

        points: dict[str, Array] = {}

        def keep(name: str, value: Array) -> None:
            if name in names:
                points[name] = value

        with self.stream(), replacing(self.model, {}, keep, set(names)):
            full_pass(self.model, case, lambda name, value: keep(name, self._numpy(value)))
        return points

    def _hypotheses(
        self, sources: Sequence[Any], options: Options, candidates: Sequence[Sequence[int]] | None
    ) -> list[list[Hypothesis]]:
        # The method for users. All options are given, so the folder's own settings have no effect.
        with self.stream():
            return self.model.search(**search_inputs(sources), candidates=candidates, **vars(options))

    @contextmanager
    def searching(self) -> Iterator[Model]:
        """See `Engine`. MLX computes on this device inside the context."""
        from mlx_transformer.runtime.decoding import MlxModel, evaluating

        with self.stream(), evaluating(self.model):
            yield MlxModel(self.model)

    def _numpy(self, value: Any) -> Array:
        """Convert to NumPy; bfloat16, unknown to NumPy, becomes float64."""
        if value.dtype == self.mx.bfloat16:
            return np.array(value.astype(self.mx.float32)).astype(np.float64)
        return np.array(value)

    def _cached(self, case: Case, tap: Any) -> Array:
        with self.stream():
            ids, cache = started(self.model, case)
            parts = [self._numpy(self.model.step(ids[:, part], cache, tap=tap)) for part in case.passes()]
        return np.concatenate(parts, axis=1)


Observe = Callable[[str, Any], Any]
"""(point, computed value) -> the value to continue with."""


class Wrapped:
    """Wraps a module. `observe` gets its input as the point `before` and its output as `after`; "" skips either."""

    def __init__(self, module: Any, observe: Observe, before: str, after: str, enter: Callable[[], None] | None = None):
        self.module, self.observe, self.before, self.after, self.enter = module, observe, before, after, enter

    def __call__(self, x: Any, *inputs: Any, **named: Any) -> Any:
        if self.enter is not None:
            self.enter()
        y = self.module(self.observe(self.before, x) if self.before else x, *inputs, **named)
        return self.observe(self.after, y) if self.after else y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@contextmanager
def replacing(
    model: Any,
    inputs: Mapping[str, Array],
    observe: Callable[[str, Array], None],
    only: Collection[str] | None = None,
) -> Iterator[Callable]:
    """In this context `observe` gets every point of an MLX `Transformer`, and points in `inputs` get the value there.

    So each module computes from `inputs` instead of the previous modules' results. only: skip other points, to save
    time. Yields a tap to pass to the model, for points without a wrapped module.
    """
    from unittest.mock import patch

    import mlx.core as mx

    from mlx_transformer.nn import attention as module
    from mlx_transformer.nn import ssru

    def note(point: str, value: Any) -> Any:
        if only is not None and point not in only:
            return value
        observe(point, np.array(value))
        return mx.array(inputs[point]) if point in inputs else value

    current = ""
    fused, rectified, extended = module.attention, ssru.relu, ssru.LayerState.extend

    def attend(q: Any, k: Any, v: Any, *settings: Any) -> Any:
        q, k, v = (note(f"{current}.{part}", x) for part, x in zip(HEADS, (q, k, v), strict=True))
        if only is None or f"{current}.weights" in only:
            note(f"{current}.weights", module.attention_weights(q, k, *settings))
        return fused(q, k, v, *settings)

    def rectify(states: Any) -> Any:
        return note(current, rectified(states))

    def extend(cache: Any, f: Any, v: Any) -> Any:
        states = extended(cache, f, v)
        noted, is_last = note(f"{current}.states", states), mx.array_equal(cache.state, states[:, -1])
        cache.state = note(f"{current}.state", noted[:, -1] if is_last else cache.state)
        return noted

    def entering(name: str) -> Callable[[], None]:
        def enter() -> None:
            nonlocal current
            current = name

        return enter

    with ExitStack() as undo:

        def wrap(owner: Any, key: Any, before: str, after: str, enter: Any = None) -> None:
            original = owner[key]
            owner[key] = Wrapped(original, note, before, after, enter)
            undo.callback(owner.__setitem__, key, original)

        config = model.config
        for name, before, after in modules_between(inner_names(config), parameter_shapes(config)):
            place, _, key = name.rpartition(".")
            wrap(_part(model, place), key, before, after, entering(place))
        for stack in ("encoder", "decoder"):
            layers = model[stack]["layers"] if stack in model else []
            embedding = "" if config.embedding_norm else f"{stack}.embedding"
            for i in range(len(layers)):
                wrap(layers, i, embedding if i == 0 else "", f"{stack}.layers.{i}")
        undo.enter_context(patch.object(module, "attention", attend))
        undo.enter_context(patch.object(ssru, "relu", rectify))
        undo.enter_context(patch.object(ssru.LayerState, "extend", extend))
        yield lambda name, value: observe(name, np.array(value)) if name == "logits" else None


def _part(model: Any, name: str) -> Any:
    """Return a module by its dotted name, e.g. "encoder.layers.0"."""
    for key in name.split("."):
        model = model[int(key) if key.isdigit() else key]
    return model
