"""One engine in a process of its own: `python -m engines.worker ENGINE FOLDER THREADS CLOCK`.

JSON, one object a line. It begins with {"load": seconds, "resident": bytes}, then answers

    {"batches": [rows, ...], "beam": K, "length": n or null, "limit": n, "prefix": rows or null, "timed": b, "warm": b}
        with {"seconds": s, "outputs": [ids, ...]}: all batches one after the other, if warm after the first one
        untimed; if timed again and again for at least half a second, and seconds are those of one pass
    {"prompts": rows, "count": n}
        with {"first": [s, s], "total": [s, s], "outputs": [ids, ...], "steps": n}: a decoder's seconds, of the wall and
        of the processor, until the first new token of the last row and until the last one; steps if it counts them
    {"memory": true}
        with {"peak": bytes}

CLOCK: "perf_counter" or "process_time", by whose name `time` has it.

and ends with its input. An error of the engine is answered by {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import engine_class, parse

LEAST = 0.5  # seconds, of one measurement


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    engine_name, clock = parse(sys.argv[1]), getattr(time, sys.argv[4])
    try:
        kind = engine_class(engine_name)
        start = time.perf_counter()
        engine = kind(Path(sys.argv[2]), engine_name.parts, int(sys.argv[3]))
        answer({"load": time.perf_counter() - start, "resident": memory("VmRSS")})
    except Exception as error:
        answer({"error": described(error)})
        raise
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "memory" in request:
                answer({"peak": memory("VmHWM")})
            else:
                answer(continued(engine, request) if "prompts" in request else measured(engine, request, clock))
        except Exception as error:
            answer({"error": described(error)})


def measured(engine: Any, request: dict[str, Any], clock: Callable[[], float]) -> dict[str, Any]:
    batches = request["batches"]
    arguments = request["beam"], request["length"], request["limit"], request["prefix"]
    if request["warm"]:
        engine.translate(batches[0], *arguments)
    passes, start = 0, clock()
    while not passes or (request["timed"] and clock() - start < LEAST):
        outputs = [output for batch in batches for output in engine.translate(batch, *arguments)]
        passes += 1
    return {"seconds": (clock() - start) / passes, "outputs": outputs}


def continued(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    def since(start: tuple[float, float]) -> list[float]:
        return [time.perf_counter() - start[0], time.process_time() - start[1]]

    first: list[list[float]] = []
    start = time.perf_counter(), time.process_time()
    outputs = engine.continued(request["prompts"], request["count"], lambda: first.append(since(start)))
    return {"first": first[0], "total": since(start), "outputs": outputs, "steps": getattr(engine, "steps", 0)}


def memory(field: str) -> int:
    """Bytes: VmRSS (now) or VmHWM (at the most) of this process; elsewhere than on Linux, the latter for both."""
    if sys.platform == "linux":
        return 1024 * int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    main()
