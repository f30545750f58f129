"""The page of `web` beside transformers.js in headless Chromium: first load, memory and tokens a second on wasm.

    python benchmarks/web.py quickstart/model [--text FILE] [--precision float32] [--threads 1 2] [--rounds 5]

Both run the same exported folder with the same files of onnxruntime-web, in a page each, one sentence at a time; the
page of `web` also runs the file with the search inside. They take turns round by round, and ratios are medians over
rounds of the ratio within a round. First loads are those of a browser with nothing kept, until a first translation,
three times each. Greedy tokens are compared with each other; transformers.js has no beam search. Needs Node.js,
Chromium (CHROMIUM=program) and `make test-browser`'s packages (--modules).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from export import export_onnx, export_search
from export.web import write_site
from mlx_transformer.data import built_in
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import usable_cores

ROOT = Path(__file__).resolve().parents[1]
PEER = "transformers.js"
SECONDS = 1800


def main() -> int:
    options = arguments()
    lines = (options.text.read_text(encoding="utf-8") if options.text else phrases()).split("\n")[: options.sentences]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            prepare(options.model, options.precision, options.modules, folder)
            found = [measured(folder, options, threads, lines) for threads in options.threads]
        except (UserError, RuntimeError) as error:
            print(f"web.py: {error}", file=sys.stderr)
            return 2
    print(f"\n## In the browser\n\n{described(options, found[0]['versions'])}\n")
    same = True
    for threads, answer in zip(options.threads, found, strict=True):
        print(table(threads, answer["engines"]))
        same &= agree(answer["engines"])
    print("Greedy tokens are identical." if same else "Greedy tokens differ.")
    return 0 if same else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a checkpoint")
    parser.add_argument("--text", type=Path, help="one sentence a line (default: phrases of the built-in corpus)")
    parser.add_argument("--sentences", type=int, default=24, help="so many first lines of it")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modules", type=Path, default=ROOT / "tests/consumers/node/node_modules")
    return parser.parse_args()


def phrases() -> str:
    return "\n".join(built_in.build("cldr:en-de").held_out.source[:200])


def prepare(model: Path, precision: str, modules: Path, folder: Path) -> None:
    """The folder for both, the file with the search, and the site of both."""
    web = export_onnx(model, folder / "web", target="web", precision=precision, accept_loss=True)
    file = export_search(model, folder / "mine.onnx", target="cpu", precision=precision, accept_loss=True)
    write_site([web, file], folder / "site", assets=modules)


def measured(folder: Path, options: argparse.Namespace, threads: int, lines: list[str]) -> dict[str, Any]:
    """{"engines": {name: {"loads": [seconds, ...], "memory": bytes, "ids": [...], "rounds": [[tokens, seconds], ...]}},
    "versions": {...}}"""
    task = {"site": str(folder / "site"), "model": str(folder / "web"), "modules": str(options.modules.resolve())}
    task |= {"lines": lines, "threads": threads, "rounds": options.rounds, "dtype": dtype_of(folder / "web")}
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    command = ["node", str(Path(__file__).with_name("web.mjs")), str(folder / "task.json"), str(folder / "answer.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=os.environ)
    if done.returncode != 0:
        raise RuntimeError(f"the browser ended with {done.returncode}: {done.stderr[-1000:]}")
    return json.loads((folder / "answer.json").read_text(encoding="utf-8"))


def dtype_of(folder: Path) -> str:
    """transformers.js's name of the folder's precision."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["transformers.js_config"]["dtype"]


def described(options: argparse.Namespace, versions: dict[str, str]) -> str:
    text = options.text.name if options.text else "phrases of cldr:en-de"
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    where = f"{platform.system()} {platform.machine()}, {usable_cores()} cores"
    command = f"python benchmarks/web.py {options.model.name} --precision {options.precision}"
    return (
        f"`{command}`, {date.today()}; {options.sentences} lines of {text}, one at a time,"
        f" median of {options.rounds} rounds; {where}; {named}."
    )


def table(threads: int, engines: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{threads} thread{'s' if threads > 1 else ''} of wasm:\n",
        f"| | first load, s | memory of wasm, MB | tokens/s | x {PEER} |",
        "|-|-|-|-|-|",
    ]
    return "\n".join([*lines, *(row(name, engine, engines[PEER]) for name, engine in engines.items()), ""])


def row(name: str, engine: dict[str, Any], peer: dict[str, Any]) -> str:
    """Ratios are those of rounds; of beams, against the peer's greedy search."""
    speeds, peers = ([tokens / seconds for tokens, seconds in each["rounds"]] for each in (engine, peer))
    ratio = median(ours / theirs for ours, theirs in zip(speeds, peers, strict=True))
    load, memory = f"{median(engine['loads']):.1f}", f"{engine['memory'] / 1e6:.0f}"
    return f"| {name} | {load} | {memory} | {median(speeds):,.0f} | {ratio:.2f} |"


def agree(engines: dict[str, dict[str, Any]]) -> bool:
    greedy = [engine["ids"] for name, engine in engines.items() if "beam" not in name]
    return all(ids == greedy[0] for ids in greedy)


if __name__ == "__main__":
    raise SystemExit(main())
