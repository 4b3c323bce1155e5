"""A patch: its declaration, and how it takes hold of a function. Reading it imports no engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pdserve.errors import StartError
from pdserve.installed.versions import Versions

Platform = Literal["cpu", "cuda", "rocm"]
ProcessKind = Literal["api-server", "engine-core", "worker", "lmcache-server"]
Behaviour = Literal[
    "metrics crash",
    "metrics of transfers",
    "stale completions",
    "KV memory deadlock",
    "choice of connector",
    "failed and late loads",
    "reloads from LMCache",
    "hybrid models",
    "abandoned transfers",
    "stores to host memory",
    "LMCache server",
    "CPU without accelerator",
]
Vehicle = Literal["wrap", "subclass"]


@dataclass(frozen=True)
class PatchTarget:
    """Upstream code that a patch takes hold of or relies on."""

    name: str
    """Dotted, where it is defined: vllm.v1.core.sched.scheduler.Scheduler.schedule."""
    body: bool = False
    """The patch depends on what the body does, so its hash counts; otherwise the signature alone."""
    only: str = ""
    """Versions of the distribution that have it (PEP 440); empty: all."""

    @property
    def distribution(self) -> str:
        """Return the target's top package: vllm, lmcache, torch, ..."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The facts that decide which patches one role's engines need."""

    versions: Versions
    platform: str
    connectors: frozenset[str]
    """Class names of vLLM's connectors."""
    settings: frozenset[str] = frozenset()
    """Settings of the recipe that only a patch provides: load_timeout_seconds, ..."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Declares one correction. `apply` imports its target lazily, wraps it, and may be called again."""

    name: str
    behaviour: Behaviour
    """What it is about, in the words of docs/patches.md."""
    summary: str
    """What goes wrong without it and what it does, in at most three lines."""
    issue: str
    """Where upstream discusses it."""
    vllm: str = ""
    """Versions of vllm that need it (PEP 440); empty: all that are known."""
    lmcache: str = ""
    """Versions of lmcache that need it; empty: any, or none at all."""
    targets: tuple[PatchTarget, ...]
    runs_in: tuple[ProcessKind, ...]
    """Where it has an effect. It is applied in every process of the engine all the same."""
    vehicle: Vehicle = "wrap"
    """wrap: of a function. subclass: a class of pdserve.connectors that vLLM loads by kv_connector_module_path."""
    connectors: frozenset[str] = frozenset()
    """Class names of connectors that must all be in use for it to be needed."""
    spared: frozenset[str] = frozenset()
    """Class names that do not have the defect: where no other class is in use, it is not needed. Empty: any may have
    it."""
    platforms: tuple[Platform, ...] = ("cpu", "cuda", "rocm")
    settings: frozenset[str] = frozenset()
    """Settings of a recipe that it provides: without any of them it is not needed. Empty: always needed."""
    required: bool
    """Without it a deployment that needs it does not work: an engine refuses to start rather than run unpatched."""
    serves_without: str = ""
    """Of a required one without which normal traffic is served: what goes wrong then. On unknown code it is left out,
    with this as the warning."""
    instead: str = ""
    """What to change in a recipe so that it is not needed; empty: nothing."""
    effects: Mapping[str, str] = field(default_factory=dict)
    """What it counts while it runs: name -> help text."""
    gauges: Mapping[str, str] = field(default_factory=dict)
    """What it reports that goes up and down: name -> help text."""
    remove_when: str
    apply: Callable[[], None]

    def needed(self, deployment: Deployment) -> bool:
        """Tell whether a deployment needs the patch. An unknown version counts as one that does.

        All patches are about moving KV: an engine without a connector needs none.
        """
        if not deployment.connectors:
            return False
        if deployment.platform not in self.platforms or not self.connectors <= deployment.connectors:
            return False
        if self.spared and deployment.connectors <= self.spared:
            return False
        if self.settings and not self.settings & deployment.settings:
            return False
        return may_be(deployment.versions.vllm, self.vllm) and may_be(deployment.versions.lmcache, self.lmcache)


def may_be(version: str | None, specifier: str) -> bool:
    """Tell whether a version that may be unknown or unreadable can be in the range."""
    try:
        return version is None or in_range(version, specifier)
    except InvalidVersion:
        return True


def in_range(version: str, specifier: str) -> bool:
    """Compare as PEP 440 does, but `<0.33` holds for 0.33's own pre-releases: they may still have the defect."""
    known = Version(version)
    return all(
        known < Version(clause.version) if clause.operator == "<" else clause.contains(known, prereleases=True)
        for clause in SpecifierSet(specifier)
    )


_MARK = "__pdserve_patches__"


def wrap(
    owner: Any,
    attribute: str,
    *,
    patch: str,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replace `owner.attribute` by `around(original)`; a target that carries the patch already is left alone.

    Several patches may share a target: each wraps what it finds. Raises StartError when there is no such attribute.
    """
    original = getattr(owner, attribute, None)
    if original is None:
        where = f"{getattr(owner, '__qualname__', None) or owner.__name__}.{attribute}"
        raise StartError(f"patch {patch} does not know this upstream code: {where} does not exist")
    carried: tuple[str, ...] = getattr(original, _MARK, ())
    if patch in carried:
        return
    wrapper = functools.wraps(original)(around(original))
    setattr(wrapper, _MARK, (*carried, patch))
    setattr(owner, attribute, wrapper)
