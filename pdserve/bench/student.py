"""Student's t for any degrees of freedom, whole or not. The standard library has none, and pdserve needs no SciPy."""

from __future__ import annotations

import math

SHARE = 0.01
"""Of the distribution that lies beyond, on both sides together. 1 % and not 5 %: a comparison judges dozens of figures,
and of those that are equal 1 in 20 would be called different."""
_LEAST, _MOST = 2.575829, 63.656742
"""For endless degrees of freedom (the normal distribution), and for 1."""
_ENOUGH = 1000.0
"""From here on t is 2.58."""
_PRECISION = 1e-12


def quantile(freedom: float) -> float:
    """By bisection. `freedom`: 1 at least, as Welch and Satterthwaite have it from two repeats on each side on."""
    freedom = min(max(freedom, 1.0), _ENOUGH)
    low, high = _LEAST, _MOST
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle, freedom) > SHARE else (low, middle)
    return high


def beyond(t: float, freedom: float) -> float:
    """The share of the distribution beyond -t and t: the regularized incomplete beta function of freedom/2 and 1/2 at
    freedom / (freedom + t²) (Abramowitz and Stegun 26.7.1), by its power series (NIST's DLMF, 8.17.7). Every term is
    positive, and `quantile` asks for no t at which there are many."""
    a, x = freedom / 2, freedom / (freedom + t * t)
    coefficient, terms, number = 1.0, 1 / a, 0
    while True:
        number += 1
        coefficient *= (number - 0.5) / number * x
        term = coefficient / (a + number)
        terms += term
        if term < _PRECISION * _PRECISION * terms:
            break
    log_beta = math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
    return math.exp(a * math.log(x) - log_beta) * terms
