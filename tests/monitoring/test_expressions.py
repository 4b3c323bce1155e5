"""No alert and no panel asks for a series that nothing exports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pdserve.monitoring.dashboard import read_rows
from pdserve.monitoring.prometheus import read_alerts
from pdserve.pd.telemetry.metrics import Metrics
from pdserve.pd.telemetry.metrics_page import COUNTERS, GAUGES, PREFIX, STAGES
from tests.tables import each_row

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


RECORDED = Path(__file__).parents[1] / "fixtures" / "http"
TARGET = {"deployment", "process", "node", "role", "job", "instance"}
SERIES_OF_COUNTS = ("_total", "_bucket", "_sum", "_count")
GAUGES_BY_ANOTHER_NAME = {"master_key_count"}
"""A gauge of mooncake_master, in spite of its name."""


def exported_by_the_proxy() -> dict[str, set[str]]:
    """Series of the page that a proxy makes -> their labels."""
    metrics = Metrics()
    for name, (_, labels) in COUNTERS.items():
        metrics.count(name, labels)  # each label has its own name as its value
    metrics.read_gauges_from(lambda: [(name, labels, 1.0) for name, (_, labels) in GAUGES.items()])
    for stage in STAGES:
        getattr(metrics, stage).observe(0.1)
    families = text_string_to_metric_families(metrics.page(keys=True).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_proxy_exports_all_that_is_asked_of_it() -> None:
    asked = {name for name in NAMES if name.startswith(PREFIX)}
    assert asked
    assert asked <= exported_by_the_proxy().keys()


@each_row("expression", ALL)
def test_a_rate_is_of_what_counts_up(expression: Expression) -> None:
    """The rate of a gauge is a number too, and means nothing."""
    assert all(name.endswith(SERIES_OF_COUNTS) for name in expression.counted)
    counts = {name for name in expression.metrics if name.endswith(SERIES_OF_COUNTS)} - GAUGES_BY_ANOTHER_NAME
    assert counts == expression.counted


@each_row("expression", ALL)
def test_series_of_the_proxy_are_grouped_by_labels_that_they_have(expression: Expression) -> None:
    known = exported_by_the_proxy()
    grouped = {
        label.strip() for labels in re.findall(r"by \(([^)]*)\)", expression.expr) for label in labels.split(",")
    }
    for name in expression.metrics & known.keys():
        assert grouped <= known[name] | TARGET - {"role"}, f"{name} has {sorted(known[name])}"
