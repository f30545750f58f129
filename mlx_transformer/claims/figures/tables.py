"""Figures that are best read as text: a page and a terminal show them so."""

from __future__ import annotations

from mlx_transformer.claims import attention, cost, norms, worked

from .drawing import Table


def double_width() -> Table:
    found = cost.double_width()
    rows = []
    for label, name in zip(("parameters of an encoder layer", "multiplications, 100 positions"), found, strict=False):
        one, two = found[name]  # type: ignore
        rows.append((label, f"{one:,}", f"{two:,}", f"{two / one:.2f}"))
    return Table(("quantity", "added: d = 512", "appended: d = 1024", "times"), tuple(rows))


def worked_sums() -> Table:
    """Every word of the sentence, the position that is added to it, and their sum, as far as the notes give them."""
    found = dict(zip(worked.POSITIONS, worked.sums(), strict=True))
    rows = []
    for place, word in enumerate(worked.SENTENCE):
        lines = {word: worked.WORDS[word]}
        lines[f"+ position {place}"] = worked.POSITIONS.get(place)
        lines[f"= {word} at {place}"] = found.get(place)
        for name, values in lines.items():
            cells = ["not given"] * 5 if values is None else [f"{value:.3f}" for value in values]
            rows.append((name, *cells))
    return Table(("word, position, sum", *(f"feature {i}" for i in range(1, 6))), tuple(rows))


def lion_kills_deer() -> Table:
    changes = attention.word_changes("lion kills deer", "deer kills lion")
    rows = [(word, f"{each['none']:.1e}", f"{each['sinusoidal']:.3f}") for word, each in changes.items()]
    return Table(("word", "change of its output, without positions", "with positions"), tuple(rows))


def other_orders() -> Table:
    rows = []
    for name, pair in attention.ORDERS.items():
        each = attention.reordered(*pair)
        rows.append((name, f"{each['none']:.1e}", f"{each['sinusoidal']:.3f}"))
    return Table(("both orders", "change of a weight, without positions", "with positions"), tuple(rows))


def six_headings() -> Table:
    found = norms.transposed()

    def two(layer: str, batch: str) -> tuple[str, str]:
        return tuple(f"{found[name]:.3g}" for name in (layer, batch))  # type: ignore

    use = two("layer norm, change between training and use", "batch norm, the same")
    counts = found["parameters, layer norm and batch norm"]
    mean, variance = two("largest |mean| after it", "largest |variance - 1| after it")
    rows = (
        ("scope", "one position's features", "one feature's positions"),
        ("training dynamics: change from training to use", *use),
        ("applicability: a batch of one", "normed", "refused"),
        (
            "robustness: change by batch mates",
            *(f"{change:.3g}" for change in list(norms.batch_mates().values())[:2]),
        ),
        ("parametrisation: of a width of 16", *(str(int(c)) for c in counts)),  # type: ignore
        ("input dependence: |mean|, |variance - 1| of a position", f"{mean}, {variance}", "of the batch instead"),
    )
    return Table(("heading", "layer norm", "batch norm"), rows)
