"""The way of the data through the paper's base model, drawn from the table of parameters: a box a group of them."""

from __future__ import annotations

import html
import math
from pathlib import Path

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes

from .svg import Svg

VOCABULARY = 37_000
"""The paper's, of English and German."""
WIDTH, HEIGHT, GAP = 250, 46, 30
LEFT, RIGHT = 20, 350


def draw(root: Path) -> str:
    """`root` is not read: the table is code."""
    config = TransformerConfig.preset("base", VOCABULARY)
    counts = groups(parameter_shapes(config))
    total = sum(counts.values())
    svg = Svg(LEFT + RIGHT + WIDTH, f"The base model: {total:,} parameters")
    heights = {
        side: _stack(svg, x, side, layers, config, counts)
        for side, x, layers in (("encoder", LEFT, config.encoder_layers), ("decoder", RIGHT, config.decoder_layers))
    }
    memory, cross, middle = heights["encoder"][-1] + HEIGHT, heights["decoder"][2], (LEFT + WIDTH + RIGHT) / 2
    svg.path(f"M{LEFT + WIDTH / 2} {memory} v26 H{middle} V{cross + HEIGHT / 2} H{RIGHT - 4}", "arrow")
    svg.text(LEFT, memory + 48, f"memory (B, S, {config.d_model}):")
    svg.text(LEFT, memory + 66, "keys and values of every decoder layer")
    y = heights["decoder"][-1] + HEIGHT + GAP
    svg.path(f"M{RIGHT + WIDTH / 2} {y - GAP} v{GAP - 4}", "arrow")
    shared = "the embedding's matrix once more" if config.tie_embeddings == "all" else "its own matrix"
    svg.box(RIGHT, y, WIDTH, HEIGHT, "classifier", shared)
    svg.path(f"M{RIGHT + WIDTH / 2} {y + HEIGHT} v{GAP - 4}", "arrow")
    svg.text(RIGHT + WIDTH / 2 - 70, y + HEIGHT + GAP + 14, f"logits (B, T, {VOCABULARY:,})")
    return svg.figure(
        y + HEIGHT + GAP + 26,
        f"The base model as its table of parameters has it: {total:,} numbers, of which the one embedding "
        f"matrix that all three places share is {counts['embedding']:,}.",
    )


def groups(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """encoder.layers.0.self_attention.query_proj.weight -> encoder.layers.0.self_attention, with all its numbers."""
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        group = ".".join(parts[: 4 if "layers" in parts else 1])
        counts[group] = counts.get(group, 0) + math.prod(shape)
    return counts


def _stack(svg: Svg, x: int, side: str, layers: int, config: TransformerConfig, counts: dict[str, int]) -> list[float]:
    """Boxes from the ids to the stack's output; the tops of them."""
    ids = {"encoder": "source ids (B, S)", "decoder": "target ids (B, T), shifted right"}[side]
    svg.text(x + WIDTH / 2 - len(ids) * 3.3, 18, ids)
    boxes = [("embedding + positions", f"({VOCABULARY:,}, {config.d_model}), times the root of {config.d_model}")]
    first = f"{side}.layers.0."
    names = [name.removeprefix(first) for name in counts if name.startswith(first)]
    for name in names:
        if not name.endswith("_norm"):
            both = counts[first + name], counts[f"{first}{name}_norm"]
            boxes.append((f"{name.replace('_', ' ')}, add and norm", f"{both[0]:,} + {both[1]:,} numbers"))
    tops, y = [], 32.0
    for index, (title, note) in enumerate(boxes):
        svg.path(f"M{x + WIDTH / 2} {y - (8 if index == 0 else GAP)} v{(8 if index == 0 else GAP) - 4}", "arrow")
        svg.box(x, y, WIDTH, HEIGHT, title, note)
        tops.append(y)
        y += HEIGHT + GAP
    frame = tops[1] - 20
    svg.frame(x - 10, frame, WIDTH + 20, tops[-1] + HEIGHT + 10 - frame, html.escape(f"{layers} ×"))
    return tops
