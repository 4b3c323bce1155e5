"""Every PromQL expression of the alerts and panels, and the metrics that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.monitoring.dashboard import read_rows
from pdserve.monitoring.prometheus import read_alerts

_METRIC = re.compile(r"[a-zA-Z_:][\w:]*(?=[{\[])|\b(?:vllm:|lmcache_mp_|pdserve_|master_)\w+|\bup\b")
_COUNTED = re.compile(r"(?:rate|increase)\(([\w:]+)")


@dataclass(frozen=True)
class Expression:
    """`where`: the alert, or the panel and the legend."""

    where: str
    expr: str

    @property
    def metrics(self) -> set[str]:
        """The names of series in it."""
        return set(_METRIC.findall(re.sub(r'"[^"]*"', '""', self.expr)))

    @property
    def counted(self) -> set[str]:
        """Those that it takes a rate or an increase of."""
        return set(_COUNTED.findall(self.expr))

    @property
    def concrete(self) -> str:
        """With values in place of Grafana's variables."""
        return self.expr.replace("$deployment", "tiny-cpu").replace("$__rate_interval", "1m")


def expressions() -> Iterator[Expression]:
    """Yield those of the alerts, then those of the dashboard."""
    for alert in read_alerts():
        yield Expression(alert["alert"], alert["expr"])
    for row in read_rows():
        for panel in row["panels"]:
            for legend, expr in panel["lines"].items():
                yield Expression(f"{row['title']}/{panel['title']}/{legend}", expr)


ALL = tuple(expressions())
NAMES = frozenset(name for expression in ALL for name in expression.metrics)
