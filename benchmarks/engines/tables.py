"""What was measured, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

from . import EngineName
from .floor import Shape
from .measure import Cell, Measured, Task

Results = dict[str, Measured]


def speeds(results: Results, cells: list[Cell], task: Task) -> list[str]:
    """Tokens/s, eos counted where the model wrote it: the median of the rounds."""

    def value(name: str, cell: Cell) -> str:
        return f"{task.tokens(results[name].outputs[cell]) / median(results[name].seconds[cell]):,.0f}"

    return table("target tokens/s", list(results), cells, value)


def ratios(results: Results, cells: list[Cell], engine_names: dict[str, EngineName]) -> list[str]:
    """Times as fast as CTranslate2 of the same precision (8 bits for 8 and fewer), in the layout that is the fastest of
    those measured in that cell, compared within each round; with geometric mean."""

    def rivals(name: str) -> list[str]:
        wanted = "int8" if engine_names[name].precision.startswith("int") else "float32"
        return [
            other
            for other in results
            if engine_names[other].family == "ct2" and engine_names[other].precision == wanted
        ]

    def ratio(name: str, cell: Cell) -> float:
        def of(rival: str) -> float:
            pairs = zip(results[rival].seconds[cell], results[name].seconds[cell], strict=True)
            return median(theirs / ours for theirs, ours in pairs)

        return min(map(of, rivals(name)))

    names = list(filter(rivals, results))
    if not names:
        return []
    values = {name: [ratio(name, cell) for cell in cells] for name in names}
    header = "x the fastest layout of CTranslate2"
    lines = table(header, names, cells, lambda name, cell: f"{values[name][cells.index(cell)]:.2f}")
    lines[0] += " geometric mean | least |"
    lines[1] += "-|-|"
    for i, name in enumerate(names):
        mean = math.exp(sum(map(math.log, values[name])) / len(values[name]))
        lines[2 + i] += f" {mean:.2f} | {min(values[name]):.2f} |"
    return lines


def floors(
    results: Results,
    cells: list[Cell],
    engine_names: dict[str, EngineName],
    shape: Shape,
    rates: dict[str, dict],
    task: Task,
) -> list[str]:
    """Share of the speed that the machine's GEMM and bandwidth allow, in percent."""

    def value(name: str, cell: Cell) -> str:
        precision = engine_names[name].precision
        rows = [row for batch in task.batches(cell) for row in batch]
        length = task.tokens(results[name].outputs[cell]) / len(rows)
        source = sum(map(len, rows)) / len(rows)
        least = shape.seconds(precision, rates[precision], cell.batch, cell.beam, source, length)
        return f"{100 * least * len(rows) / cell.batch / median(results[name].seconds[cell]):.0f} %"

    return table("of the floor", [name for name in results if engine_names[name].precision in rates], cells, value)


def properties(
    results: Results, cells: list[Cell], reference: str, bleu: dict[str, dict[int, float]] | None
) -> list[str]:
    """Loading, memory, latency, and whether the outputs are the reference's."""
    beams = sorted({cell.beam for cell in cells})
    columns = ["load, s", "loaded, MB", "peak, MB", "first token, ms"]
    columns += [f"sentences identical to {reference}, {'greedy' if beam == 1 else f'beam {beam}'}" for beam in beams]
    taught = any(result.taught is not None for result in results.values())
    columns += ["next token agrees"] if taught else []
    columns += [f"BLEU, {'greedy' if beam == 1 else f'beam {beam}'}" for beam in beams] if bleu else []
    lines = [f"| | {' | '.join(columns)} |", "|" + "-|" * (len(columns) + 1)]
    for name, result in results.items():
        values = [f"{result.load:.2f}", f"{result.resident / 1e6:.0f}", f"{result.peak / 1e6:.0f}"]
        values += [f"{1000 * result.first:.1f}"]
        for beam in beams:
            of = [cell for cell in cells if cell.beam == beam]
            pairs = [
                pair for cell in of for pair in zip(result.outputs[cell], results[reference].outputs[cell], strict=True)
            ]
            values.append(f"{sum(a == b for a, b in pairs)} of {len(pairs)}")
        if taught:
            values.append("" if result.taught is None else f"{100 * result.taught:.1f} %")
        values += [f"{bleu[name][beam]:.2f}" for beam in beams] if bleu else []
        lines.append(f"| {name} | {' | '.join(values)} |")
    return lines


def table(header: str, names: list[str], cells: list[Cell], value: Callable[[str, Cell], str]) -> list[str]:
    rows = [f"| {header} | {' | '.join(map(str, cells))} |", "|" + "-|" * (len(cells) + 1)]
    return rows + [f"| {name} | {' | '.join(value(name, cell) for cell in cells)} |" for name in names]
