"""docs/versions.md: what is known of each version, from the tables that plans are checked against."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.installed.versions import KNOWN, TESTED, Versions
from pdserve.known import Fact, Kind, facts

RELEASES = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""Of vllm, whose sources were read."""

_HEAD = """\
# What is known of each version

Made from the tables in `pdserve/known.py` and from the registry of patches by `python -m tests.docs.regenerate`; a test
fails when it drifts. `pdserve validate`, `pdserve preflight` and `pdserve up` check a recipe against the same tables,
and `pdserve import` the versions that its file names: a row counts where all its versions are installed and all that it
needs is in use. What never works, or goes wrong in silence, is refused with the last column; the rest is a warning.

A version that is not known is blamed for nothing. Ranges hold for the releases that were read, and for those between
two that agree. The evidence behind the warnings is in [reported-defects.md](reported-defects.md), the patches are in
[patches.md](patches.md).
"""
_TITLES: dict[Kind, str] = {
    "defect, refused": "Refused",
    "defect, warned of": "Warned of",
    "defect, patched": "Corrected by a patch",
    "flag, refused": "Flags that a version lacks",
    "flag, warned of": "Flags that a version ignores",
}


def page() -> str:
    """The whole page."""
    lines = [_HEAD, *_releases()]
    for kind, title in _TITLES.items():
        lines += [f"## {title}", "", *_table(kind), ""]
    return "\n".join(lines).rstrip() + "\n"


def _releases() -> Iterator[str]:
    """How many facts hold of each release of vllm, with the other packages as tested."""
    yield "## By release of vllm"
    yield ""
    others = ", ".join(f"{package} {version}" for package, version in TESTED.items() if package != "vllm")
    yield f"How many rows below hold with {others}, whatever is in use. pdserve knows vllm `{KNOWN['vllm']}`,"
    yield f"lmcache `{KNOWN['lmcache']}` and mooncake `{KNOWN['mooncake']}`; it was tested with {TESTED['vllm']}."
    yield ""
    kinds = [kind for kind in _TITLES if kind != "flag, refused"]
    yield f"| vllm | {' | '.join(_TITLES[kind].lower() for kind in kinds)} | flags that it lacks |"
    yield f"|---|{'---|' * (len(kinds) + 1)}"
    for release in RELEASES:
        versions = Versions.model_validate({**TESTED, "vllm": release})
        holding = [fact for fact in facts() if fact.holds(versions)]
        counts = [sum(fact.kind == kind for fact in holding) for kind in (*kinds, "flag, refused")]
        yield f"| {release} | {' | '.join(map(str, counts))} |"
    yield ""


def _table(kind: Kind) -> Iterator[str]:
    yield "| versions | with | what | source | what to do |"
    yield "|---|---|---|---|---|"
    for fact in facts():
        if fact.kind == kind:
            cells = (_versions(fact), _needs(fact), *map(_cell, (fact.what, fact.source, fact.todo)))
            yield f"| {' | '.join(cells)} |"


def _versions(fact: Fact) -> str:
    return ", ".join(f"{package} `{text}`" for package, text in fact.versions.items()) or "every version that was read"


def _needs(fact: Fact) -> str:
    return ", ".join(f"`{need}`" for need in fact.needs) or "any recipe"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
