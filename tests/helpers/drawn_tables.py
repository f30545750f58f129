"""Each table of the claims beside the numbers of its rows: `TABLES`, by the function that makes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from claims import norms, order
from claims.worked import SENTENCE, WORDS
from drawn_claims import Computed
from imports import ROOT

TABLES: dict[str, Callable[[tuple, tuple, Computed], None]] = {}


def check_table(function: Callable[[tuple, tuple, Computed], None]) -> Callable[[tuple, tuple, Computed], None]:
    TABLES[function.__name__] = function
    return function


@check_table
def worked_sums(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("word, position, sum", *(f"feature {i}" for i in range(1, 6)))
    lines = [(row[0], row[1:]) for row in rows]
    for place, name in ((1, "first CAT"), (5, "second CAT")):
        word, position, total = lines[3 * place : 3 * place + 3]
        assert (word[0], position[0], total[0]) == ("CAT", f"+ position {place}", f"= CAT at {place}")
        assert total[1] == tuple(f"{value:.3f}" for value in computed(43)[name])
        added = np.add(*(np.array(cells, dtype=np.float64) for cells in (word[1], position[1])))
        assert total[1] == tuple(f"{value:.3f}" for value in added)
    for place, word in enumerate(SENTENCE):
        names = [name for name, _ in lines[3 * place : 3 * place + 3]]
        assert names == [word, f"+ position {place}", f"= {word} at {place}"]
        assert lines[3 * place][1] == tuple(f"{value:.3f}" for value in WORDS[word])


@check_table
def lion_kills_deer(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("word", "change of its output, without positions", "with positions")
    found = computed(19)
    plain = found["lion, kills, deer: change of a word's output, without positions"]
    placed = found["the same with positions"]
    words = ("lion", "kills", "deer")
    assert rows == tuple((w, f"{a:.1e}", f"{b:.3f}") for w, a, b in zip(words, plain, placed, strict=True))


@check_table
def other_orders(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("both orders", "change of a weight, without positions", "with positions")
    found = computed(44)
    plain = found["largest change of a weight between both orders, without positions"]
    placed = found["the same with positions"]
    assert rows == tuple((name, f"{a:.1e}", f"{b:.3f}") for name, a, b in zip(order.ORDERS, plain, placed, strict=True))


@check_table
def double_width(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("quantity", "added: d = 512", "appended: d = 1024", "times")
    found = computed(39)
    names = {
        "parameters of an encoder layer": "parameters of an encoder layer, d = 512 and 1024",
        "multiplications of its self-attention": "of its self-attention alone",
    }
    whole = "multiplications of an encoder layer over 100 positions, the same"
    expected = [(label, *found[name]) for label, name in names.items()]
    expected.insert(1, ("multiplications of the layer, 100 positions", *found[whole]))
    assert rows == tuple((label, f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}") for label, one, two in expected)


@check_table
def six_headings(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("heading", "layer norm", "batch norm")
    found, mates = computed(40), computed(24)
    cells = {row[0].partition(":")[0]: row[1:] for row in rows}
    assert cells.keys() == norms.HEADINGS.keys()
    assert cells["scope"] == ("one position's features", "one feature's positions")
    use = [found[name][0] for name in ("layer norm, change between training and use", "batch norm, the same")]
    assert cells["training dynamics"] == tuple(f"{value:.3g}" for value in use)
    assert cells["applicability"] == (
        "normed",
        "refused" if found["batch norm refuses a batch of one token"][0] else "",
    )
    change = [mates[n][0] for n in ("change of a sample's output by other batch mates, layer norm", "batch norm")]
    assert cells["robustness"] == tuple(f"{value:.3g}" for value in change)
    assert cells["parametrisation"] == tuple(f"{n:.0f}" for n in found["parameters, layer norm and batch norm"])
    mean, variance = (found[name][0] for name in ("largest |mean| after it", "largest |variance - 1| after it"))
    assert cells["input dependence"] == (f"{mean:.3g}, {variance:.3g}", "of the batch instead")


@check_table
def moved(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("positions", "change of the score differences by four words in front")
    kept, changed = list(computed(47).values())[:2]
    expected = zip((*order.RELATIVE, *order.ABSOLUTE), (*kept, *changed), strict=True)
    assert rows == tuple((kind, f"{value:.2g}") for kind, value in expected)


@check_table
def keeping_order(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("change of a word's output", "lion", "kills", "deer")
    names = [name.rpartition(", ")[2] for name in computed(46)]
    assert names == ["RNN", "LSTM", "GRU", "self-attention"]
    assert rows == tuple(
        (n, *(f"{v:.2g}" for v in values)) for n, values in zip(names, computed(46).values(), strict=True)
    )


@check_table
def thinking_machines(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("", "Thinking", "Machines")
    found, cells = computed(50), {row[0]: row[1:] for row in rows}
    assert list(cells) == ["key", "value", "score q_1 · k", "÷ 8", "softmax", "softmax x value", "sum z_1"]
    assert cells["score q_1 · k"] == tuple(f"{value:g}" for value in found["q · k of both words"])
    assert cells["÷ 8"] == tuple(f"{value:g}" for value in found["the same / 8"])
    assert cells["softmax"] == tuple(f"{value:.6f}" for value in found["softmax"])
    key, value, part = (
        [np.array(cell.split(", ")[:2], dtype=np.float64) for cell in cells[name]]
        for name in ("key", "value", "softmax x value")
    )
    assert [64 * row[0] for row in key] == list(found["q · k of both words"])
    for row, weight, weighed in zip(value, found["softmax"], part, strict=True):
        np.testing.assert_allclose(weight * row, weighed, atol=1.1e-3)
    total = np.array(cells["sum z_1"][0].split(", ")[:2], dtype=np.float64)
    np.testing.assert_allclose(sum(part), total, atol=1.1e-3)


@check_table
def groups(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("group", "numbers", "share")
    found = computed(55)
    whole = found["numbers of the base model, 37,000 words"][0]
    names = "embedding, self-attention, cross-attention, feed-forward, norms"
    sizes = dict(zip(names.split(", "), found[names], strict=True)) | {
        "others": found["of no such group"][0],
        "all": whole,
    }
    assert rows == tuple((name, f"{size:,.0f}", f"{size / whole:.2%}") for name, size in sizes.items())


@check_table
def by_machine(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("machine", "time of a multiplication, width 510 / width 512")
    (found,) = computed(31)["CPU time of a multiplication, width 510 / width 512"]
    assert rows[0] == ("this machine, now", f"{found:.2f}")
    told = (ROOT / "docs/claims/README.md").read_text(encoding="utf-8")
    assert len(rows) > 1
    for machine, ratios in rows[1:]:
        first, second, third = ratios.split(", ")
        name, _, threads = machine.partition("), ")
        assert f"{first}, {second} and {third} in three runs on an {name}, {threads})" in told


@check_table
def normed(head: tuple, rows: tuple, computed: Computed) -> None:
    assert head == ("x", "μ", "σ", "(x − μ) / σ")
    assert len(rows) == len(norms.TOKENS)
    for (x, mean, deviation, out), token in zip(rows, norms.TOKENS, strict=True):
        assert x == ", ".join(f"{value:.3f}" for value in token)
        assert (mean, deviation) == (f"{np.mean(token):.4f}", f"{np.sqrt(np.var(token) + norms.EPSILON):.4f}")
        found = computed(23)[f"LN({', '.join(f'{value:g}' for value in token)})"]
        assert out == ", ".join(f"{value:.4f}" for value in found)
