"""From a sweep and its resolved recipes to points, in the order that changes the deployment least. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.bench.traces.trace import RequestTrace
from pdserve.bench.workload import Load, Workload, usual_requests
from pdserve.recipe.load import yaml12
from pdserve.sweep.file import Sweep

Settings = tuple[tuple[str, str], ...]
"""Keys of a recipe and their values, as `--set KEY=VALUE` takes them."""
_DIGITS = 12


def combinations(sweep: Sweep) -> tuple[Settings, ...]:
    """What is set in each variant of the recipe: `zip` first with first, `cross` each with each."""
    zipped = list(zip(*sweep.zip.values(), strict=True)) if sweep.zip else [()]
    keys = (*sweep.zip, *sweep.cross)
    return tuple(
        tuple((key, yaml12.flow(value)) for key, value in zip(keys, (*first, *second), strict=True))
        for first, second in itertools.product(zipped, itertools.product(*sweep.cross.values()))
    )


@dataclass(frozen=True)
class Variant:
    """A variant of the recipe."""

    settings: Settings
    digest: str
    """Of the resolved recipe."""

    @property
    def title(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings) or "the recipe as it is"


@dataclass(frozen=True)
class Point:
    """A workload under a load, on a deployment."""

    deployment: Variant
    workload: Workload
    load: Load

    @property
    def id(self) -> str:
        """The same for the same resolved recipe, workload and load, wherever it stands in the file."""
        about = {
            "recipe": self.deployment.digest,
            "workload": self._work(),
            "load": self.load.model_dump(mode="json"),
        }
        name = re.sub(r"[^a-z0-9.]+", "-", self.load.title.lower())
        return f"{name}-{_digest(about)}"

    def _work(self) -> dict[str, Any]:
        """A trace by its name and digest: where it stands does not matter."""
        work = self.workload.model_dump(mode="json")
        return work | ({"trace": Path(self.workload.trace).name} if self.workload.trace is not None else {})

    @property
    def work(self) -> str:
        return self.workload.title

    @property
    def title(self) -> str:
        return f"{self.deployment.title}; {self.work}; {self.load.title}"


def recipe_digest(document: Mapping[str, Any], folder: str) -> str:
    """Of a resolved recipe. The order of keys means nothing; what is relative in it depends on its folder."""
    return _digest([document, folder])


def points(
    sweep: Sweep, digests: Sequence[tuple[Settings, str]], traces: Mapping[str, RequestTrace] | None = None
) -> tuple[Point, ...]:
    """All points of a deployment follow each other. Settings that resolve to the same recipe
    are the same deployment, that of the first of them. `digests`: of the recipe of each combination. `traces`: of the
    workloads that have one, by the workload as JSON."""
    deployments = {digest: settings for settings, digest in reversed(digests)}
    order = dict.fromkeys(digest for _, digest in digests)
    made = [
        Point(Variant(deployments[digest], digest), workload, load)
        for digest, workload in itertools.product(order, sweep.workload)
        for load in _loads(sweep, (traces or {}).get(workload.model_dump_json()))
    ]
    return tuple({point.id: point for point in made}.values())


def by_deployment(some: Sequence[Point]) -> list[tuple[Variant, list[Point]]]:
    """Runs of points of a deployment."""
    return [(key, list(group)) for key, group in itertools.groupby(some, key=lambda point: point.deployment)]


def _loads(sweep: Sweep, trace: RequestTrace | None) -> Iterator[Load]:
    each = [*((concurrency, None) for concurrency in sweep.concurrency), *((None, rate) for rate in sweep.rate)]
    requests = sweep.requests if trace is None else trace.requests
    for concurrency, rate in each:
        yield Load(
            requests=requests or usual_requests(concurrency or rate or 0),
            concurrency=concurrency,
            rate=rate,
            seconds=sweep.seconds,
            grace_seconds=sweep.grace_seconds,
        )


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:_DIGITS]
