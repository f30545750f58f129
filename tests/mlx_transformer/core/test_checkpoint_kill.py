"""kill -9 at random moments of a process that does nothing but save: no checkpoint is ever lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forked import Forked

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.training.run_folder import Run

# Saves steps one after another, as checkpoints of a run (the last two are kept) and as one folder that is replaced
# each time, and says so. Every number in a checkpoint is its step.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from mlx_transformer.core.checkpoint import CHECKPOINT, save_checkpoint
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.training.run_folder import Run

config = TransformerConfig(vocab_size=8, d_model=4, heads=1, d_ff=4, encoder_layers=1, decoder_layers=1)
folder, step = Path(sys.argv[1]), int(sys.argv[2])
run = Run(folder, {}, resume=step > 0, warn=print)
run.begin()
while True:
    step += 1
    weights = {name: np.full(shape, step, np.float32) for name, shape in parameter_shapes(config).items()}
    run.save(config, weights, "{}", {"m": np.full(3, step)}, {"step": step}, keep=2)
    save_checkpoint(claim(folder / "model", CHECKPOINT, True, own=True), config, weights)
    print(step, flush=True)
"""


def kill_and_check(folder: Path, kills: int, seed: int) -> None:
    delays, step = random.Random(seed), 0
    for _ in range(kills):
        command = [sys.executable, "-c", WRITER, str(folder), str(step)]
        with Forked(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = process.stdout.readline()  # imports are done
            time.sleep(delays.uniform(0, 0.08))
            process.kill()
            said = [int(line) for line in (first + process.stdout.read()).split("\n")[:-1]]
            assert process.wait() == -signal.SIGKILL
        complaints: list[str] = []
        run = Run(folder, {}, resume=True, warn=complaints.append)
        run.begin()
        found = run.newest()
        run.close()
        assert not complaints
        assert found is not None
        opened, optimizer, state = found
        assert state["step"] in (said[-1], said[-1] + 1), "a checkpoint is lost"
        assert {float(x) for _, array in opened.tensors() for x in array.ravel()} == {state["step"]}
        assert optimizer["m"].tolist() == [state["step"]] * 3
        model = open_checkpoint(folder / "model")
        assert np.unique(model.tensor("embedding.weight")).tolist() in ([said[-1]], [said[-1] + 1])
        assert len(run.checkpoints()) in (2, 3) or state["step"] < 3
        assert not list((folder / "checkpoints").glob(".*.tmp")), "what a kill left behind is cleared on resuming"
        step = state["step"]


def test_a_few_kills(tmp_path):
    kill_and_check(tmp_path / "run", kills=6, seed=time.time_ns())


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    kill_and_check(tmp_path / "run", kills=200, seed=time.time_ns())
