"""Make the dashboard as Grafana imports it: schema 38, which Grafana 10 and later read. Its rows are dashboard.yml."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from pdserve.monitoring.prometheus import Part

_SCHEMA = 38
_WIDTH = 24
"""Columns of a Grafana page."""
_PANEL_WIDTH, _PANEL_HEIGHT = 8, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_VARIABLES = [
    {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "deployment",
        "label": "Deployment",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": "label_values(up, deployment)", "refId": "deployments"},
        "refresh": 2,
        "includeAll": False,
        "multi": False,
    },
]


def read_rows() -> list[dict[str, Any]]:
    """Return all rows, each with its `part`."""
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("dashboard.yml").read_text())
    return rows


def dashboard_json(parts: Collection[Part]) -> str:
    """Return the dashboard of deployments with these parts. All in one Prometheus share it: one is chosen above."""
    document = {
        "uid": "pdserve",
        "title": "pdserve",
        "tags": ["pdserve", "vllm"],
        "schemaVersion": _SCHEMA,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _VARIABLES},
        "panels": list(_place_panels([row for row in read_rows() if row["part"] in parts])),
    }
    return json.dumps(document, indent=2) + "\n"


def _place_panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": row["title"], "collapsed": False, "panels": [], "gridPos": place}
        top += 1
        for index, panel in enumerate(row["panels"]):
            number += 1
            line, column = divmod(index, _WIDTH // _PANEL_WIDTH)
            at = {"x": column * _PANEL_WIDTH, "y": top + line * _PANEL_HEIGHT, "w": _PANEL_WIDTH, "h": _PANEL_HEIGHT}
            yield {"id": number, "gridPos": at, **_graph(panel)}
        top += -(-len(row["panels"]) * _PANEL_WIDTH // _WIDTH) * _PANEL_HEIGHT


def _graph(panel: dict[str, Any]) -> dict[str, Any]:
    stacked = panel.get("stacked", False)
    custom = {"fillOpacity": 20 if stacked else 0, "stacking": {"mode": "normal" if stacked else "none"}}
    scale = {"min": 0, "max": 1} if panel["unit"] == "percentunit" else {"min": 0}
    return {
        "type": "timeseries",
        "title": panel["title"],
        "description": panel["about"],
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel["unit"], **scale, "custom": custom}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for index, (legend, expr) in enumerate(panel["lines"].items())
        ],
    }
