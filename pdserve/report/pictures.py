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
    measured = [row for row in report.rows if row.measurement is not None and row.measurement.figures.completed]
    closed = [row for row in measured if row.load.concurrency is not None]
    made: list[Picture | None] = []
    if measured:
        made.append(pareto(measured, names))
    if closed:
        made += [against_load(closed, "ttft", names), against_load(closed, "itl", names)]
    if measured:
        made += [sources_picture(measured, names), stages_picture(measured, names)]
    made += [timeline_picture(number, each) for number, each in enumerate(report.timelines, start=1)]
    return [picture for picture in made if picture is not None]
