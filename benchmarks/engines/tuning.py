"""Fine-tuning by this project or by mlx-lm, in a process of its own.

    python -m engines.tuning ours KEYS.json
    python -m engines.tuning mlx-lm KEYS.json

KEYS.json holds the keys of a recipe, or of mlx-lm's configuration file; mlx-lm's own function reads them, but takes the
batches in the order of the file's lines. Each step is a line of JSON: loss, tokens so far, seconds of the processor and
of the clock, bytes of MLX's arrays at their peak. The last line has the process's resident bytes at their peak.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import types
from pathlib import Path
from typing import Any


def line(**values: Any) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    clocks = {"cpu": used.ru_utime + used.ru_stime, "wall": time.monotonic(), "resident": used.ru_maxrss * 1024}
    print(json.dumps(clocks | values), flush=True)


def ours(keys: dict[str, Any]) -> None:
    from mlx_transformer.training.options import tables_of
    from mlx_transformer.training.recipe import load_recipe
    from mlx_transformer.training.trainer import Trainer

    out = Path(keys.pop("out"))
    trainer = Trainer(load_recipe(None, tables_of(keys)), out, force=True)
    write = trainer.files.metric

    def metric(kind: str, step: int, **values: Any) -> None:
        write(kind, step, **values)
        more = {"tokens": trainer.state.target_tokens, "peak": values.get("peak_memory_mb", 0) * 1e6}
        line(kind=kind, step=step, loss=values.get("loss"), **more)

    trainer.files.metric = metric
    trainer.run()


def mlx_lm(keys: dict[str, Any]) -> None:
    import mlx_lm.lora as lora  # type: ignore[import-not-found]
    import numpy as np
    from mlx_lm.tuner.callbacks import TrainingCallback  # type: ignore[import-not-found]

    class Lines(TrainingCallback):
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            info, peak = train_info, train_info["peak_memory"] * 1e9
            line(
                kind="train", step=info["iteration"], loss=info["train_loss"], tokens=info["trained_tokens"], peak=peak
            )

        def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
            line(kind="valid", step=val_info["iteration"], loss=val_info["val_loss"])

    lora.get_reporting_callbacks = lambda *_, **__: Lines()
    np.random.permutation = np.arange
    lora.run(types.SimpleNamespace(**lora.CONFIG_DEFAULTS | keys))


def main() -> None:
    engine, path = sys.argv[1:]
    {"ours": ours, "mlx-lm": mlx_lm}[engine](json.loads(Path(path).read_text()))
    line(kind="end")


if __name__ == "__main__":
    main()
