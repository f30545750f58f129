"""Section 5.3, formula 3, by numbers; the cooldown at its ends."""

import pytest

from mlx_transformer.training.schedule import cooldown, noam


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
