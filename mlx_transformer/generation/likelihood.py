"""How likely a model finds given outputs: log p of every token of each, by the steps that a search takes.

Shapes: B sentences, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from mlx_transformer.core.inputs import Ids, Sources, check_ids
from mlx_transformer.system.errors import UserError

from .options import Options
from .search import Done, batches, reported
from .steps import Model


def log_probabilities(model: Model, ids: Ids, targets: Ids, *, done: Done | None = None) -> list[np.ndarray]:
    """For each input the log-probabilities of its target's tokens, float32, each given the input and the tokens before.

    ids: as for `search`. targets: outputs without start token, with eos where its probability is to be counted. done:
    told the share of the inputs that is finished. Nothing is banned here, as it is in a search. Raises `UserError` for
    ids outside the vocabulary, empty rows and rows longer than the model takes.
    """
    config = model.config
    if not config.has_decoder:
        raise UserError("an encoder alone generates nothing, so it finds no output likely")
    if len(ids) != len(targets):
        raise UserError(f"{len(ids)} inputs but {len(targets)} targets: they must be equally many")
    sources = Sources.of(config, ids=ids)
    wanted = check_ids(targets, config.vocab_size, "target")
    for i, (source, target) in enumerate(zip(sources, wanted, strict=True)):
        prompt = 0 if config.has_encoder else len(source) - 1
        longest = max(len(source), prompt + len(target))
        if longest > config.max_positions and not model.extends_positions:
            raise UserError(f"row {i}: {longest} tokens, the model takes at most {config.max_positions}")
    lengths = sources.lengths
    steps = np.array([len(row) for row in wanted], int)
    found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sources)
    positions = None if model.extends_positions or config.has_encoder else config.max_positions
    # By the number of steps: a batch takes as many as its longest target.
    for index in reported(batches(steps, lengths, lengths, Options(), positions), len, len(sources), done):
        values = _batch(model, sources[index], [wanted[i] for i in index])
        for i, row in zip(index, values, strict=True):
            found[i] = row[: steps[i]]
    for i, row in enumerate(found):
        if not np.isfinite(row).all():
            raise UserError(f"source row {i}: the model's logits are not finite; check its weights")
    return found


def _batch(model: Model, sources: Sources, targets: list[np.ndarray]) -> np.ndarray:
    """(B, longest target); what is beyond the end of a target means nothing."""
    xp = model.arrays
    tokens = np.full((len(targets), max(map(len, targets))), model.config.eos_id, np.int32)
    for i, row in enumerate(targets):
        tokens[i, : len(row)] = row
    decoder, logits = model.start(sources)
    values = []
    for t in range(tokens.shape[1]):
        token = xp.asarray(tokens[:, t].copy())
        logits = xp.float32(logits)
        values.append(xp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - xp.logsumexp(logits, axis=1))
        if xp.lazy:
            xp.queue(values[-1])
        if t + 1 < tokens.shape[1]:
            logits = decoder.step(token)
    return xp.numpy(xp.stack(values, axis=1))
