"""One `OnnxTransformer` in eight threads: every answer is the one that its request gets alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

from commands import Case, Verdict

REQUESTS, THREADS = 10_000, 8
WORDS = "one two three. four five, six! seven größer 東京 x".split()
SETTINGS = (
    {},
    {"max_new_tokens": 8},
    {"beam": 3, "n_best": 2},
    {"beam": 2, "length_penalty": 1.0},
    {"sample": True, "seed": 5, "temperature": 0.9},
)


def cases(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    run = partial(side_by_side, package=base / "int8", count=REQUESTS if count is None else count, seed=seed)
    return [
        Case(precision, f"{THREADS} threads", partial(run, precision=precision)) for precision in ("float32", "int8")
    ]


def side_by_side(_: Path, package: Path, precision: str, count: int, seed: int) -> Verdict:
    from export import OnnxTransformer

    model = OnnxTransformer(package, threads=2, precision=precision)
    random = Random(seed)
    drawn = [
        (
            [" ".join(random.choices(WORDS, k=random.randint(0, 4))) for _ in range(random.choice([1, 1, 2, 5]))],
            settings,
        )
        for settings in (random.choice(SETTINGS) for _ in range(count))
    ]

    def answer(request: tuple[list[str], dict]) -> list[list[tuple[str, float]]]:
        lines, settings = request
        return [[(found.text, found.score) for found in best] for best in model.n_best(lines, **settings)]

    alone = [answer(request) for request in drawn]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(answer, drawn))
    wrong = [i for i in range(count) if found[i] != alone[i]]
    told = "" if not wrong else f"{len(wrong)} answers differ, as of {drawn[wrong[0]]}: {found[wrong[0]]}"
    return Verdict(f"{len({str(answer) for answer in alone}):,} answers, the same", told, count)
