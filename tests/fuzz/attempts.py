"""What is run: commands with numbers that nobody thought of, and calls from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from damage import NUMBERS, TEXTS

Attempt = list[str] | Callable[[], object]
"""Arguments of the command line, or a call from Python."""
TRAIN = "train {f}/recipe.toml --out {f}/new --steps 1"


def with_odd_values(random: Random, commands: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """One of these, each with the names of its options, of which one or two get unheard-of values."""
    command, options = random.choice(commands)
    given = command.split()
    for _ in range(random.choice([1, 1, 2])):
        values = [*NUMBERS, *NUMBERS, *[text for text in TEXTS if "\0" not in text and text != "\ud800"]]
        value = str(random.choice([n for n in values if not (isinstance(n, int) and n > 10**300)]))
        given += [f"--{random.choice(options)}", value]
    draws = given[0] in ("translate", "generate") and {"--temperature", "--top-p", "--top-k"} & {*given}
    return [*given, *(["--sample"] if draws else [])]


def numbers(random: Random, folder: Path) -> Attempt:
    """A command with one or two options of unheard-of values."""
    decoding = "beam length-penalty n-best min-new-tokens max-new-tokens temperature top-k top-p seed".split()
    train = "vocab-size batch-tokens epochs minutes warmup learning-rate dropout save-every seed preset".split()
    return with_odd_values(
        random,
        [
            *((f"translate {folder}/model --input {folder}/in.txt", decoding),) * 3,
            *((f"translate {folder}/{random.choice(['onnx', 'cpu'])} --input {folder}/in.txt", [*decoding, "threads"]),)
            * 3,
            (f"translate {folder}/int8 --input {folder}/in.txt", ["precision", "threads", "beam"]),
            (f"train {folder}/recipe.toml --out {folder}/new --steps 1", train),
            (f"export {folder}/model {folder}/new", ["target", "precision", "activations"]),
            (f"quantize {folder}/model {folder}/new", ["bits", "group-size"]),
            (f"validate {folder}/model {folder}/onnx", ["seed", "threads", "runtimes", "names"]),
            (f"quickstart --out {folder}/model", ["minutes", "seed"]),
            (f"serve {folder}/onnx --port -1", ["max-batch", "max-wait-ms", "max-queue", "threads", "workers"]),
        ],
    )


def paths(random: Random, folder: Path) -> Attempt:
    """A command with something else in the place of a file or a folder."""
    text, model, onnx, new = f"{folder}/in.txt", f"{folder}/model", f"{folder}/onnx", f"{folder}/new"
    command = random.choice(
        [
            *(
                ["translate", model, "--input", text, "--output", new],
                ["translate", onnx, "--input", text, "--output", new],
            ),
            *(["evaluate", model, "--source", text, "--reference", text], ["info", model], ["info", onnx]),
            *(
                ["export", model, new],
                ["export", model, f"{new}.onnx", "--search"],
                ["import", f"{folder}/theirs", new],
            ),
            *(["validate", model, onnx, "--json", new], ["validate", model, onnx, "--html", new]),
            *(["to-huggingface", model, new], ["quantize", model, new, "--group-size", "32"]),
            ["train", f"{folder}/recipe.toml", "--out", new, "--steps", "1"],
            ["train", "--source", f"{folder}/0.source", "--target", f"{folder}/0.target", "--out", new, "--steps", "1"],
            ["train", f"{folder}/recipe.toml", "--out", new, "--steps", "1", "--corpus", "x"],
            ["train", "--resume", f"{folder}/run", "--steps", "3"],
        ]
    )
    places = [i for i, word in enumerate(command) if word.startswith(str(folder)) or word == "x"]
    others = ["", ".", "..", "/", "-", "~", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/proc/self/fd/0"]
    others += ["x" * 300, "x/" * 3000, "a\nb", "\udcff", "nothing/at/all", "cldr:en-de", "cldr:", "cldr:../..-de", "%s"]
    others += [str(path) for path in (folder, *folder.iterdir())] * 2
    command[random.choice(places)] = random.choice(others)
    return [
        *command,
        *(["--force"] if random.random() < 0.2 and command[0] in ("export", "import", "quantize") else []),
    ]


def from_python(random: Random, folder: Path) -> Attempt:
    """Calls of the functions that README shows, with arguments of every kind."""
    from export import OnnxTransformer, SearchModel
    from mlx_transformer import load

    texts = ["a", "a\0b", "\ud800", "one " * 400, "", "日本 two"]
    lines: Any = random.choice(
        [random.choices(texts, k=3), iter(["one", "two"]), "one", (), None, 5, [None], [["a"]], {"a": 1}]
    )
    ids: Any = random.choice(
        [[[5, 2]], [[]], [], [[2**40]], [[-1]], [[1.5]], [["a"]], None, 5, [5, 2], [[5] * 3000], [[[5]]]]
    )
    values: list[Any] = [*NUMBERS, *TEXTS, None, True, [], {}]
    names = ["beam", "n_best", "min_new_tokens", "max_new_tokens", "length_penalty", "top_k", "seed", "batch_tokens"]
    names += ["sample", "temperature", "top_p", "early_stopping", "penalty_form"]
    kind = random.randrange(5)
    names += ["prefix"] * (kind in (2, 4))
    options = {random.choice(names): random.choice(values) for _ in range(random.choice([0, 0, 1, 2]))}
    text = folder / ("text.onnx" if (folder / "text.onnx").exists() else "ids.onnx")

    def python() -> object:
        if kind == 0:
            return SearchModel(text).translate(lines, **options)
        if kind == 1:
            return SearchModel(folder / "ids.onnx").search(ids, **options)
        model, _ = load(folder / "model")
        if kind == 2:
            return model.generate(ids, **options)
        runner = OnnxTransformer(folder / random.choice(["onnx", "cpu"]), threads=1)
        return runner.translate(lines, **options) if kind == 3 else runner.search(ids, **options)

    return python


def search_model(random: Random, folder: Path) -> Attempt:
    from export import SearchModel

    file = random.choice(sorted(folder.glob("*.onnx")))

    def python() -> object:
        model = SearchModel(file, threads=1)
        return model.translate(["one two"]) if model.takes_text else model.search([[5, 6, 2]], beam=2)

    validate = ["validate", f"{folder}/model", str(file)]
    return random.choice(
        [python, python, validate, ["info", str(file)], ["translate", str(file), "--input", f"{folder}/in.txt"]]
    )
