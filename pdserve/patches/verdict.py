"""Decide whether a patch may be applied to the upstream code that is here: versions suggest, fingerprints decide.

Engines when they start and preflight before them decide by the same functions. Preflight asks the interpreter of the
engines: `python -m pdserve.patches.verdict verdicts NAME...` prints {NAME: {"outcome", "why"}}; `... releases` prints
{package: release} for untagged builds that have the code of a release. One JSON object each; the sources of an engine
are read, and nothing of it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from packaging.version import InvalidVersion, Version
from pydantic import TypeAdapter

from pdserve.installed.distributions import installed
from pdserve.installed.versions import KNOWN, TESTED
from pdserve.patches.fingerprint import Fingerprint, Known, known_fingerprints, of_loaded, of_tree
from pdserve.patches.patch import Patch, PatchTarget, in_range, may_be
from pdserve.patches.registry import find

Applicability = Literal["apply", "not-needed", "unknown"]
Treatment = Literal["apply", "not-needed", "left-out", "refused"]


@dataclass(frozen=True)
class Verdict:
    """The judgement on a patch here, and why, in one line."""

    outcome: Applicability
    why: str


def judge(
    patch: Patch,
    versions: Mapping[str, str | None],
    *,
    look: Callable[[str], Fingerprint | None] = of_loaded,
    table: Mapping[str, tuple[Known, ...]] | None = None,
) -> Verdict:
    """Compare each target of `patch` with what is known of it.

    `versions`: installed versions by distribution. Code that only versions outside the patch's range have is
    upstream's own correction: not needed. Code that no known version has: unknown, whatever its version number.
    """
    known = known_fingerprints() if table is None else table
    asked = False
    for target in patch.targets:
        version = versions.get(target.distribution)
        if target.only and not may_be(version, target.only):
            continue
        fingerprint = look(target.name)
        if fingerprint is None and target.only:
            continue
        if fingerprint is None:
            return Verdict("unknown", f"{target.name} does not exist in {target.distribution} {version or '?'}")
        matches = [entry for entry in known.get(target.name, ()) if _same(entry, fingerprint, target)]
        if not matches:
            return Verdict("unknown", _mismatch(target, fingerprint, version))
        if _affected(patch, target, matches, version):
            asked = True
    if not asked and any(_range(patch, target) for target in patch.targets):
        return Verdict("not-needed", "upstream has corrected this code")
    return Verdict("apply", "known code")


def decide(patch: Patch, verdict: Verdict, allowed: Collection[str]) -> Treatment:
    """Decide what becomes of a patch with that verdict. `allowed`: names of `allow_unknown_upstream`."""
    if verdict.outcome != "unknown":
        return verdict.outcome
    if patch.name in allowed:
        return "apply"
    return "refused" if patch.required and not patch.serves_without else "left-out"


def remedy(patch: Patch) -> str:
    """Say what to do about a patch that is refused, the safest first."""
    packages = {target.distribution for target in patch.targets} & TESTED.keys() or {"vllm"}
    tested = " and ".join(f"{package} {TESTED[package]}" for package in sorted(packages, reverse=True))
    return (
        f"install {tested}, which pdserve was tested on"
        + (f"; or do without it: {patch.instead}" if patch.instead else "")
        + f"; or, at your own risk, apply it all the same: allow_unknown_upstream: [{patch.name}]"
    )


def _same(entry: Known, fingerprint: Fingerprint, target: PatchTarget) -> bool:
    return entry.signature == fingerprint.signature and (not target.body or entry.code == fingerprint.code)


def _range(patch: Patch, target: PatchTarget) -> str:
    return {"vllm": patch.vllm, "lmcache": patch.lmcache}.get(target.distribution, "")


def _affected(patch: Patch, target: PatchTarget, matches: list[Known], version: str | None) -> bool:
    specifier = _range(patch, target)
    if not specifier:
        return True
    released = {release for match in matches for release in match.versions}
    if version in released:
        return in_range(str(version), specifier)
    return any(in_range(release, specifier) for release in released)


def _mismatch(target: PatchTarget, fingerprint: Fingerprint, version: str | None) -> str:
    what = f"{target.name}{fingerprint.signature}"
    if target.body:
        what += f" [{fingerprint.code}]"
    return f"{what} of {target.distribution} {version or '(unknown version)'} is none of the known ones"


FINGERPRINTED = ("vllm", "lmcache")
"""Packages of which the table has enough to distinguish their releases."""

Look = Callable[[str], Fingerprint | None]
Table = Mapping[str, tuple[Known, ...]]


def is_untagged(package: str, version: str) -> bool:
    """Tell whether the number cannot be believed: of a development build, a branch, or one outside of what is known.

    A build without tags calls itself 0.1.dev1+gabc, whatever is in it.
    """
    try:
        return Version(version).is_devrelease or not in_range(version, KNOWN[package])
    except InvalidVersion:
        return True


def same_code(versions: Mapping[str, str | None], look: Look, *, table: Table | None = None) -> dict[str, str]:
    """Return package -> the newest release whose code each untagged build has. One with code of its own is left out."""
    known = known_fingerprints() if table is None else table
    return {
        package: release
        for package in FINGERPRINTED
        if (version := versions.get(package)) is not None and is_untagged(package, version)
        if (release := _release(package, version, look, known)) is not None
    }


def _release(package: str, version: str, look: Look, table: Table) -> str | None:
    """Find the release whose code a build has. Everything that is known of it must be the same, also bodies on which no
    patch depends: this decides what is believed of code that was not looked at."""
    targets = {name: known for name, known in table.items() if name.partition(".")[0] == package}
    releases = {release for known in targets.values() for match in known for release in match.versions}
    if _public(version) in releases:
        return None
    left = sorted(releases, key=Version, reverse=True)
    for name, known in targets.items():
        if not left:
            return None
        fingerprint = look(name)
        left = [release for release in left if _fits(release, known, fingerprint)]
    return left[0] if left else None


def _fits(release: str, known: tuple[Known, ...], fingerprint: Fingerprint | None) -> bool:
    """Tell whether code may be that of a release. The table has no entry of a release that lacks the target, or in
    which no patch needs it."""
    of_release = [entry for entry in known if release in entry.versions]
    if not of_release:
        return True
    return fingerprint is not None and any(
        (entry.signature, entry.code) == (fingerprint.signature, fingerprint.code) for entry in of_release
    )


def _public(version: str) -> str | None:
    """Return 0.32.0 of 0.32.0+cpu; None: it follows no scheme."""
    try:
        return Version(version).public
    except InvalidVersion:
        return None


def judge_here(patch: Patch) -> Verdict:
    """Judge a patch as an engine of this environment will when it starts. A part that is not installed needs
    nothing."""
    for target in patch.targets:
        if _package(target.distribution) is None:
            return Verdict("not-needed", f"{target.distribution} is not installed here")
    return judge(patch, versions_here(), look=of_installed)


@cache
def versions_here() -> Mapping[str, str | None]:
    """Return part -> installed version; of an untagged build that has the code of a release, that release."""
    versions = installed()
    return {**versions, **same_code(versions, of_installed)}


def of_installed(name: str) -> Fingerprint | None:
    """Return the fingerprint of the dotted name in this environment's sources; None: it is not there."""
    package = _package(name.partition(".")[0])
    return None if package is None else of_tree(name, package)


def _package(top: str) -> Path | None:
    """Return the folder that has the package `top`; finding the spec of a top package does not import it."""
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


MODULE = "pdserve.patches.verdict"
VERDICTS: TypeAdapter[dict[str, Verdict]] = TypeAdapter(dict[str, Verdict])
RELEASES: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


def verdicts(names: Iterable[str]) -> Mapping[str, Verdict]:
    """Judge these patches as engines of this environment will. Raises RecipeError for a name that it does not know."""
    return {name: judge_here(find(name)) for name in names}


def main() -> int:
    what, *names = sys.argv[1:]
    if what == "verdicts":
        answer = VERDICTS.dump_python(dict(verdicts(names)))
    else:
        answer = dict(same_code(installed(), of_installed))
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
