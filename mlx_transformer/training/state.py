"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass

from .options import TrainingOptions


@dataclass
class State:
    """Stored with every checkpoint. `seconds` is training time over all parts of the run."""

    step: int = 0
    epoch: float = 0.0
    seconds: float = 0.0
    target_tokens: int = 0
    skipped_steps: int = 0
    validated_step: int = 0
    """Of the last validation."""
    best_score: float | None = None
    """Of the best validation, loss and perplexity with their sign turned; None before the first, or where none is
    kept."""
    best_step: int = 0
    validations_since_best: int = 0

    def progress(self, options: TrainingOptions) -> float:
        """Share of the run that is done: of its first end in sight."""
        ends = [(self.step, options.steps), (self.epoch, options.epochs), (self.seconds / 60, options.minutes)]
        return max(done / limit for done, limit in ends if limit is not None)
