"""The comparison of two results: what differs in what was measured, then the figures that differ by more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pdserve.bench.figures import PERCENTILES, Figures, Spread
from pdserve.bench.result import BenchResult, Measurement, Provenance, Window
from pdserve.bench.workload import USUAL_GRACE, USUAL_OUTPUT, Load, Workload
from pdserve.errors import StateError
from pdserve.plan.frozen import Frozen
from pdserve.recipe.load.yaml12 import flow, parse

SHARE = 0.01
"""Of the distribution that lies beyond, on both sides together. 1 % and not 5 %: a comparison judges dozens of figures,
and of those that are equal 1 in 20 would be called different."""
_LEAST, _MOST = 2.575829, 63.656742
"""For endless degrees of freedom (the normal distribution), and for 1."""
_ENOUGH = 1000.0
"""From here on t is 2.58."""
_PRECISION = 1e-12


def quantile(freedom: float) -> float:
    """Return the t of Student's distribution that 1 % of all lie beyond, by bisection. `freedom`: 1 at least, as Welch
    and Satterthwaite have it from two repeats on each side on."""
    freedom = min(max(freedom, 1.0), _ENOUGH)
    low, high = _LEAST, _MOST
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tail_probability(middle, freedom) > SHARE else (low, middle)
    return high


def tail_probability(t: float, freedom: float) -> float:
    """Return the share of the distribution beyond -t and t: the regularized incomplete beta function of freedom/2 and
    1/2 at freedom / (freedom + t²) (Abramowitz and Stegun 26.7.1), by its power series (NIST's DLMF, 8.17.7). Every
    term is positive, and `quantile` asks for no t at which there are many."""
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


Group = Literal["latencies", "rates", "requests", "engines and caches", "CPU"]
Better = Literal["less", "more"]


@dataclass(frozen=True)
class ComparedFigure:
    """Names a figure of a measurement, and says which way is better."""

    group: Group
    unit: str
    better: Better | None
    """None: a change of it is neither better nor worse by itself."""
    read: Callable[[Measurement], float | None]
    """None: it was not measured."""


def _latency(name: str, part: str) -> ComparedFigure:
    def read(measurement: Measurement) -> float | None:
        spread: Spread | None = getattr(measurement.figures, name)
        return None if spread is None else getattr(spread, part)

    return ComparedFigure("latencies", "ms", "less", read)


def _client(group: Group, unit: str, better: Better, read: Callable[[Figures], float | None]) -> ComparedFigure:
    return ComparedFigure(group, unit, better, lambda measurement: read(measurement.figures))


def _window(
    unit: str, better: Better | None, read: Callable[[Window], float | None], group: Group = "engines and caches"
) -> ComparedFigure:
    return ComparedFigure(group, unit, better, lambda measurement: read(measurement.window))


def _share(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _preemptions(window: Window) -> float | None:
    counted = [role["preemptions"] for role in (window.prefill, window.decode) if "preemptions" in role]
    return sum(counted) if counted else None


FIGURES: Mapping[str, ComparedFigure] = {
    **{
        f"{title} {part}": _latency(name, part)
        for title, name in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))
        for part in ("mean", *(f"p{percent}" for percent in PERCENTILES))
    },
    "requests": _client("rates", "requests/s", "more", lambda figures: figures.requests_per_second),
    "goodput": _client("rates", "requests/s", "more", lambda figures: figures.goodput),
    "output": _client("rates", "tokens/s", "more", lambda figures: figures.output_per_second),
    "total": _client("rates", "tokens/s", "more", lambda figures: figures.total_per_second),
    "output per GPU": _client("rates", "tokens/s", "more", lambda figures: figures.output_per_second_per_gpu),
    "total per GPU": _client("rates", "tokens/s", "more", lambda figures: figures.total_per_second_per_gpu),
    "1000/ITL p50": _client("rates", "tokens/s/user", "more", lambda figures: figures.interactivity_by_itl.get("p50")),
    "1000/mean TPOT": _client("rates", "tokens/s/user", "more", lambda figures: figures.interactivity_by_tpot),
    "answered": _client("requests", "requests", "more", lambda figures: float(figures.completed)),
    "failed": _client(
        "requests", "requests", "less", lambda figures: float(figures.requests - figures.completed - figures.cut)
    ),
    "cut": _client("requests", "requests", "less", lambda figures: float(figures.cut)),
    "prefix hit": _window("%", "more", lambda window: _share(window.prefix_hit)),
    "computed on prefill": _window("tokens", "less", lambda window: window.prefill.get("computed")),
    "loaded on prefill": _window("tokens", None, lambda window: window.prefill.get("received")),
    "LMCache had": _window("%", None, lambda window: _share(window.cache_hit)),
    "chunks stored": _window("chunks", None, lambda window: window.lmcache.get("written")),
    "chunks loaded": _window("chunks", None, lambda window: window.lmcache.get("read")),
    "chunks evicted": _window("chunks", "less", lambda window: window.lmcache.get("evicted")),
    "received by decode": _window("tokens", None, lambda window: window.decode.get("received")),
    "computed by decode": _window("tokens", "less", lambda window: window.decode.get("computed")),
    "KV moved": _window("MiB", None, lambda window: None if window.moved_bytes is None else window.moved_bytes / 2**20),
    "KV transfers": _window("s", "less", lambda window: window.moved_seconds),
    "preemptions": _window("requests", "less", _preemptions),
    "most running": _window("requests", None, lambda window: window.peaks.running),
    "most waiting": _window("requests", "less", lambda window: window.peaks.waiting),
    "fullest KV": _window("%", None, lambda window: _share(window.peaks.kv_usage)),
    "CPU of the client": _window("cores", "less", lambda window: window.client_cpu.used, "CPU"),
    "CPU of the proxy": _window("cores", "less", lambda window: window.proxy_cpu.used, "CPU"),
}
"""In the order in which they are shown."""
GROUPS: tuple[Group, ...] = tuple(dict.fromkeys(figure.group for figure in FIGURES.values()))


Judgement = Literal["real", "within noise", "not judged"]

_TITLES = {"git_revision": "commit of pdserve"}
"""Of what versions.json calls otherwise."""
_HOW = ("warmup", "max_failed", "session_header", "trace_block")
"""Settings of a workload that two results of the same work may have differently."""
_FEWEST = 2
"""Repeats on each side, of which there is a spread."""
_LEAST_CHANGE = 0.001
"""Of the larger mean: repeats that are equal by chance, or by rounding, have no noise at all."""
ANOTHER_START = "another start of the deployment"
"""What differs where the repeats of A and of B are of one start each."""
STARTS_NOTE = "Each side is one start of its deployment: what changes from start to start is not in the noise."


class Difference(Frozen):
    """Describes something that differs in what was measured. None: it is not there."""

    what: str
    a: str | None
    b: str | None


class FigureChange(Frozen):
    """A figure at a load: the mean over the valid repeats of each side."""

    load: str
    group: Group
    figure: str
    unit: str
    good: Better | None
    """Which change of it is better; None: neither is by itself."""
    a: float
    b: float
    noise: float | None
    """Half of the 99 % interval of the difference (Welch); None: there are too few repeats."""
    judgement: Judgement

    @property
    def change(self) -> float | None:
        """Return the change as a share of A."""
        return (self.b - self.a) / self.a if self.a else None

    @property
    def noise_share(self) -> float | None:
        """Return the noise as a share of A."""
        return None if self.noise is None or not self.a else self.noise / abs(self.a)

    @property
    def better(self) -> bool | None:
        """Return whether B is better: less time, or more of a rate. None: it is neither better nor worse."""
        return None if self.good is None else (self.b < self.a) == (self.good == "less")

    @property
    def shown(self) -> str:
        """Return the judgement for a reader."""
        if self.judgement != "real":
            return self.judgement
        if self.better is None:
            return f"real: {'less' if self.b < self.a else 'more'}"
        return f"real: {'better' if self.better else 'worse'}"

    @property
    def zero(self) -> bool:
        """Return whether nothing of the figure was counted on both sides."""
        return not self.a and not self.b


class Comparison(Frozen):
    """Holds all of a comparison, in the order in which it is read."""

    differences: tuple[Difference, ...]
    changes: tuple[FigureChange, ...]
    left_out: tuple[str, ...]
    """Loads and repeats that are not compared, and why."""

    @property
    def verdict(self) -> str:
        """Say in a few sentences what has changed."""
        parts = [count_changes(self.changes) or "Nothing can be judged: see below."]
        parts += [STARTS_NOTE] if any(each.what == ANOTHER_START for each in self.differences) else []
        return " ".join(parts)


def count_changes(changes: Sequence[FigureChange], where: str = "") -> str:
    """Return how many changes are real, in two sentences; empty where none can be judged. `where`: ` at 3 points`."""
    judged = [change for change in changes if change.judgement != "not judged" and not change.zero]
    if not judged:
        return ""
    real = [change for change in judged if change.judgement == "real"]
    text = f"{len(real) or 'None'} of {len(judged)} figures{where} changed by more than the noise over repeats"
    if real:
        better, worse, neither = count_sides(real)
        text += f": B is better in {better} and worse in {worse} of them" + (
            f", neither in {neither}" if neither else ""
        )
    # 99 % intervals. A figure without noise is never called different by chance.
    by_chance = sum(bool(change.noise) for change in judged) / 100
    return f"{text}. Of figures that did not change, about one in a hundred is called changed: here {by_chance:.1f}."


def shown_groups(changes: Sequence[FigureChange]) -> Mapping[Group, Sequence[FigureChange]]:
    """Return the changes of a load by their groups, as a table has them: without those that are 0 on both sides."""
    groups: dict[Group, list[FigureChange]] = {}
    for change in changes:
        if not change.zero:
            groups.setdefault(change.group, []).append(change)
    return groups


def uncounted_figures(changes: Sequence[FigureChange]) -> Sequence[str]:
    """Return the changes of a load of which nothing was counted on both sides."""
    return [change.figure for change in changes if change.zero]


def count_sides(real: Sequence[FigureChange]) -> tuple[int, int, int]:
    """Return how many changes are better, worse, and neither."""
    better, worse, neither = (sum(change.better is kind for change in real) for kind in (True, False, None))
    return better, worse, neither


def compare(a: BenchResult, b: BenchResult) -> Comparison:
    """Compare two results, figure by figure. Raises StateError when they were not asked for the same work."""
    if (asked := work_of(a.workload)) != (other := work_of(b.workload)):
        raise StateError(
            f"the two results are of different work: {asked}, and {other}",
            cause="figures of other prompts, answers or limits show nothing of the deployment",
            todo="measure both with the same --input-tokens and --output-tokens, or --trace; --seed and --slo",
        )
    changes: list[FigureChange] = []
    left_out: list[str] = []
    ours, theirs = _by_load(a), _by_load(b)
    for load in dict.fromkeys((*ours, *theirs)):
        both = []
        for name, measured in (("A", ours.get(load, [])), ("B", theirs.get(load, []))):
            valid = [measurement for measurement in measured if measurement.verdict.valid]
            if not measured:
                left_out.append(f"{load}: {name} has no measurement of it")
            elif len(valid) < len(measured):
                checks = dict.fromkeys(reason.check for each in measured for reason in each.verdict.reasons)
                left_out.append(
                    f"{load}: {len(measured) - len(valid)} of {len(measured)} repeats of {name} are INVALID"
                    f" ({', '.join(checks)})"
                )
            both.append(valid)
        if all(both):
            changes += _changes(load, *both)
    starts = a.provenance.run_id, b.provenance.run_id
    differences = [
        *_differences(a.provenance, b.provenance),
        *_measured_otherwise(a.workload, b.workload),
        *([Difference(what=ANOTHER_START, a=starts[0], b=starts[1])] if starts[0] != starts[1] else []),
    ]
    return Comparison(differences=tuple(differences), changes=tuple(changes), left_out=tuple(left_out))


def judge_change(a: Sequence[float], b: Sequence[float]) -> tuple[float | None, Judgement]:
    """Return the noise of the difference of two means, and whether the difference exceeds it and is no trifle."""
    if min(len(a), len(b)) < _FEWEST:
        return None, "not judged"
    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    if not sum(parts):
        noise = 0.0
    else:
        # Welch and Satterthwaite: the two sides may spread differently.
        below = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
        noise = quantile(sum(parts) ** 2 / below) * math.sqrt(sum(parts))
    means = statistics.fmean(a), statistics.fmean(b)
    least = max(noise, _LEAST_CHANGE * max(map(abs, means)))
    return noise, "real" if abs(means[1] - means[0]) > least else "within noise"


def work_of(work: Workload) -> str:
    """Return what decides the figures of a load: two results in which it is the same can be compared."""
    slo = ", ".join(f"{name} {limit:g} ms" for name, limit in sorted(work.slo.items())) or "none"
    if work.trace is not None:
        # Of the answers whose length the trace does not have.
        out = work.output_tokens or USUAL_OUTPUT
        return f"{work.title} ({(work.trace_digest or '')[:12]}), {out} out, seed {work.seed}, SLO {slo}"
    return f"{work.input_tokens} tokens in, {work.output_tokens} out, seed {work.seed}, SLO {slo}"


def asked_of(load: Load) -> str:
    """Return what two measurements of the same load were both asked for. With less grace, long answers are cut and in
    no figure."""
    parts = [load.title, f"{load.requests} requests"]
    if load.seconds is not None:
        parts += [f"{load.seconds:g} s", *([f"{load.grace:g} s of grace"] if load.grace != USUAL_GRACE else [])]
    return ", ".join(parts)


def _by_load(result: BenchResult) -> dict[str, list[Measurement]]:
    loads: dict[str, list[Measurement]] = {}
    for measurement in result.measurements:
        loads.setdefault(asked_of(measurement.load), []).append(measurement)
    return loads


def _changes(load: str, a: Sequence[Measurement], b: Sequence[Measurement]) -> list[FigureChange]:
    changes = []
    for title, figure in FIGURES.items():
        left, right = (
            [value for measurement in side if (value := figure.read(measurement)) is not None] for side in (a, b)
        )
        if left and right:
            noise, judgement = judge_change(left, right)
            changes.append(
                FigureChange(
                    load=load,
                    group=figure.group,
                    figure=title,
                    unit=figure.unit,
                    good=figure.better,
                    a=statistics.fmean(left),
                    b=statistics.fmean(right),
                    noise=noise,
                    judgement=judgement,
                )
            )
    return changes


def facts_of(about: Provenance) -> dict[str, str | None]:
    """Return what decides the figures, in the order in which it is read: versions, hardware, what was planned, client,
    keys of the recipe."""
    # The host is hardware; versions.json has it because each of its lines was read there.
    versions = {name: value for name, value in about.versions.items() if name != "host"}
    return {
        **{_TITLES.get(name, f"version of {name}"): value for name, value in versions.items()},
        **{f"hardware: {name}": value for name, value in about.hardware.items()},
        **{f"planned: {name}": value for name, value in about.planned.items()},
        "client": about.client,
        **{f"recipe: {key}": value for key, value in keys_of(about.recipe).items()},
    }


def _differences(a: Provenance, b: Provenance) -> list[Difference]:
    ours, theirs = facts_of(a), facts_of(b)
    names = sorted(dict.fromkeys((*ours, *theirs)), key=_place)
    differences = [
        Difference(what=name, a=ours.get(name), b=theirs.get(name))
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    if a.tokenizer != b.tokenizer:
        differences.append(Difference(what="tokenizer of the client", a=a.tokenizer, b=b.tokenizer))
    return differences


def _measured_otherwise(a: Workload, b: Workload) -> list[Difference]:
    """Return the differences in what is asked of the client beside the work itself."""
    values = [(f"workload: {name}", getattr(a, name), getattr(b, name)) for name in _HOW]
    return [
        Difference(what=what, a=None if left is None else str(left), b=None if right is None else str(right))
        for what, left, right in values
        if left != right
    ]


def _place(name: str) -> int:
    """Return the place of a fact, so that one which only one of two results has is shown among its own kind."""
    return next(
        (
            place
            for place, kind in enumerate(("hardware: ", "planned: ", "client", "recipe: "), 1)
            if name.startswith(kind)
        ),
        0,
    )


def keys_of(recipe: str) -> dict[str, str]:
    """Return the dotted keys of a recipe with their values. Raises RecipeError for what is no YAML."""
    keys: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, below in value.items():
                walk(below, f"{path}.{name}" if path else str(name))
        elif isinstance(value, list) and value:
            for number, below in enumerate(value):
                walk(below, f"{path}[{number}]")
        elif value is not None:  # null: it is not set
            keys[path] = flow(value)

    if recipe:
        walk(parse(recipe, "recipe.yaml").data, "")
    return keys
