"""Student's t against tables, and against SciPy where there is no table."""

from __future__ import annotations

import pytest

from pdserve.bench.compare import beyond, judged, quantile
from tests.tables import each_row

TABLE = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845),
    *(2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)
"""99 % on both sides, from 1 degree of freedom on, as tables have it."""


@each_row("freedom, t", tuple(enumerate(TABLE, start=1)))
def test_whole_degrees_of_freedom_are_those_of_the_table(freedom: int, t: float) -> None:
    assert quantile(freedom) == pytest.approx(t, abs=5.1e-4)


@each_row("freedom, t", [
    *((1.2, 33.239028298318225), (1.5, 17.820310514462804), (1.9, 10.851379126309448), (2.4, 7.551950562755895)),
    *((3.5, 5.085702223091256), (7.3, 3.451031655622185), (57.3, 2.6643894364923972), (120, 2.6174211451068654)),
])  # fmt: skip
def test_others_are_those_of_scipy(freedom: float, t: float) -> None:
    """scipy.stats.t.ppf(0.995, freedom)."""
    assert quantile(freedom) == pytest.approx(t, rel=1e-9)


def test_below_one_and_above_a_thousand_it_stays_what_it_is_there() -> None:
    assert quantile(0.99) == quantile(1)
    assert quantile(1e9) == quantile(1000) == pytest.approx(2.580754698, rel=1e-9)


@each_row("t, freedom, share", [(1.0, 1, 0.5), (6.314, 1, 0.1), (2.920, 2, 0.1), (2.228, 10, 0.05)])
def test_the_share_beyond_is_that_of_the_table(t: float, freedom: float, share: float) -> None:
    assert beyond(t, freedom) == pytest.approx(share, abs=2e-4)


def test_two_repeats_of_each_side_have_their_own_degrees_of_freedom() -> None:
    """Variances 0.5 and 0.605 of two: Welch has 1.9821, not 1; the half of the interval is SciPy's."""
    noise, judgement = judged([100.0, 101.0], [130.0, 131.1])
    assert noise == pytest.approx(7.4902851641841455, rel=1e-6)
    assert judgement == "real"
