"""Section 5.3, formula 3, by numbers; the cooldown at its ends; rates that follow from the length of a run."""

import itertools
import math

import pytest

from mlx_transformer.training.optimizers import cooldown, learning_rate, noam, peak, warm_up, warmup_steps
from mlx_transformer.training.options import TrainingOptions


def rates(steps: int, d_model: int = 128, **options) -> list[float]:
    """Of a run of so many steps."""
    chosen = TrainingOptions(steps=steps, **options)
    return [learning_rate(chosen, d_model, step, (step - 1) / steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("step", "rate"),
    [  # d_model 512, 4000 warm-up steps
        (1, 1.746928107e-07),  # 512^-0.5 * 4000^-1.5
        (2, 3.493856214e-07),
        (4000, 6.987712430e-04),  # the peak, (512 * 4000)^-0.5
        (16000, 3.493856214e-04),  # half of it after four times as many steps
        (100000, 1.397542486e-04),
    ],
)
def test_rates_of_the_paper(step, rate):
    assert noam(step, 512, 4000) == pytest.approx(rate, rel=1e-9)
    assert noam(step, 512, 4000, scale=2.5) == pytest.approx(2.5 * rate, rel=1e-9)


def test_peak_is_at_the_end_of_warm_up():
    rates = [noam(step, 64, 100) for step in range(1, 400)]
    assert max(rates) == rates[99]
    assert rates[:100] == sorted(rates[:100])
    assert rates[99:] == sorted(rates[99:], reverse=True)


def test_cooldown():
    assert [cooldown(p, 0.5) for p in (0, 0.25, 0.5)] == [1, 1, 1]
    assert cooldown(0.75, 0.5) == pytest.approx(0.5)
    assert cooldown(0.9, 0.4) == pytest.approx(0.25)
    assert cooldown(1.0, 0.5) == 0
    assert cooldown(1.3, 0.5) == 0  # a run that is over by minutes
    assert [cooldown(p, 0) for p in (0, 0.5, 1, 2)] == [1, 1, 1, 1]
    assert cooldown(0.25, 1.0) == pytest.approx(0.75)


def test_what_a_recipe_gives_is_the_papers_formula_to_the_last_bit():
    curve = rates(900, warmup_steps=300, cooldown=0.0, learning_rate_scale=1.7)
    assert curve == [noam(step, 128, 300, 1.7) for step in range(1, 901)]
    curve = rates(900, warmup_steps=300, cooldown=0.6)
    assert curve == [noam(step, 128, 300) * cooldown((step - 1) / 900, 0.6) for step in range(1, 901)]
    assert max(curve) == pytest.approx((128 * 300) ** -0.5)


@pytest.mark.parametrize("steps", [1600, 2400, 15000])
def test_warm_up_is_a_quarter_of_the_run(steps):
    """And then the paper's curve, until it falls to nothing over the last half."""
    curve = rates(steps)
    assert abs(curve.index(max(curve)) + 1 - steps / 4) <= 2
    middle = steps // 2
    assert curve[middle - 1] == pytest.approx(noam(middle, 128, steps / 4))
    assert max(curve) == pytest.approx((128 * steps / 4) ** -0.5, rel=0.01)
    assert curve[-1] < 0.01 * max(curve)
    assert curve[0] < 0.01 * max(curve)


def test_a_long_run_has_the_papers_warm_up():
    assert rates(20_000, cooldown=0.0) == pytest.approx([noam(step, 128, 4000) for step in range(1, 20_001)])
    assert warmup_steps(30_000, 1.0) == 4000


@pytest.mark.parametrize("steps", [3, 40, 400])
def test_a_short_run_is_not_steeper_than_small_models_take(steps):
    for d_model in (128, 512):
        curve = rates(steps, d_model)
        assert 0.46 / d_model < max(curve) < 0.58 / d_model
        assert all(rate > 0 for rate in curve)


@pytest.mark.parametrize("schedule", ["inverse-square-root", "noam", "linear", "cosine", "warmup-stable-decay"])
@pytest.mark.parametrize("peak_rate", [None, 0.01])
def test_a_warm_up_that_does_not_fit_takes_half_of_the_run(schedule, peak_rate):
    """The peak stays that of the recipe's warm-up: (128 * 400)^-0.5 for the paper's formula."""
    if schedule == "noam" and peak_rate:
        return
    options = {"schedule": schedule, "learning_rate": peak_rate, "warmup_steps": 400, "cooldown": 0.5}
    highest = peak_rate or (128 * 400) ** -0.5
    for steps in (50, 500):
        curve = rates(steps, **options)
        assert max(curve) == pytest.approx(highest, rel=0.05)
        reached = next(step for step, rate in enumerate(curve, 1) if rate > 0.999 * max(curve))
        assert abs(reached - steps / 2) <= 2
        assert all(a < b for a, b in itertools.pairwise(curve[: reached - 1]))
    known = TrainingOptions(minutes=1.0, **options)
    shares = [(step - 1) / 50 for step in range(1, 51)]
    assert [learning_rate(known, 128, step, share) for step, share in enumerate(shares, 1)] == rates(50, **options)
    assert warm_up(TrainingOptions(steps=800, warmup_steps=400), 800, 1.0) == 400


@pytest.mark.parametrize("options", [{"cooldown": 0.0}, {"schedule": "constant"}])
def test_a_schedule_without_a_falling_end_is_the_same_however_long_the_run(options):
    assert rates(50, warmup_steps=400, **options) == rates(500, warmup_steps=400, **options)[:50]


def test_a_given_peak_is_reached():
    for steps in (60, 3000):
        curve = rates(steps, learning_rate=1e-3)
        assert max(curve) == pytest.approx(1e-3, rel=0.04)
    curve = rates(1000, learning_rate=1e-3, warmup_steps=100, cooldown=0.0)
    assert curve[99] == max(curve) == pytest.approx(1e-3)
    assert curve[399] == pytest.approx(0.5e-3)
    assert peak(TrainingOptions(steps=1, learning_rate=1e-3), 128, 250) == pytest.approx(1e-3)
    assert peak(TrainingOptions(steps=1, warmup_steps=250), 128, 250) == pytest.approx((128 * 250) ** -0.5)


def test_by_the_clock():
    """Steps of even length give the rates of as many steps; the number of steps isn't known. A slow first step, as of a
    compiler at work, makes nothing steep."""
    options = TrainingOptions(minutes=1.0)
    even = [learning_rate(options, 128, step, (step - 1) / 2000) for step in range(1, 2001)]
    assert even == rates(2000)
    shares = [0.0, *(0.05 + 0.95 * step / 1900 for step in range(1900))]
    late = [learning_rate(options, 128, step, share) for step, share in enumerate(shares, 1)]
    assert max(late) == pytest.approx(max(even), rel=0.2)
    assert late[1] < 0.25 * max(late)
    rising = late[: late.index(max(late))]
    assert all(a < b for a, b in itertools.pairwise(rising))


@pytest.mark.parametrize("steps", [400, 4000])
def test_the_other_curves(steps):
    """After the same warm-up: level, a line to nothing, half a wave to nothing, level with a falling end."""
    options = {"learning_rate": 0.01, "warmup_steps": steps // 10}
    constant, linear, cosine, decaying = (
        rates(steps, schedule=name, **options) for name in ("constant", "linear", "cosine", "warmup-stable-decay")
    )
    warm = steps // 10
    for curve in (constant, linear, cosine, decaying):
        assert curve[:warm] == pytest.approx([0.01 * step / warm for step in range(1, warm + 1)])
        assert max(curve) == pytest.approx(0.01)
    assert constant[warm:] == pytest.approx([0.01] * (steps - warm))
    shares = [(step - warm) / (steps - warm) for step in range(warm, steps)]
    for i, share in enumerate(shares[1:], start=warm + 1):
        assert linear[i] == pytest.approx(0.01 * (1 - share), rel=0.02, abs=1e-4)
        assert cosine[i] == pytest.approx(0.005 * (1 + math.cos(math.pi * share)), rel=0.02, abs=1e-4)
    assert decaying[: steps // 2] == constant[: steps // 2]
    assert decaying[steps * 3 // 4] == pytest.approx(0.005)
    assert max(linear[-1], cosine[-1], decaying[-1]) < 1e-4


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "warmup-stable-decay"])
def test_a_run_by_the_clock_has_the_same_curves(schedule):
    """Its warm-up is a quarter, whatever the number of steps turns out to be."""
    curve = rates(1000, schedule=schedule, learning_rate=0.01)
    known = rates(1000, schedule=schedule, learning_rate=0.01, warmup_steps=250)
    assert curve[99:] == pytest.approx(known[99:], rel=0.02, abs=2e-5)


def test_noam_is_the_paper_however_short_the_run():
    assert max(rates(400, schedule="noam")) == pytest.approx((128 * 100) ** -0.5, rel=0.01)
    assert max(rates(400)) < 0.58 / 128
