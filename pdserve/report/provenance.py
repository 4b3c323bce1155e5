"""What was measured, on what: what all results share, and what differs between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pdserve.bench.compare import facts_of
from pdserve.bench.provenance import circumstances
from pdserve.bench.result import Provenance

LACKING = "not there"
"""What a reader sees where a result lacks something."""


@dataclass(frozen=True)
class ProvenanceView:
    """Of all results of a page."""

    times: tuple[str, ...]
    """UTC, sorted."""
    shared: Mapping[str, str]
    """Versions and hardware; the keys of a recipe are in its own text."""
    differs: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Value -> who has it."""
    recipes: Mapping[str, tuple[str, ...]]
    """Text -> who has it."""
    mixed: tuple[str, ...] = ()
    """Of what no sweep varies (pdserve.bench.provenance.circumstances), what is not the same for all."""


def provenance_view(some: Sequence[tuple[str, Provenance]]) -> ProvenanceView:
    """`some`: a name, and what was measured under it; a name may stand there several times."""
    facts = [(name, facts_of(about)) for name, about in some]
    values: dict[str, dict[str, dict[str, None]]] = {}
    for fact in dict.fromkeys(fact for _, each in facts for fact in each):
        for name, each in facts:
            values.setdefault(fact, {}).setdefault(each.get(fact) or LACKING, {})[name] = None
    recipes: dict[str, dict[str, None]] = {}
    for name, about in some:
        recipes.setdefault(about.recipe, {})[name] = None
    return ProvenanceView(
        times=tuple(
            datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
            for at in sorted(about.began for _, about in some)
        ),
        shared={
            fact: next(iter(seen))
            for fact, seen in values.items()
            if len(seen) == 1 and LACKING not in seen and not fact.startswith("recipe: ")
        },
        differs={
            fact: {value: tuple(names) for value, names in seen.items()}
            for fact, seen in values.items()
            if len(seen) > 1
        },
        recipes={text: tuple(names) for text, names in recipes.items()},
        mixed=_mixed([circumstances(about) for _, about in some]),
    )


def _mixed(some: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Names of what two of them know otherwise."""
    values: dict[str, set[str]] = {}
    for name, value in (pair for each in some for pair in each.items()):
        values.setdefault(name, set()).add(value)
    return tuple(name for name, seen in values.items() if len(seen) > 1)
