"""The training loop: text -> tokens -> batches -> steps -> checkpoints (section 5 of the paper), and the model card."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from mlx_transformer.core.card import RESULTS, begin_card, carried, front_matter, keys_of
from mlx_transformer.core.checkpoint import resolve
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.core.tokenizer_files import tokenizer_files, tokenizer_path
from mlx_transformer.data import built_in
from mlx_transformer.data.batches import prefetched
from mlx_transformer.data.corpus import language_pair
from mlx_transformer.data.epochs import TrainingBatch
from mlx_transformer.data.line_files import unpacked_suffix
from mlx_transformer.device import device_record, training_memory, use_fast_blas
from mlx_transformer.generation.evaluate import score
from mlx_transformer.nn.parameters import named_arrays
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes
from mlx_transformer.system.machine import battery_line
from mlx_transformer.system.progress import Reporter
from mlx_transformer.text.tokenizer import Tokenizer

from .cost import cache_limit, fit_memory
from .data import EncodedText, RunData, load_data
from .group import ALONE, Group, joined
from .objectives import validation_scores
from .optimizers import learning_rate
from .options import tables_of
from .progress import (
    CLOCK,
    FORECAST_AFTER,
    Clock,
    Dashboard,
    Forecast,
    Speed,
    State,
    StopSignal,
    closing_lines,
    forecast_line,
    opening_lines,
)
from .recipe import Recipe, load_recipe
from .run_folder import MAX_LOG_BYTES, METRICS, STATE, FollowerFolder, Run, check_folder
from .setup import batches_per_step, check_apart, check_start, model_and_step, start
from .weights import BEST, MOVING, AdapterWeights, MovingAverage, Weights, final_weights

if TYPE_CHECKING:
    from typing import Unpack

    from .arguments import TrainArguments

LANGUAGE = re.compile(r"\.([a-z]{2})")
TASKS = {"translation": "translation", "classification": "text-classification"}
TASKS |= dict.fromkeys(("contrastive", "distillation"), "sentence-similarity")
SECONDS = {"perplexity": "perplexity a token"}
SCORES = {"bleu": "BLEU", "chrf": "chrF"}


def model_card(run: Path, recipe: Recipe, made_of: dict[str, Any]) -> str:
    """The front matter of OUT/model's card: languages, origin and scores.

    made_of: the entry about its weights in run.json. Weights of a single step get the scores of that step's validation,
    if there was one.
    """
    start = recipe.training.start_from
    known = {} if start is None else keys_of(carried(resolve(start)))
    steps = made_of["steps"] if made_of["final"] in ("last", "best") else []
    scores = [scores for step in steps if (scores := _validation(run / METRICS, step))]
    index = _index(recipe, scores[0]) if scores else None
    return front_matter({**known, **keys_of(begin_card(language=languages(recipe), **{RESULTS: index}))})


def languages(recipe: Recipe) -> list[str] | None:
    """Language codes from the recipe or its file names, e.g. ["en", "de"] for train.en and train.de; else None."""
    data, names = recipe.data, list[str]()
    if data.corpus is not None:
        names = built_in.languages(data.corpus)
    for options in (data, *data.corpora):
        if options.languages is not None:
            names += language_pair(options.languages)
        elif options.source is not None and options.target is not None:
            codes = [LANGUAGE.fullmatch(unpacked_suffix(Path(place))) for place in (options.source, options.target)]
            names += [code[1] for code in codes if code is not None and None not in codes]
    return list(dict.fromkeys(names)) or None


def _validation(log: Path, step: int) -> dict[str, Any]:
    """The validation scores of a step; {} if there was no validation."""
    if log.exists():
        for line in reversed(read_bytes(log, MAX_LOG_BYTES).splitlines()):
            if line.startswith(b'{"kind": "valid"') and (entry := json.loads(line))["step"] == step:
                return entry
    return {}


def _index(recipe: Recipe, scores: dict[str, Any]) -> list[dict[str, Any]]:
    """Scores in the Hub's `model-index` form: BLEU and chrF for translations, and the objective's second score."""
    signatures = score(["text"], ["text"]) if SCORES.keys() & scores.keys() else {}
    metrics: list[dict[str, Any]] = [
        {"type": key, "name": name, "value": scores[key], "args": {"signature": signatures[f"{key}_signature"]}}
        for key, name in SCORES.items()
        if key in scores
    ]
    second = recipe.objective.step.second
    metrics.append({"type": second, "name": SECONDS.get(second, second), "value": round(scores[second], 3)})
    data = recipe.data
    text = data.corpus or data.valid_source or data.valid_pairs or data.valid_text or data.valid_labelled
    name = "set aside of the training text" if text is None else Path(text).name
    result = {
        "task": {"type": TASKS.get(recipe.training.objective, "text-generation")},
        "dataset": {"type": "validation", "name": f"{name}, validation"},
        "metrics": metrics,
    }
    return [{"name": "mlx-transformer", "results": [result]}]


POINTS = 50  # a curve has at least so many points, evenly spread over the run
POINT_SECONDS = 30.0  # at most, between two points of a curve


@dataclass(frozen=True)
class Result:
    model: Path
    state: State
    parameters: int
    interrupted: int | None
    """The signal that ended the run early; None if there was none."""


class Trainer:
    """A run of a recipe in a folder. `run()` trains to the end and returns the result."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        resume: bool = False,
        data: RunData | None = None,
        force: bool = False,
        group: Group = ALONE,
    ):
        """Prepare a run of `recipe` in the folder `out`, or with `resume` continue the run there.

        data: the recipe's text, if it is loaded already. force: replace the run there. group: the processes that train
        together.
        """
        self.group = group
        if group.leads:
            check_folder(out, resume, force)  # early, before minutes go into reading text
            check_apart(recipe, out)
        check_start(recipe)
        recipe = recipe.dated()
        self.out = out
        self.data = data or load_data(recipe)
        known = tokenizer_path(out) if resume else None
        self.start = start(recipe, self.data, None if known is None else Tokenizer.load(known))
        self.tokenizer, self.config = self.start.tokenizer, self.start.config
        self.reporter = Reporter("training", silent=not group.leads)
        reading = self.start.reading(recipe)
        text = EncodedText(self.data.train, reading, recipe)
        if recipe.training.memory is not None and not resume:
            recipe, line = fit_memory(recipe, self.start, text, group)
            self.reporter.line(line)
        self.options = recipe.training
        self.batches = text.batches(recipe, self.options.seed)
        self.batches_per_step = batches_per_step(self.options, group, self.batches)
        recipe = recipe.recorded(self.batches.batch_tokens)
        valid = EncodedText(self.data.valid, reading, recipe, "validation text")
        self.valid = valid.batches(recipe, seed=0, grow=True)
        self.recipe = recipe
        record = {"recipe": recipe.to_dict(), "config": self.config.to_dict(), "data": self.data.record}
        record |= self.start.record
        record |= {"tokenizer": self.tokenizer.fingerprint, "blas": use_fast_blas(), "device": device_record()}
        record |= {"processes": group.size} if group.size > 1 else {}
        self.stop = StopSignal()
        if group.leads:
            self.files = Run(out, record, resume, self.reporter.line, force, self.options.wandb)
        else:
            self.files = FollowerFolder(out)
        try:
            with group.translating_errors():
                self._prepare(resume)
            self.files.begin(tokenizer_files(self.tokenizer.to_json()) if known is None else {})
        except BaseException:
            self.files.close()
            raise

    def _prepare(self, resume: bool) -> None:
        o = self.options
        mx.random.seed(o.seed)
        self.model, self.step = model_and_step(self.start, o, self.group)
        adapter = self.start.adapter
        base = self.start.folder
        self.weights = Weights(self.model, base) if adapter is None else AdapterWeights(self.model, adapter, base)
        self.moving = MovingAverage(self.weights, o.moving_average) if o.final == "moving-average" else None
        self.state = State()
        self._saved_step: int | None = None
        if resume and self.group.leads:
            self._restore()
        if self.group.size > 1:
            self._share()

    def _share(self) -> None:
        """Send rank 0's weights, optimizer state and counters to all processes."""
        self.step.take(self.group.broadcast_arrays(self.step.all))
        step, seconds, validated = self.group.broadcast(
            [self.state.step, self.state.seconds, self.state.validated_step]
        )
        self.state.step, self.state.seconds, self.state.validated_step = int(step), seconds, int(validated)

    def run(self) -> Result:
        """Train to the recipe's end or until a signal; in both cases write a checkpoint and the model.

        Raises UserError if gradients stay infinite or NaN, or the disk fails; the last checkpoint is then intact.
        """
        try:
            with self.reporter, self.stop:
                recorded = self.out / CLOCK if self.options.minutes is not None and self.group.leads else None
                coming = prefetched(self.batches.from_step(self.state.step * self.batches_per_step))
                most = None if self.options.memory is None else self.options.memory * 1e9
                limited, clock = training_memory(cache_limit(self.options), most), Clock(recorded, self.state.seconds)
                with limited, self.group.translating_errors(), clock, coming as batches:
                    self._train(clock, batches)
                if self.group.leads:
                    self._finish()
                    self.files.metric("end", self.state.step, seconds=round(clock.seconds(), 2))
                    if self.stop.received is None:
                        for line in closing_lines(self.options, self.state):
                            self.reporter.line(line)
                # A launcher ends all processes once one has ended by a signal. So the others wait here until rank 0 has
                # written the model.
                with self.group.translating_errors():
                    self.group.largest(0)
        finally:
            self.files.close()
        return Result(self.out / "model", self.state, parameter_count(self.config), self.stop.received)

    def rehearse(self) -> str:
        """Take the first 20 steps and return a line with their speed and memory; no model is written."""
        try:
            coming = prefetched(self.batches.from_step(0))
            with self.reporter, self.stop, Clock(None, 0.0) as clock, coming as batches:
                self._train(clock, batches, FORECAST_AFTER)
        finally:
            self.files.close()
        return forecast_line(self.state, mx.get_peak_memory(), self.recipe.objective.unit)

    def _finish(self) -> None:
        """Save the last step, validate unless the run was interrupted, and write the model."""
        if self.state.step != self._saved_step:
            self.save()
        # Also validates a run that was killed after its last checkpoint, and resumed.
        if self.stop.received is None and self.state.validated_step != self.state.step:
            self.validate()
        self.model.eval()
        arrays, made_of = final_weights(self.options, self.state, self.files, self.weights, self.moving)
        card = model_card(self.out, self.recipe, made_of)
        self.weights.write(self.out, arrays, self.tokenizer.to_json(), card)
        self.files.note_model(made_of)

    def _train(self, clock: Clock, batches: Iterator[TrainingBatch], limit: int | None = None) -> None:
        o, state = self.options, self.state
        per_step = self.batches_per_step
        for line in opening_lines(self.recipe, self.config, self.data, self.batches, per_step, self.start.adapter):
            self.reporter.line(line)
        if (line := battery_line()) is not None:
            self.reporter.line(line)
        self.model.train()
        dashboard = Dashboard(self.reporter, self.recipe, self.config, self.step)
        speed, bad_in_a_row = Speed(), 0
        saved = logged = time.monotonic()
        forecast = Forecast(o, state.step)
        valid_every = o.valid_every or max(1, len(self.batches) // per_step)
        while True:
            # Validate after the checkpoint of this step is written, so that a run resumed from it validates too.
            if state.step % valid_every == 0 and state.validated_step != state.step and state.progress(o) < 1:
                self.validate()
            state.seconds, since_best = self.group.broadcast([clock.begin(state.step), state.validations_since_best])
            state.validations_since_best = int(since_best)
            signalled = self.stop.agree(self.group)
            share = state.progress(o)
            if share >= 1 or signalled or state.should_stop_early(o) or state.step == limit:
                break
            state.step += 1
            rate = learning_rate(o, self.config.d_model, state.step, share)
            mx.random.seed(self.group.dropout_seed(o.seed, state.step))
            parts = [next(batches) for _ in range(per_step)]
            tokens = sum(batch.tokens for batch in parts)
            mine = parts[self.group.rank :: self.group.size]
            loss, norm, finite = self.step(mine, rate, tokens)
            self.step.evaluate(loss, norm, finite)
            if self.moving is not None:
                self.moving.step(state.step)
            state.epoch = state.step * per_step / len(self.batches)
            state.target_tokens += tokens
            state.seconds = clock.seconds()
            speed.add(tokens)
            bad_in_a_row = 0 if finite.item() else bad_in_a_row + 1
            if bad_in_a_row:
                self._skipped(loss, bad_in_a_row)
            dashboard.step(state, float(np.array(loss)), rate, speed, mine)
            now = time.monotonic()
            by_share = int(POINTS * state.progress(o)) > int(POINTS * share)
            if state.step % o.log_every == 0 or by_share or now - logged >= POINT_SECONDS:
                logged = now
                values = {"loss": loss.item(), "gradient_norm": norm.item(), "learning_rate": rate}
                values |= {"tokens_per_second": round(speed.since_last()), "epoch": round(state.epoch, 3)}
                values |= dashboard.log_values()
                self.files.metric("train", state.step, **values, seconds=round(state.seconds, 2))
            if self._is_due(now - saved):
                self.save()
                saved = time.monotonic()
            for line in forecast.lines(state, state.progress(o)):
                self.reporter.line(line)
            speed.pause()
        if self.stop.received is not None and limit is None:
            self.reporter.line(f"interrupted: saving step {state.step:,}")

    def _is_due(self, seconds: float) -> bool:
        """Whether to write a checkpoint now, `seconds` after the last."""
        if not self.group.leads:
            return False
        every = self.options.checkpoint_steps
        return self.state.step % every == 0 if every else seconds >= self.options.checkpoint_seconds

    def _skipped(self, loss: mx.array, in_a_row: int) -> None:
        """Count a step whose gradient was not finite (it changed no weights). Raises UserError after too many."""
        self.state.skipped_steps += 1
        self.files.metric("skipped", self.state.step, loss=str(loss.item()))
        if in_a_row >= self.options.stop_after_bad_steps:
            checkpoints = self.files.checkpoints()
            last = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "no checkpoint was written yet"
            raise UserError(
                "{} steps in a row had a gradient that is not finite; {}; lower {learning_rate} or raise "
                "{warmup_steps}",
                in_a_row,
                last,
            )

    def validate(self) -> dict[str, float]:
        """Compute and record the validation scores, and save OUT/best if they are the best.

        Returns {} if the run is being interrupted, or if this process isn't rank 0.
        """
        if not self.group.leads:
            self.state.validated_step = self.state.step
            return {}
        sentences, should_stop = self.options.valid_sentences, self.stop.requested
        values, samples = validation_scores(self.step, self.valid, self.data.valid, sentences, should_stop)
        if not values:
            return {}
        self.state.validated_step = self.state.step
        if self.state.note_scores(self.options, values):
            self.weights.save(self.out / BEST, self.tokenizer.to_json())
        self.files.metric("valid", self.state.step, epoch=round(self.state.epoch, 3), **values)
        if samples:
            self.files.metric("samples", self.state.step, samples=samples)
        summary = "  ".join(f"{name} {value:.2f}" for name, value in values.items())
        self.reporter.line(f"valid  step {self.state.step:,}  epoch {self.state.epoch:.2f}  {summary}")
        return values

    def save(self) -> None:
        """Write a checkpoint of the current step with the optimizer's state."""
        optimizer = {name: np.array(value) for name, value in named_arrays(self._arrays())}
        weights, state, text = self.weights.table(), asdict(self.state), self.tokenizer.to_json()
        keep, extra = self.options.checkpoints_to_keep, self.weights.extra_files()
        self.files.save(self.config, weights, text, optimizer, state, keep, extra)
        self._saved_step = self.state.step

    def _restore(self) -> None:
        newest = self.files.newest()
        if newest is None:
            self.files.rewind(0)
            self.reporter.line(f"{self.out}: no checkpoint yet, starting from the first step")
            return
        opened, optimizer, state = newest
        expected = {name: tuple(value.shape) for name, value in named_arrays(self._arrays())}
        if opened.config != self.config or {name: a.shape for name, a in optimizer.items()} != expected:
            raise UserError(f"{opened.folder}: its config or optimizer differs from the run's; start a new run")
        try:
            self.state = State(**state)
        except TypeError as error:
            raise UserError(f"{opened.folder / STATE}: written by another version ({error})") from error
        self.weights.restore(opened.folder)
        arrays: Any = tree_unflatten([(name, mx.array(array)) for name, array in optimizer.items()])
        self.step.restore(arrays)
        if self.moving is not None:
            self.moving.values = arrays[MOVING]
        self.step.evaluate()
        self._saved_step = self.state.step
        self.files.prune(self.options.checkpoints_to_keep)
        self.files.rewind(self.state.step, self.state.validated_step == self.state.step)
        self.reporter.line(f"resumed from {opened.folder.name}, epoch {self.state.epoch:.2f}")

    def _arrays(self) -> dict[str, Any]:
        """A checkpoint's arrays other than the weights: optimizer state, and the moving average if any."""
        return {**self.step.state, **({} if self.moving is None else {MOVING: self.moving.values})}


def train(
    recipe: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str],
    resume: bool = False,
    force: bool = False,
    **keys: Unpack[TrainArguments],
) -> Result:
    """Train a model in the run's folder `out` and return the result; its `model` is the checkpoint folder out/model.

    recipe: a TOML file or the name of a built-in recipe, e.g. "multi30k". None: the defaults, or with `resume` the
    run's recipe. keys: recipe keys, e.g. source="train.en", preset="tiny", steps=500; all of them are listed in
    `mlx_transformer/recipes/README.md`. resume: continue the run in `out`. force: replace it.

    Raises UserError, e.g. for a wrong key or a file that can't be read. If a signal interrupted the run, the result's
    `interrupted` is its number; continue with `resume`.

    >>> train("multi30k", out="runs/mine", source="train.en", target="train.de").model
    PosixPath('runs/mine/model')
    """
    out, group = Path(out), joined()
    if group.leads:
        check_folder(out, resume, force)  # before reading the recipe, which may be the run's own
    chosen = load_recipe(None if recipe is None else os.fspath(recipe), tables_of(keys), run=out if resume else None)
    return Trainer(chosen, out, resume, force=force, group=group).run()
