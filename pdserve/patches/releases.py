"""Which release an untagged build is, by its code: its number is no evidence. Imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from packaging.version import InvalidVersion, Version

from pdserve.installed.versions import KNOWN
from pdserve.patches.fingerprint import Fingerprint, Known, known_fingerprints
from pdserve.patches.patch import in_range

FINGERPRINTED = ("vllm", "lmcache")
"""Packages of which the table has enough to distinguish their releases."""

Look = Callable[[str], Fingerprint | None]
Table = Mapping[str, tuple[Known, ...]]


def untagged(package: str, version: str) -> bool:
    """Whether the number cannot be believed: a development build, one that follows no scheme (a branch), or one outside
    of what is known. A build without tags calls itself 0.1.dev1+gabc, whatever is in it."""
    try:
        return Version(version).is_devrelease or not in_range(version, KNOWN[package])
    except InvalidVersion:
        return True


def same_code(versions: Mapping[str, str | None], look: Look, *, table: Table | None = None) -> dict[str, str]:
    """Package -> the newest release whose code each untagged build has. One with code of its own is left out."""
    known = known_fingerprints() if table is None else table
    return {
        package: release
        for package in FINGERPRINTED
        if (version := versions.get(package)) is not None and untagged(package, version)
        if (release := _release(package, version, look, known)) is not None
    }


def _release(package: str, version: str, look: Look, table: Table) -> str | None:
    """Everything that is known of a release must be the same, also bodies on which no patch depends: this decides what
    is believed of code that was not looked at."""
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
    """The table has no entry of a release that lacks the target, or in which no patch needs it."""
    of_release = [entry for entry in known if release in entry.versions]
    if not of_release:
        return True
    return fingerprint is not None and any(
        (entry.signature, entry.code) == (fingerprint.signature, fingerprint.code) for entry in of_release
    )


def _public(version: str) -> str | None:
    """0.32.0 of 0.32.0+cpu."""
    try:
        return Version(version).public
    except InvalidVersion:
        return None
