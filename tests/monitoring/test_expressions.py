"""No alert and no panel asks for a series that nothing exports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from prometheus_client.parser import text_string_to_metric_families

from pdserve.monitoring.dashboard import read_rows
from pdserve.monitoring.prometheus import Part, read_alerts
from pdserve.patches.registry import REGISTRY
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


def test_the_names_that_expressions_have_are_seen() -> None:
    read = Expression("", 'sum by (a) (rate(vllm:b_total{c="up{d}"}[5m])) / 0.01 * lmcache_mp_e > up{f=""}')
    assert read.metrics == {"vllm:b_total", "lmcache_mp_e", "up"}
    assert read.counted == {"vllm:b_total"}


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


@each_row("page", ["vllm-0.32.0-decode", "vllm-0.32.0-prefill", "lmcache-0.5.6"])
def test_recorded_pages_have_what_engines_export_from_their_start(page: str) -> None:
    families = text_string_to_metric_families((RECORDED / f"{page}.metrics").read_text())
    series = {sample.name for family in families for sample in family.samples}
    asked = {
        "vllm": {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_by_source_total"},
        "lmca": {"lmcache_mp_l1_usage_ratio", "lmcache_mp_lookup_hit_tokens_total"},
    }[page[:4]]
    assert asked <= NAMES
    assert asked <= series


def test_effects_that_alerts_wait_for_are_counted_by_a_patch() -> None:
    effects = {(patch.name, effect) for patch in REGISTRY for effect in patch.effects}
    alerts = [alert["expr"] for alert in read_alerts() if "pdserve_patch_effects" in alert["expr"]]
    assert len(alerts) == 2
    for name in ("pulls-failed", "peers-lost"):
        assert name in alerts[0]
        assert ("mooncake-pulls", name) in effects
    assert "out-of-sockets" in alerts[1]
    assert ("mooncake-pulls", "out-of-sockets") in effects


def test_every_alert_and_row_is_of_a_part_that_a_deployment_can_have() -> None:
    assert {entry["part"] for entry in (*read_alerts(), *read_rows())} == set(get_args(Part))
