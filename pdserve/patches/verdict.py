"""Whether a patch may be applied to the code that this process has: versions suggest, fingerprints decide. And what
follows from it: engines when they start and preflight before them decide by the same function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from pdserve.installed.versions import TESTED
from pdserve.patches.fingerprint import Fingerprint, Known, known_fingerprints, of_loaded
from pdserve.patches.patch import Patch, PatchTarget, in_range, may_be

Applicability = Literal["apply", "not-needed", "unknown"]
Treatment = Literal["apply", "not-needed", "left-out", "refused"]


@dataclass(frozen=True)
class Verdict:
    """What is to be done with a patch here, and why, in one line."""

    outcome: Applicability
    why: str


def judge(
    patch: Patch,
    versions: Mapping[str, str | None],
    *,
    look: Callable[[str], Fingerprint | None] = of_loaded,
    table: Mapping[str, tuple[Known, ...]] | None = None,
) -> Verdict:
    """Compares each target of `patch` with what is known of it.

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
            return Verdict("unknown", _unlike(target, fingerprint, version))
        if _affected(patch, target, matches, version):
            asked = True
    if not asked and any(_range(patch, target) for target in patch.targets):
        return Verdict("not-needed", "upstream has corrected this code")
    return Verdict("apply", "known code")


def decide(patch: Patch, verdict: Verdict, allowed: Collection[str]) -> Treatment:
    """What becomes of a patch with that verdict. `allowed`: names of `allow_unknown_upstream`."""
    if verdict.outcome != "unknown":
        return verdict.outcome
    if patch.name in allowed:
        return "apply"
    return "refused" if patch.required and not patch.serves_without else "left-out"


def way_out(patch: Patch) -> str:
    """What to do about a patch that is refused, the safest first."""
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


def _unlike(target: PatchTarget, fingerprint: Fingerprint, version: str | None) -> str:
    what = f"{target.name}{fingerprint.signature}"
    if target.body:
        what += f" [{fingerprint.code}]"
    return f"{what} of {target.distribution} {version or '(unknown version)'} is none of the known ones"
