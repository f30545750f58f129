"""The training loop: text -> tokens -> batches -> steps -> checkpoints (section 5 of the paper)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_transformer.blas import use_fast_blas
from mlx_transformer.data.batches import Batch
from mlx_transformer.data.prefetch import Prefetched
from mlx_transformer.device import device_record
from mlx_transformer.generation.with_mlx import MlxTranslator
from mlx_transformer.scoring import score
from mlx_transformer.spec.checkpoint import save_checkpoint
from mlx_transformer.spec.durable import write_text
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.parameters import parameter_count
from mlx_transformer.spec.progress import Reporter, duration
from mlx_transformer.spec.tokenizer import Tokenizer

from .arithmetic import Arithmetic
from .checkpointing import checkpoint_layers
from .clock import CLOCK, Clock
from .data import RunData, load_data, make_batches
from .keeping import BEST, MOVING, MovingAverage, final_weights, is_better, out_of_patience
from .optimizers import Optimizer, freeze
from .plan import ends_inside_warm_up, plan_lines
from .recipe import Recipe, defaults
from .run import STATE, Run, check_folder
from .schedule import learning_rate
from .speed import Speed
from .start import check_start, start
from .state import State
from .step import TrainStep
from .stop import StopSignal

FORECAST_AFTER = 20  # steps: enough to tell how fast the rest will be


@dataclass(frozen=True)
class Result:
    model: Path
    state: State
    parameters: int
    interrupted: int | None
    """The signal that ended the run early, if one did."""


class Trainer:
    """One run of a recipe in a folder. `run()` trains to the end and returns the result."""

    def __init__(
        self, recipe: Recipe, out: Path, resume: bool = False, data: RunData | None = None, force: bool = False
    ):
        check_folder(out, resume, force)  # before minutes go into a corpus
        check_start(recipe)
        self.options, self.out = recipe.training, out
        self.data = data or load_data(recipe)
        saved = out / "tokenizer.json"
        known = resume and saved.exists()
        self.start = start(recipe, self.data, Tokenizer.load(saved) if known else None)
        self.tokenizer, self.config = self.start.tokenizer, self.start.config
        self.batches = make_batches(self.data.train, self.tokenizer, recipe, self.options.seed)
        recipe = recipe.recorded(self.batches.batch_tokens)
        self.valid = make_batches(self.data.valid, self.tokenizer, recipe, seed=0, name="validation text", grow=True)
        self.recipe = recipe
        record = {"recipe": recipe.to_dict(), "config": self.config.to_dict(), "data": self.data.record}
        record |= self.start.record
        record |= {"tokenizer": self.tokenizer.fingerprint, "blas": use_fast_blas(), "device": device_record()}
        self.reporter = Reporter("training")
        self.stop = StopSignal()
        self.files = Run(out, record, resume, self.reporter.line, force, defaults())
        try:
            if not known:
                write_text(saved, self.tokenizer.to_json())
            self._prepare(resume)
        except BaseException:
            self.files.close()
            raise

    def _prepare(self, resume: bool) -> None:
        o = self.options
        mx.random.seed(o.seed)
        self.model = self.start.model()
        if o.freeze is not None:
            freeze(self.model, o.freeze)
        if o.gradient_checkpointing:
            checkpoint_layers(self.model)
        optimizer, arithmetic = Optimizer(self.model, o), Arithmetic(o.precision)
        self.step = TrainStep(self.model, optimizer, o.label_smoothing, o.clip_norm, arithmetic)
        self.moving = MovingAverage(self.model, o.moving_average) if o.final == "moving-average" else None
        self.state = State()
        self._saved_step: int | None = None
        if resume:
            self._restore()

    def run(self) -> Result:
        """Train to the recipe's end, or until a signal (`stop.py`); either way a checkpoint and the model are written.

        Raises `UserError` when gradients stay infinite or the disk refuses; the last checkpoint is then intact.
        """
        try:
            with self.reporter, self.stop:
                clock = Clock(self.out / CLOCK if self.options.minutes is not None else None, self.state.seconds)
                first = self.state.step * self.options.accumulate
                with clock, Prefetched(self.batches.from_step(first)) as batches:
                    self._train(clock, batches)
                if self.state.step != self._saved_step:
                    self.save()
                # Also of a run that was killed after its last checkpoint.
                if self.stop.received is None and self.state.validated_step != self.state.step:
                    self.validate()
                model = self._write_model()
        finally:
            self.files.close()
        return Result(model, self.state, parameter_count(self.config), self.stop.received)

    def _write_model(self) -> Path:
        self.model.eval()
        weights, said = final_weights(self.options, self.state, self.files, self.model.weights(), self.moving)
        model = save_checkpoint(self.out / "model", self.config, weights, self.tokenizer.to_json())
        self.files.note_model(said)
        return model

    def _train(self, clock: Clock, batches: Iterator[Batch]) -> None:
        o, state = self.options, self.state
        self._announce()
        self.model.train()
        speed, bad_in_a_row = Speed(), 0
        saved, begun_at, first = time.monotonic(), state.step, (0.0, 0.0)
        valid_every = o.valid_every or max(1, len(self.batches) // o.accumulate)
        while True:
            # Behind a checkpoint of this step, so that a run that goes on from there validates as well.
            if state.step % valid_every == 0 and state.validated_step != state.step and self._progress() < 1:
                self.validate()
            state.seconds = clock.begin(state.step)
            share = self._progress()
            if share >= 1 or self.stop.received is not None or out_of_patience(o, state):
                break
            state.step += 1
            rate = learning_rate(o, self.config.d_model, state.step, share)
            mx.random.seed((o.seed << 32) | state.step)  # a resumed run draws the same dropout
            parts = [next(batches) for _ in range(o.accumulate)]
            loss, norm, finite = self.step(parts, rate)
            self.step.evaluate(loss, norm, finite)
            if self.moving is not None:
                self.moving.step(state.step)
            state.epoch = state.step * o.accumulate / len(self.batches)
            tokens = sum(batch.tokens for batch in parts)
            state.target_tokens += tokens
            state.seconds = clock.seconds()
            speed.add(tokens)
            bad_in_a_row = 0 if finite.item() else bad_in_a_row + 1
            if bad_in_a_row:
                self._skipped(loss, bad_in_a_row)
            steps = f"/{o.steps:,}" if o.steps is not None else ""
            status = f"step {state.step:,}{steps}  loss {loss.item():.3f}  {speed.recent:,.0f} tokens/s"
            self.reporter.update(self._progress(), status)
            if state.step % o.log_every == 0:
                values = {"loss": loss.item(), "gradient_norm": norm.item(), "learning_rate": rate}
                values |= {"tokens_per_second": round(speed.since_asked()), "epoch": round(state.epoch, 3)}
                values |= {"peak_memory_mb": round(mx.get_peak_memory() / 1e6)}
                mx.reset_peak_memory()
                self.files.metric("train", state.step, **values, seconds=round(state.seconds, 2))
            if self._is_due(time.monotonic() - saved):
                self.save()
                saved = time.monotonic()
            if state.step == begun_at + 1:
                first = (state.seconds, self._progress())
            elif state.step == begun_at + FORECAST_AFTER:
                self._forecast(*first)
            speed.pause()
        if self.stop.received is not None:
            self.reporter.line(f"interrupted: saving step {state.step:,}")

    def _is_due(self, seconds: float) -> bool:
        """Whether a checkpoint is, so long after the last."""
        every = self.options.checkpoint_steps
        return self.state.step % every == 0 if every else seconds >= self.options.checkpoint_seconds

    def _announce(self) -> None:
        pairs, valid = len(self.data.train) - self.batches.dropped, len(self.data.valid)
        tokens, steps = self.batches.batch_tokens, len(self.batches)
        for line in plan_lines(self.options, self.config, pairs, valid, tokens, steps):
            self.reporter.line(line)
        if self.batches.dropped or self.data.dropped:
            note = f"{self.batches.dropped:,} pairs longer than {self.recipe.data.max_length} tokens"
            self.reporter.line(f"left out: {note}, {self.data.dropped:,} with an empty side")

    def _forecast(self, seconds: float, share: float) -> None:
        """What is left of the run, from the time and share since `FORECAST_AFTER` - 1 steps ago."""
        done = self._progress()
        if share < done < 1:
            remaining = (1 - done) / (done - share)
            steps = self.state.step + remaining * (FORECAST_AFTER - 1)
            time_left = remaining * (self.state.seconds - seconds)
            self.reporter.line(f"at this speed: {steps:,.0f} steps in all, {duration(time_left)} from now")
            if self.options.minutes is not None:
                for line in ends_inside_warm_up(self.options, round(steps)):
                    self.reporter.line(line)

    def _skipped(self, loss: mx.array, in_a_row: int) -> None:
        """Count a step whose gradient was not finite (`TrainStep` has changed nothing); end the run after too many."""
        self.state.skipped_steps += 1
        self.files.metric("skipped", self.state.step, loss=str(loss.item()))
        if in_a_row >= self.options.stop_after_bad_steps:
            checkpoints = self.files.checkpoints()
            last = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "no checkpoint was written yet"
            raise UserError(
                f"{in_a_row} steps in a row had a gradient that is not finite; {last}; "
                "lower learning_rate or raise warmup_steps"
            )

    def validate(self) -> dict[str, float]:
        """Mean loss in nats a target token, as trained (label smoothing included), and scores of greedy translations.

        Empty if the run is being interrupted.
        """
        self.model.eval()
        total, tokens = 0.0, 0
        for batch in self.valid.batches(0):
            if self.stop.received is not None:
                return {}
            total += self._loss(batch)
            tokens += batch.tokens
        values: dict[str, float] = {"loss": total / max(1, tokens)}
        count = min(self.options.valid_sentences, len(self.data.valid))
        if count:
            source, reference = self.data.valid.source[:count], self.data.valid.target[:count]
            translated = MlxTranslator(self.model, self.tokenizer).translate(source, overlong="truncate")
            scores = score(translated, reference)
            values |= {"bleu": scores["bleu"], "chrf": scores["chrf"], "exact_match": scores["exact_match"]}
        self.model.train()
        self.state.validated_step = self.state.step
        if is_better(self.options, self.state, values):
            save_checkpoint(self.out / BEST, self.config, self.model.weights(), self.tokenizer.to_json())
        self.files.metric("valid", self.state.step, epoch=round(self.state.epoch, 3), **values)
        summary = "  ".join(f"{name} {value:.2f}" for name, value in values.items())
        self.reporter.line(f"valid  step {self.state.step:,}  epoch {self.state.epoch:.2f}  {summary}")
        return values

    def save(self) -> None:
        """Write a checkpoint of the current step, with the optimizer's state."""
        optimizer = {name: np.array(value) for name, value in _flat(self._arrays())}
        weights, state = self.model.weights(), asdict(self.state)
        self.files.save(self.config, weights, self.tokenizer.to_json(), optimizer, state, self.options.kept)
        self._saved_step = self.state.step

    def _restore(self) -> None:
        newest = self.files.newest()
        if newest is None:
            self.files.rewind(0)
            self.reporter.line(f"{self.out}: no checkpoint yet, starting from the first step")
            return
        opened, optimizer, state = newest
        expected = {name: tuple(value.shape) for name, value in _flat(self._arrays())}
        if opened.config != self.config or {name: a.shape for name, a in optimizer.items()} != expected:
            raise UserError(f"{opened.folder}: its config or optimizer differs from the run's; start a new run")
        try:
            self.state = State(**state)
        except TypeError as error:
            raise UserError(f"{opened.folder / STATE}: written by another version ({error})") from error
        self.model.update(tree_unflatten([(name, mx.array(array)) for name, array in opened.tensors()]))
        arrays: Any = tree_unflatten([(name, mx.array(array)) for name, array in optimizer.items()])
        self.step.restore(arrays)
        if self.moving is not None:
            self.moving.values = arrays[MOVING]
        self.step.evaluate()
        self._saved_step = self.state.step
        self.files.prune(self.options.kept)
        self.files.rewind(self.state.step, self.state.validated_step == self.state.step)
        self.reporter.line(f"resumed from {opened.folder.name}, epoch {self.state.epoch:.2f}")

    def _arrays(self) -> dict[str, Any]:
        """All that a checkpoint holds beside the weights."""
        return {**self.step.state, **({} if self.moving is None else {MOVING: self.moving.values})}

    def _progress(self) -> float:
        """Share of the run that is done: of its first end in sight."""
        o, s = self.options, self.state
        parts = [(s.step, o.steps), (s.epoch, o.epochs), (s.seconds / 60, o.minutes)]
        return max(done / limit for done, limit in parts if limit is not None)

    def _loss(self, batch: Batch) -> float:
        pad = self.config.pad_id
        source, target_in, target_out = (mx.array(a) for a in (batch.source, batch.target_in, batch.target_out))
        mask = mx.array(batch.source != pad)
        return float(np.array(self.step.loss(source, target_in, target_out, mask, with_gradient=False)))


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))
