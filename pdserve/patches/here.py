"""Which patches the upstream code of this environment would get, read from its sources: nothing is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pdserve.installed.distributions import installed
from pdserve.patches.fingerprint import Fingerprint, of_tree
from pdserve.patches.patch import Patch
from pdserve.patches.releases import same_code
from pdserve.patches.verdict import Verdict, judge


def judge_here(patch: Patch) -> Verdict:
    """As an engine of this environment will judge it when it starts. A part that is not installed needs nothing."""
    for target in patch.targets:
        if _package(target.distribution) is None:
            return Verdict("not-needed", f"{target.distribution} is not installed here")
    return judge(patch, versions_here(), look=of_installed)


@cache
def versions_here() -> Mapping[str, str | None]:
    """Part -> installed version; of an untagged build that has the code of a release, that release."""
    versions = installed()
    return {**versions, **same_code(versions, of_installed)}


def of_installed(name: str) -> Fingerprint | None:
    """Of the dotted name in this environment's sources; None: it is not there."""
    package = _package(name.partition(".")[0])
    return None if package is None else of_tree(name, package)


def _package(top: str) -> Path | None:
    """The folder that has the package `top`; finding the spec of a top package does not import it."""
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent
