"""The dashboard as Grafana imports it: schema 38, which Grafana 10 and later read."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from pdserve.monitoring.panels import ROWS, Panel, PanelRow
from pdserve.monitoring.parts import Part

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


def dashboard_json(parts: Collection[Part]) -> str:
    """The dashboard of deployments with these parts. All of them in one Prometheus share it: one is chosen above."""
    document = {
        "uid": "pdserve",
        "title": "pdserve",
        "tags": ["pdserve", "vllm"],
        "schemaVersion": _SCHEMA,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _VARIABLES},
        "panels": list(_placed([row for row in ROWS if row.part in parts])),
    }
    return json.dumps(document, indent=2) + "\n"


def _placed(rows: list[PanelRow]) -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
        top += 1
        for index, panel in enumerate(row.panels):
            number += 1
            line, column = divmod(index, _WIDTH // _PANEL_WIDTH)
            at = {"x": column * _PANEL_WIDTH, "y": top + line * _PANEL_HEIGHT, "w": _PANEL_WIDTH, "h": _PANEL_HEIGHT}
            yield {"id": number, "gridPos": at, **_graph(panel)}
        top += -(-len(row.panels) * _PANEL_WIDTH // _WIDTH) * _PANEL_HEIGHT


def _graph(panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    scale = {"min": 0, "max": 1} if panel.unit == "percentunit" else {"min": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **scale, "custom": custom}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }
