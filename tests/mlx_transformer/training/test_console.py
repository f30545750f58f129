"""What is seen of a run: its curve in blocks, the arithmetic of a step counted by hand, a terminal's second line."""

import re
import sys

import numpy as np
import pytest
from terminal import on_a_terminal

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.data.batches import Batch
from mlx_transformer.data.documents import PackedBatch
from mlx_transformer.device import tuning
from mlx_transformer.training.cost import Work
from mlx_transformer.training.progress import MAX_LOSSES, Curve


def test_a_long_run_takes_no_more_memory_and_keeps_its_beginning():
    curve = Curve()
    for step in range(10 * MAX_LOSSES):
        curve.add(float(10 * MAX_LOSSES - step))
    assert len(curve._values) < MAX_LOSSES
    assert curve.drawn(8) == "█▇▆▅▄▃▂▁"


def test_the_arithmetic_of_a_translation_step():
    """Two layers each, d 8, two heads, d_ff 32, a vocabulary of 50; 3 sentences of 5 and 4 tokens."""
    config = TransformerConfig(vocab_size=50, d_model=8, heads=2, d_ff=32, encoder_layers=2, decoder_layers=2)
    ids = [np.ones((3, length), np.int32) for length in (5, 4, 4)]
    attention, feed_forward = 4 * 8 * 8, 2 * 8 * 32
    weights = 2 * 15 * (attention + feed_forward)  # the encoder's, of 15 tokens
    weights += 2 * (12 * (attention + 8 * 8 * 2 + feed_forward) + 15 * 8 * 8 * 2)  # the decoder's, of 12 and of 15
    weights += 12 * 8 * 50
    scores = 2 * 3 * 2 * 8 * (5 * 5 + 4 * 4 + 5 * 4)
    assert Work(config)(Batch(*ids, 12)) == 3 * 2 * (weights + scores)


def test_a_recurrent_decoder_has_no_products_of_its_own_positions():
    sizes = dict(vocab_size=50, d_model=8, heads=2, d_ff=32, encoder_layers=2, decoder_layers=2)
    both = [TransformerConfig(**sizes, decoder_self_attention=kind) for kind in ("attention", "ssru")]
    batch = Batch(*(np.ones((3, length), np.int32) for length in (5, 4, 4)), 12)
    attending, recurrent = (Work(config)(batch) for config in both)
    assert attending - recurrent == 3 * 2 * (2 * 12 * (4 - 2) * 8 * 8 + 2 * 3 * 2 * 8 * 4 * 4)


def test_the_arithmetic_of_a_decoder_alone():
    sizes = dict(vocab_size=50, d_model=8, heads=2, d_ff=32, encoder_layers=0, decoder_layers=1)
    config = TransformerConfig(architecture="decoder", tie_embeddings="target-output", **sizes)
    ids = np.ones((2, 6), np.int32)
    weights = 12 * (4 * 8 * 8 + 2 * 8 * 32 + 8 * 50)
    assert Work(config)(PackedBatch(ids, ids, None, 12)) == 3 * 2 * (weights + 2 * 2 * 8 * 6 * 6)


@pytest.mark.slow
def test_a_terminal_shows_curve_rate_memory_and_share(tmp_path):
    lines = "".join(f"{i} a b c\n" for i in range(50))
    (tmp_path / "x").write_text(lines)
    train = "['train', '--source', 'x', '--target', 'x', '--preset', 'tiny', '--vocab-size', '300', '--steps', '3']"
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv[1:] = [*{train}, '--out', 'run']\n"
        "from mlx_transformer.cli import main\nsys.exit(main())"
    )
    shown = on_a_terminal([sys.executable, "-c", code], 80, PYTHONUTF8="1")
    seen = [line for line in re.split(r"[\r\n]+", shown) if "of peak FLOP/s" in line]
    compiled = r"  \d compiled" if tuning().compiles else ""
    line = rf"loss [▁-█]{{3}}  rate \d\.\d\de-\d\d  peak \d+ MB  \d+% of peak FLOP/s{compiled} *"
    assert re.fullmatch(line, seen[-1])
    assert all(len(line) <= 80 for line in seen)
