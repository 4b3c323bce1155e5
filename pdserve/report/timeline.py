"""From the history of a run to lanes: when each process started, was ready, died and came back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pdserve.run.history import incident

LaneState = Literal["starting", "ready", "silent", "dead", "stopping"]
MarkKind = Literal["died", "restarting"]
DEPLOYMENT = "deployment"
"""The lane of all together."""
_STATES: Mapping[str, LaneState | None] = {
    "start": "starting",
    "started": "starting",
    "ready": "ready",
    "responsive": "ready",
    "unresponsive": "silent",
    "died": "dead",
    "late": "dead",
    "given_up": "dead",
    "cache_down": "dead",
    "restarting": "dead",
    "stop": "stopping",
    "stopped": None,
}
"""What an event makes of its process; None: it is over."""
_PHASES: Mapping[str, LaneState | None] = {
    "starting": "starting",
    "ready": "ready",
    "degraded": "silent",
    "failed": "dead",
    "draining": "stopping",
    "stopped": None,
}


@dataclass(frozen=True)
class LaneSpan:
    """Of a lane, in seconds since the beginning."""

    state: LaneState
    began: float
    ended: float


@dataclass(frozen=True)
class LaneMark:
    """A death, or the moment from which it is started again."""

    kind: MarkKind
    at: float


@dataclass
class Lane:
    """Of a process."""

    name: str
    spans: list[LaneSpan] = field(default_factory=list)
    marks: list[LaneMark] = field(default_factory=list)
    _state: LaneState | None = None
    _since: float = 0.0

    def turn(self, state: LaneState | None, at: float) -> None:
        """From `at` on it is that."""
        if state == self._state:
            return
        if self._state is not None and at > self._since:
            self.spans.append(LaneSpan(self._state, self._since, at))
        self._state, self._since = state, at

    def mark(self, kind: MarkKind, at: float) -> None:
        if LaneMark(kind, at) not in self.marks:
            self.marks.append(LaneMark(kind, at))

    def dead(self) -> bool:
        return self._state in (None, "dead", "stopping")


@dataclass(frozen=True)
class MeasuredSpan:
    """A measurement: by the wall clock, in a timeline in seconds since its beginning."""

    began: float
    ended: float
    title: str
    valid: bool


@dataclass(frozen=True)
class Timeline:
    """Of a run."""

    run_id: str
    of: str
    """What was measured on it."""
    began: float
    """Wall-clock seconds."""
    seconds: float
    lanes: tuple[Lane, ...]
    windows: tuple[MeasuredSpan, ...]
    incidents: tuple[tuple[float, str], ...]
    """Seconds since the beginning, and what happened."""


def timeline(
    run_id: str, of: str, events: Sequence[Mapping[str, Any]], measured: Sequence[MeasuredSpan]
) -> Timeline | None:
    """None: nothing is known of the run. The end is the last event, or the end of the last measurement."""
    times = [float(event["at"]) for event in events if event["event"] != "unreadable"]
    times += [at for each in measured for at in (each.began, each.ended)]
    if not events or not times:
        return None
    first, last = min(times), max(times)
    lanes: dict[str, Lane] = {DEPLOYMENT: Lane(DEPLOYMENT)}
    lanes[DEPLOYMENT].turn("starting", 0.0)
    nodes: dict[str, str] = {}
    incidents = []
    for event in events:
        at = float(event["at"]) - first
        if (what := incident(event)) is not None:
            why = event.get("how") or event.get("why")
            incidents.append((at, f"{what}: {why}" if why else what))
        for name in _concerned(event, nodes, lanes):
            _apply(lanes.setdefault(name, Lane(name)), event, at)
    for lane in lanes.values():
        lane.turn(None, last - first)
    windows = tuple(replace(each, began=each.began - first, ended=each.ended - first) for each in measured)
    drawn = tuple(lane for lane in lanes.values() if lane.spans or lane.marks)
    return Timeline(run_id, of, first, last - first, drawn, windows, tuple(incidents))


def _concerned(event: Mapping[str, Any], nodes: dict[str, str], lanes: Mapping[str, Lane]) -> Iterable[str]:
    """The lanes that an event is about. `nodes`: of each process, as far as it is known."""
    kind, name = event["event"], event.get("name")
    if kind in ("phase", "failed", "down"):
        return [DEPLOYMENT]
    if kind == "agent_gone":
        # With its agent all processes of a node are gone.
        return [each for each, node in nodes.items() if node == event.get("node") and not lanes[each].dead()]
    if not isinstance(name, str) or kind not in _STATES:
        return []
    if isinstance(node := event.get("node"), str):
        nodes[name] = node
    return [name]


def _apply(lane: Lane, event: Mapping[str, Any], at: float) -> None:
    kind = event["event"]
    if kind == "phase":
        lane.turn(_PHASES.get(str(event.get("phase")), None), at)
    elif kind == "failed":
        lane.turn("dead", at)
        lane.mark("died", at)
    elif kind == "down":
        lane.turn(None, at)
    elif kind == "agent_gone":
        lane.turn("dead", at)
        lane.mark("died", at)
    else:
        if kind in ("died", "late", "given_up"):
            lane.mark("died", at)
        if kind == "restarting":
            lane.mark("restarting", at)
        # A command that has ended as it should is over, not ready.
        lane.turn(None if kind == "ready" and event.get("done") else _STATES[kind], at)
