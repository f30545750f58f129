"""The MLX model with its modules wrapped: each one computes from the reference's values.

A wrapped module notes what it is given and what it makes, and hands on the reference's value instead. The fused
attention shows its queries, keys and values; mask and softmax are looked at in the form that isn't fused. An SSRU shows
its states and the one that it keeps. MLX is imported inside functions, and so is
`unittest.mock`, which brings asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import full_pass, started
from export.validate.findings import inner_names
from mlx_transformer.core.parameters import parameter_shapes

from .inside import HEADS, modules_between
from .isolated_inputs import IsolatedInputs

Array = NDArray
Observe = Callable[[str, Any], Any]
"""(point, what was computed) -> what the calculation goes on with."""


class Wrapped:
    """A module between two points; `before` or `after` may be empty: nothing is noted there."""

    def __init__(self, module: Any, observe: Observe, before: str, after: str, enter: Callable[[], None] | None = None):
        self.module, self.observe, self.before, self.after, self.enter = module, observe, before, after, enter

    def __call__(self, x: Any, *inputs: Any, **named: Any) -> Any:
        if self.enter is not None:
            self.enter()
        y = self.module(self.observe(self.before, x) if self.before else x, *inputs, **named)
        return self.observe(self.after, y) if self.after else y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def run_mlx(engine: Any, s: IsolatedInputs, path: str, tap: str) -> dict[str, Array]:
    """Return {point: what the model's modules make there of the values before it}."""
    computed: dict[str, Array] = {}
    model, case = engine.model, s.case
    observe: Callable[[str, Array], None] = computed.__setitem__
    with engine.stream():
        if s.part is None:
            with replacing(model, s.inputs, observe) as tap_logits:
                full_pass(model, case, tap_logits)
            return computed
        ids, cache = started(model, case)
        for part, inputs in zip(case.passes(), s.earlier, strict=False):
            with replacing(model, inputs, lambda name, value: None):
                model.step(ids[:, part], cache)
        with replacing(model, s.inputs, observe) as tap_logits:
            model.step(ids[:, s.part], cache, tap=tap_logits)
    return computed


@contextmanager
def replacing(
    model: Any,
    inputs: Mapping[str, Array],
    observe: Callable[[str, Array], None],
    only: Collection[str] | None = None,
) -> Iterator[Callable]:
    """Let every module of a `Transformer` work on `inputs` within this context, and give `observe` what it
    makes of them; points that are not in `only` give it nothing, which saves their time.

    Yields the tap to pass to the model, for the points that need no wrapping.
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
    """Return the module of a dotted name."""
    for key in name.split("."):
        model = model[int(key) if key.isdigit() else key]
    return model
