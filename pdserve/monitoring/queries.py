"""Lines of a dashboard's graphs, in PromQL, each over the chosen deployment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SELECTED = 'deployment=~"$deployment"'
"""The dashboard's variable, in every selector."""
RANGE = "$__rate_interval"
"""Grafana's own choice of a window, from the scrape interval and the zoom."""


@dataclass(frozen=True)
class Query:
    """One line, or one line a label."""

    expr: str
    legend: str


def rate(metric: str, by: str, selector: str = "") -> str:
    """Per second. `selector`: of samples, beside the deployment's."""
    selectors = ",".join(filter(None, (SELECTED, selector)))
    return f"sum by ({by}) (rate({metric}{{{selectors}}}[{RANGE}]))"


def counted(metric: str, *labels: str, named: str = "", selector: str = "", shown: tuple[str, ...] = ()) -> Query:
    """A counter per second, one line for each value of the labels; `named` is before them in the legend, which has only
    those in `shown` where that is given."""
    words = [*([named] if named else []), *(f"{{{{{label}}}}}" for label in shown or labels)]
    return Query(rate(metric, ", ".join(labels), selector), " ".join(words))


def quantiles(metric: str, by: str = "") -> Iterator[Query]:
    """p50, p90 and p99 of a histogram."""
    groups = f"le, {by}" if by else "le"
    for name, quantile in (("p50", "0.5"), ("p90", "0.9"), ("p99", "0.99")):
        legend = f"{name} {{{{{by}}}}}" if by else name
        yield Query(f"histogram_quantile({quantile}, {rate(f'{metric}_bucket', groups)})", legend)


def each(metric: str, by: str, function: str = "sum") -> Query:
    """A gauge, one line a value of the label."""
    return Query(f"{function} by ({by}) ({metric}{{{SELECTED}}})", f"{{{{{by}}}}}")


def share(part: str, whole: str, by: str) -> Query:
    """Of two counters, over the same window."""
    return Query(f"{rate(part, by)} / {rate(whole, by)}", f"{{{{{by}}}}}")
