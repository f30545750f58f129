"""Put each bug into a model and let `validate` look for it: `make mutations` prints what caught each."""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
from mutations import CONFIGS, EMBEDDINGS, FIXED, ONE_FILE, OPTIONS, Mutation
from mutations_files import FILES, FileMutation, problem_of, run_file
from mutations_graphs import GRAPHS
from mutations_mlx import MLX
from mutations_onnx import ONNX
from random_models import write_model
from rich.console import Console
from rich.table import Table
from rich.text import Text

from export import export_search
from export.validate import Report, compare, compare_engines
from export.validate.cases import grid
from export.validate.engines.mlx_engine import MlxEngine
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.int8_scales import INT8_SCALES

SEED = 11
Models = dict[str, tuple[Path, Path]]


@dataclass(frozen=True)
class Outcome:
    """What caught one mutation, and what is not as it has to be (empty: all is)."""

    name: str
    runtime: str
    weights: str
    tap: str
    path: str
    culprit: str
    tokens: str
    attribute: str
    caught: bool
    wrong: str
    file: str = ""


def all_mutations() -> dict[tuple[str, str], Mutation | FileMutation]:
    graphs = {("onnxruntime", n): m for n, m in {**ONNX, **GRAPHS}.items()}
    return graphs | {("mlx", n): m for n, m in MLX.items()} | {("files", n): m for n, m in FILES.items()}


def make_models(folder: Path, names: Iterable[str] = CONFIGS) -> Models:
    return {name: _made(name, folder / name) for name in names}


def _made(name: str, folder: Path) -> tuple[Path, Path]:
    texts = {INT8_SCALES: FIXED.json()} if name == "fixed scales" else {}
    options = {"embedding": EMBEDDINGS.get(name), "texts": texts, **OPTIONS.get(name, {})}
    checkpoint, exported = write_model(CONFIGS[name], folder, seed=3, **options)
    return checkpoint, export_search(checkpoint, folder / "search.onnx") if name in ONE_FILE else exported


def run(name: str, mutation: Mutation | FileMutation, models: Models, folder: Path) -> Outcome:
    """`folder`: an empty one for the changed files."""
    if isinstance(mutation, FileMutation):
        report = run_file(mutation, folder)
        found = problem_of(mutation, report)
        wrong = "" if found else f"says {report.failures()[:2]}, expected {mutation.file}: {mutation.says}"
        return Outcome(name, "files", *[""] * 6, not report.equal, wrong, found)
    checkpoint, exported = models[mutation.model]
    if mutation.edit is not None:
        report = compare(checkpoint, mutated(exported, mutation, folder), ["onnxruntime"], SEED, threads=1)
    else:
        opened = open_checkpoint(checkpoint)
        engine = MlxEngine(opened)
        assert mutation.change is not None
        mutation.change(engine.model)
        report = compare_engines(opened, [engine], grid(opened.config, SEED))
    return _outcome(name, mutation, report)


def _outcome(name: str, m: Mutation, report: Report) -> Outcome:
    weights = sorted({problem.split(":")[0] for check in report.weights for problem in check.problems})
    first = report.first_over_budget(m.runtime)
    tap, path = (first.tap, first.path) if first else ("", "")
    culprit = "; ".join(c.sentence for c in report.culprits)
    tokens = ", ".join(check.search for check in report.tokens if not check.passed)
    attributes = [each for s in report.structures for each in s.wrong] or [""]
    wrong = []
    if report.equal:
        wrong.append("not caught")
    if weights != ([m.weights] if m.weights else []):
        wrong.append(f"weights {weights}, expected {m.weights or 'none'}")
    if (tap, path) != ((m.tap, m.path) if m.tap else ("", "")):
        wrong.append(f"shows at {tap or 'no tap'} ({path}), expected {m.tap or 'none'} ({m.path})")
    if m.culprit not in culprit:
        wrong.append(f"blames {culprit!r}, expected {m.culprit!r}")
    if m.search and m.search not in tokens:
        wrong.append(f"tokens {tokens!r}, expected {m.search}")
    if not any(each.startswith(m.attribute) for each in attributes):
        wrong.append(f"attributes {list(attributes)}, expected {m.attribute}")
    found = ", ".join(weights), tap, path, culprit, tokens, attributes[0]
    return Outcome(name, m.runtime, *found, not report.equal, "; ".join(wrong))


def mutated(exported: Path, mutation: Mutation, folder: Path) -> Path:
    """Graphs with their weights inside: a data file that nobody reads would be a mistake of its own."""
    copy = folder / ("onnx" if exported.is_dir() else exported.name)
    (shutil.copytree if exported.is_dir() else shutil.copy)(exported, copy)
    changed = 0
    for path in sorted(copy.glob("onnx/*.onnx")) if copy.is_dir() else [copy]:
        model = onnx.load(path)
        before = model.SerializeToString(deterministic=True)
        assert mutation.edit is not None
        if path.match(f"{mutation.files}.onnx"):
            mutation.edit(model)
        changed += model.SerializeToString(deterministic=True) != before
        onnx.save(model, path)
    assert changed, "the mutation found nothing to change"
    for data in copy.glob("onnx/*.onnx_data"):
        data.unlink()
    return copy


def run_all(chosen: dict[tuple[str, str], Mutation | FileMutation], see: Callable[[Outcome], None]) -> list[Outcome]:
    found = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        models = make_models(Path(name) / "models")
        for (_, title), mutation in chosen.items():
            with tempfile.TemporaryDirectory(dir=name) as place:
                found.append(run(title, mutation, models, Path(place)))
            see(found[-1])
    return found


def table(outcomes: list[Outcome]) -> Table:
    shown = Table("", "mutation", "in", "caught by", "shows at", "culprit named", box=None, header_style="bold")
    for o in outcomes:
        kinds = {"weights": o.weights, "taps": o.tap, "tokens": o.tokens, "attributes": o.attribute}
        kinds |= {"files": o.file}
        by = [kind for kind, there in kinds.items() if there]
        mark = Text("✗", style="red") if o.wrong else Text("✓", style="green")
        place = f"{o.tap} ({o.path})" if o.tap else o.weights or o.tokens or o.attribute or o.file
        shown.add_row(mark, o.name, o.runtime, ", ".join(by) or "nothing", place, Text(o.wrong or o.culprit))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-k", default="", help="only mutations whose name contains this")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    chosen = {key: m for key, m in all_mutations().items() if options.k in key[1]}
    with console.status("mutating") as status:
        outcomes = run_all(chosen, lambda o: status.update(f"{o.runtime}: {o.name}"))
    wrong = [o for o in outcomes if o.wrong]
    caught = sum(o.caught for o in outcomes)
    if options.json:
        summary = {"mutations": len(outcomes), "caught": caught, "as_expected": len(outcomes) - len(wrong)}
        print(json.dumps({**summary, "outcomes": [asdict(o) for o in outcomes]}, indent=2))
    else:
        console.print(table(outcomes))
        console.print(f"{caught} of {len(outcomes)} caught, {len(outcomes) - len(wrong)} at the right place")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
