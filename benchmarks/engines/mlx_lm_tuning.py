"""mlx-lm's fine-tuning, run by its own command's functions; the batches are the file's lines in order.

    python -m engines.mlx_lm_tuning CONFIG.json

CONFIG.json holds the keys of mlx-lm's configuration file. Each step is a line of JSON: loss, tokens, seconds of the
processor and of the clock, bytes of arrays at their peak. The first step compiles, and follows a validation.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import types
from pathlib import Path
from typing import Any

import mlx_lm.lora as lora  # type: ignore[import-not-found]
import numpy as np
from mlx_lm.tuner.callbacks import TrainingCallback  # type: ignore[import-not-found]


def processor() -> float:
    """Seconds of this process on any core; its compiler is another process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Lines(TrainingCallback):
    def line(self, **values: Any) -> None:
        print(json.dumps({"cpu": processor(), "wall": time.monotonic(), **values}), flush=True)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        info, peak = train_info, train_info["peak_memory"] * 1e9
        self.line(step=info["iteration"], loss=info["train_loss"], tokens=info["trained_tokens"], peak=peak)

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        self.line(validated=val_info["iteration"], loss=val_info["val_loss"])


def main() -> None:
    keys = lora.CONFIG_DEFAULTS | json.loads(Path(sys.argv[1]).read_text())
    lora.get_reporting_callbacks = lambda *_, **__: Lines()
    np.random.permutation = np.arange  # type: ignore[assignment]
    lora.run(types.SimpleNamespace(**keys))
    print(json.dumps({"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


if __name__ == "__main__":
    main()
