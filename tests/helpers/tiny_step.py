"""An optimizer step of a network of a few hundred parameters, batches for it, and a classifier of given arrays."""

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.data.batches import Batch
from mlx_transformer.nn.classifier import Classifier
from mlx_transformer.training.optimizers import Optimizer
from mlx_transformer.training.options import TrainingOptions
from mlx_transformer.training.step import Arithmetic, TrainStep

V, BETAS, EPSILON = 23, (0.9, 0.98), 1e-9


def model(dropout=0.0, seed=1):
    mx.random.seed(seed)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "heads": 2, "d_ff": 24}
    made = Transformer(TransformerConfig(vocab_size=V, dropout=dropout, output_bias=True, **sizes))
    mx.eval(made.parameters())
    return made.train()


def batch(rows=5, source=18, target=17, seed=0, ragged=True):
    """Odd rows, so that parts are unequal; the last row is padding only, as in a last batch. Lengths are such that
    attention has a gradient on a GPU."""
    rng = np.random.default_rng(seed)
    ids, out = rng.integers(3, V, (rows, source)), rng.integers(3, V, (rows, target))
    if ragged:
        ids[1, 4:], out[1, 2:], out[2, 5:] = 0, 0, 0
        ids[-1], out[-1] = 0, 0
    before = np.concatenate([np.ones((rows, 1), int), out[:, :-1]], axis=1)
    return Batch(*(x.astype(np.int32) for x in (ids, before, out)), tokens=int((out != 0).sum()))


def classifier_of(weight, bias=None, **options):
    """A tied classifier of these arrays, W (V, D) and b (V,), of which gradients may be taken."""
    rows, width = weight.shape
    layer = nn.Embedding(1, width)
    layer.weight = weight
    config = TransformerConfig(vocab_size=rows, d_model=width, heads=1, positions="none", **options)
    return Classifier(config, layer, bias)


def step_with(made, streams=None, clip_norm=0.0, kind=TrainStep, precision="float32", **options):
    """`streams`: a step is split over so many; 0: compiled; None: the device's choice. `options`: a recipe's."""
    chosen = TrainingOptions(
        **{"optimizer": "adam", "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPSILON, **options}
    )
    each = None if streams is None else [mx.new_stream(mx.cpu) for _ in range(streams)]
    return kind(made, Optimizer(made, chosen, each), 0.1, clip_norm, Arithmetic(precision))


def run(step, data, rate=1e-3):
    loss, norm, finite = step(data, rate)
    step.evaluate(loss, norm, finite)
    return loss.item(), norm.item(), finite.item()
