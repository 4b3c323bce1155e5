"""From a sweep and its resolved recipes to points, in the order that restarts a deployment least. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """A variant of the recipe: brought up once for all of its points."""

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
            "workload": self.workload.model_dump(mode="json"),
            "load": self.load.model_dump(mode="json"),
        }
        name = re.sub(r"[^a-z0-9.]+", "-", self.load.title.lower())
        return f"{name}-{_digest(about)}"

    @property
    def work(self) -> str:
        return f"{self.workload.input_tokens} in, {self.workload.output_tokens} out"

    @property
    def title(self) -> str:
        return f"{self.deployment.title}; {self.work}; {self.load.title}"


def recipe_digest(document: Mapping[str, Any], folder: str) -> str:
    """Of a resolved recipe. The order of keys means nothing; what is relative in it depends on its folder."""
    return _digest([document, folder])


def points(sweep: Sweep, digests: Sequence[tuple[Settings, str]]) -> tuple[Point, ...]:
    """Each deployment is started once: all of its points follow each other. Settings that resolve to the same recipe
    are the same deployment, that of the first of them. `digests`: of the recipe of each combination."""
    deployments = {digest: settings for settings, digest in reversed(digests)}
    order = dict.fromkeys(digest for _, digest in digests)
    each = itertools.product(order, sweep.workload, _loads(sweep))
    made = [Point(Variant(deployments[digest], digest), workload, load) for digest, workload, load in each]
    return tuple({point.id: point for point in made}.values())


def by_deployment(some: Sequence[Point]) -> list[tuple[Variant, list[Point]]]:
    """Runs of points of a deployment: as many as there are starts."""
    return [(key, list(group)) for key, group in itertools.groupby(some, key=lambda point: point.deployment)]


def _loads(sweep: Sweep) -> Iterator[Load]:
    for concurrency in sweep.concurrency:
        yield Load(concurrency=concurrency, requests=sweep.requests or usual_requests(concurrency))
    for rate in sweep.rate:
        yield Load(rate=rate, requests=sweep.requests or usual_requests(rate))


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:_DIGITS]
