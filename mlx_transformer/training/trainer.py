"""The training loop: text -> tokens -> batches -> steps -> checkpoints (section 5 of the paper)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..blas import use_fast_blas
from ..nn import Transformer
from ..progress import Reporter
from ..scoring import score
from ..spec.checkpoint import save_checkpoint
from ..spec.config import TransformerConfig
from ..spec.errors import UserError
from ..spec.tokenizer import Tokenizer
from .data import RunData, load_data, make_batches, train_tokenizer
from .recipe import Recipe
from .run import Run
from .schedule import cooldown, noam
from .step import TrainStep, assign


@dataclass
class State:
    """Where a run stands; stored with every checkpoint. `seconds` is training time over all its parts."""

    step: int = 0
    epoch: float = 0.0
    seconds: float = 0.0
    target_tokens: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class Result:
    model: Path
    state: State
    parameters: int
    interrupted: int | None
    """The signal that ended the run early, if one did."""


class Trainer:
    """One run of a recipe in a folder. `run()` trains to the end and returns the result."""

    def __init__(self, recipe: Recipe, out: Path, resume: bool = False, data: RunData | None = None):
        self.recipe, self.options, self.out = recipe, recipe.training, out
        self.data = data or load_data(recipe)
        saved = out / "tokenizer.json"
        self.tokenizer = Tokenizer.load(saved) if resume and saved.exists() else self._new_tokenizer()
        self.config = TransformerConfig.preset(recipe.preset, self.tokenizer.vocab_size, **recipe.model)
        if self.config.architecture != "encoder-decoder":
            raise UserError(f"architecture={self.config.architecture!r}: training takes an encoder-decoder")
        record = {"recipe": recipe.to_dict(), "config": self.config.to_dict(), "data": self.data.record}
        record |= {"tokenizer": self.tokenizer.fingerprint, "blas": use_fast_blas(), "device": str(mx.default_device())}
        self.reporter = Reporter("training")
        self.files = Run(out, record, resume, self.reporter.line)
        self.tokenizer.save(saved)

        self.batches = make_batches(self.data.train, self.tokenizer, recipe, self.options.seed)
        self.valid = make_batches(self.data.valid, self.tokenizer, recipe, seed=0)
        mx.random.seed(self.options.seed)
        self.model = Transformer(self.config)
        mx.eval(self.model.parameters())
        o = self.options
        self.step = TrainStep(self.model, (o.beta1, o.beta2), o.epsilon, o.label_smoothing, o.clip_norm)
        self.state = State()
        if resume:
            self._restore()

    def run(self) -> Result:
        o, state = self.options, self.state
        stop = _StopSignal()
        self.model.train()
        with self.reporter, stop:
            if self.batches.dropped or self.data.dropped:
                note = f"{self.batches.dropped} pairs longer than {self.recipe.data.max_length} tokens"
                self.reporter.line(f"left out: {note}, {self.data.dropped} with an empty side")
            begin = saved = time.monotonic()
            before, bad_in_a_row = state.seconds, 0
            window_tokens, window_begin = 0, begin
            valid_every = o.valid_every or len(self.batches)
            for batch in self.batches.from_step(state.step):
                if self._progress() >= 1 or stop.received:
                    break
                state.step += 1
                mx.random.seed((o.seed << 32) | state.step)  # a resumed run draws the same dropout
                rate = noam(state.step, self.config.d_model, o.warmup_steps, o.learning_rate_scale)
                rate *= cooldown(self._progress(), o.cooldown)
                loss, norm, finite = self.step(batch, rate)
                self.step.evaluate(loss, norm, finite)
                state.epoch = state.step / len(self.batches)
                state.target_tokens += batch.tokens
                window_tokens += batch.tokens
                if not finite.item():
                    state.skipped_steps += 1
                    bad_in_a_row += 1
                    self.files.metric("skipped", state.step, loss=str(loss.item()))
                    if bad_in_a_row >= o.stop_after_bad_steps:
                        kept = self.files.checkpoints()
                        last = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
                        raise UserError(
                            f"{bad_in_a_row} steps in a row had a gradient that is not finite; {last}; "
                            "lower learning_rate_scale or raise warmup_steps"
                        )
                else:
                    bad_in_a_row = 0
                now = time.monotonic()
                state.seconds = before + now - begin
                if state.step % o.log_every == 0:
                    speed = window_tokens / (now - window_begin)
                    values = {"loss": loss.item(), "gradient_norm": norm.item(), "learning_rate": rate}
                    values |= {"tokens_per_second": round(speed), "epoch": round(state.epoch, 3)}
                    self.files.metric("train", state.step, **values, seconds=round(state.seconds, 2))
                    status = f"step {state.step}  loss {values['loss']:.3f}  {speed:,.0f} tokens/s"
                    self.reporter.update(self._progress(), status)
                    window_tokens, window_begin = 0, now
                if state.step % valid_every == 0 and self._progress() < 1:
                    self.validate()
                    window_tokens, window_begin = 0, time.monotonic()
                if now - saved >= o.checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
            self.save()
            self.validate()
            self.model.eval()
            model = save_checkpoint(self.out / "model", self.config, self.model.weights(), self.tokenizer.to_json())
            self.reporter.update(self._progress(), f"step {state.step}")
        self.files.close()
        parameters = sum(array.size for _, array in tree_flatten(self.model.parameters()))
        return Result(model, state, parameters, stop.received)

    def validate(self) -> dict[str, float]:
        """Validation loss in nats a token, with and without label smoothing's share as trained, and greedy scores."""
        self.model.eval()
        total, tokens = 0.0, 0
        for batch in self.valid.batches(0):
            total += self._loss(batch)
            tokens += batch.tokens
        values: dict[str, float] = {"loss": total / max(1, tokens)}
        count = min(self.options.valid_sentences, len(self.data.valid))
        if count:
            source, reference = self.data.valid.source[:count], self.data.valid.target[:count]
            ids = self.model.generate(self.tokenizer.encode_batch(source))
            found = score(self.tokenizer.decode_batch(ids), reference)
            values |= {"bleu": found["bleu"], "chrf": found["chrf"], "exact_match": found["exact_match"]}
        self.model.train()
        self.files.metric("valid", self.state.step, epoch=round(self.state.epoch, 3), **values)
        shown = "  ".join(f"{name} {value:.2f}" for name, value in values.items())
        self.reporter.line(f"valid  step {self.state.step}  epoch {self.state.epoch:.2f}  {shown}")
        return values

    def save(self) -> None:
        """Write a checkpoint of the current step, with the optimizer's state."""
        flat = tree_flatten(self.step.optimizer.state)
        optimizer = {name: np.array(value) for name, value in flat}
        weights, state = self.model.weights(), asdict(self.state)
        self.files.save(self.config, weights, self.tokenizer.to_json(), optimizer, state, self.options.keep)

    def _restore(self) -> None:
        found = self.files.newest()
        if found is None:
            self.reporter.line(f"{self.out}: no usable checkpoint yet, starting from the first step")
            return
        opened, optimizer, state = found
        if opened.config != self.config:
            raise UserError(f"{opened.folder}: its config differs from the run's; start a new run")
        self.model.update(tree_unflatten([(name, mx.array(array)) for name, array in opened.tensors()]))
        assign(
            self.step.optimizer.state, tree_unflatten([(name, mx.array(array)) for name, array in optimizer.items()])
        )
        mx.eval(self.model.parameters(), self.step.optimizer.state)
        self.state = State(**state)
        self.reporter.line(f"resumed from {opened.folder.name}, epoch {self.state.epoch:.2f}")

    def _new_tokenizer(self) -> Tokenizer:
        return train_tokenizer(self.data, self.recipe.data.vocab_size)

    def _progress(self) -> float:
        o, s = self.options, self.state
        parts = [(s.step, o.steps), (s.epoch, o.epochs), (s.seconds / 60, o.minutes)]
        return max(done / limit for done, limit in parts if limit is not None)

    def _loss(self, batch) -> float:
        pad = self.config.pad_id
        source, target_in, target_out = (mx.array(a) for a in (batch.source, batch.target_in, batch.target_out))
        return self.step.loss(source, target_in, target_out, mx.array(batch.source != pad)).item()


class _StopSignal:
    """Ctrl-C and SIGTERM end the run after the step under way; a second one ends it at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Callable | int | None] = {}

    def __enter__(self) -> _StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread: the caller deals with signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
