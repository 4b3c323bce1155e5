"""Which pictures a report has."""

from __future__ import annotations

from pdserve.report.bars import sources_picture, stages_picture
from pdserve.report.curves import against_load, pareto
from pdserve.report.drawing import Picture
from pdserve.report.rows import ReportContents
from pdserve.report.timeline_picture import timeline_picture


def pictures(report: ReportContents) -> list[Picture]:
    """Those for which there is something to draw. Timelines come last."""
    names = report.names
    rows, made = report.rows, list[Picture | None]()
    closed = [row for row in rows if row.load.concurrency is not None]
    made += [pareto(rows, names), against_load(closed, "ttft", names), against_load(closed, "itl", names)]
    made += [sources_picture(rows, names), stages_picture(rows, names)]
    made += [timeline_picture(number, each) for number, each in enumerate(report.timelines, start=1)]
    return [picture for picture in made if picture is not None]
