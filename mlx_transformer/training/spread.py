"""Work on many arrays, each by itself, spread over streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

SMALL = 1 << 14
"""Numbers of an array that are not worth another stream's waiting for them."""


def spread(function: Callable[..., Any], streams: Sequence[mx.Stream]) -> Callable[..., Any]:
    """`function` of an array (and more), each call on the stream that has had the least numbers to work on so far, the
    first one for small arrays.

    Which stream computes a result changes nothing in it. Of none or one stream: `function` itself.
    """
    if len(streams) < 2:
        return function
    given = [0] * len(streams)

    def on_a_stream(array: mx.array, *more: Any) -> Any:
        least = given.index(min(given)) if array.size > SMALL else 0
        given[least] += array.size
        with mx.stream(streams[least]):
            return function(array, *more)

    return on_a_stream
