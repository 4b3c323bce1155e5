"""The variants of a launch file -> one recipe and a sweep file over it. Pure.

The recipe is the first variant. What differs between the variants becomes lists of `zip`: the first value of each is
that of the first variant, and so on. So every variant is in it, whether the file had them side by side or each with
each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.importing.annotated import line
from pdserve.importing.launch import Draft, Note, Sourced
from pdserve.importing.srt.benchmark import SrtBenchmark
from pdserve.recipe.load.problems import Path

_OF_THE_RECIPE = ("name", "description", "schema", "status")


@dataclass(frozen=True)
class ImportedVariant:
    """A deployment of the file, and what it is measured with."""

    name: str
    draft: Draft
    benchmark: SrtBenchmark


@dataclass(frozen=True)
class SweepDraft:
    """A recipe, and the sweep over it."""

    recipe: Draft
    document: dict[str, Any]
    """Of the sweep file, without the name of the recipe's file."""
    notes: tuple[Note, ...]
    """Of the sweep; those of the recipe are its own."""
    deployments: tuple[tuple[str, Draft], ...]
    """Name and draft of each, in the order of the lists of `zip`."""

    def losses(self) -> list[Note]:
        """What changes what is served at some point."""
        return [note for note in (*self.recipe.notes, *self.notes) if note.effect == "served"]


def sweep_draft(variants: Sequence[ImportedVariant], notes: Sequence[Note]) -> SweepDraft:
    """`notes`: of variants that are not in it, and of what the file's tool does otherwise."""
    deployments: list[ImportedVariant] = []
    same: list[Note] = []
    for variant in variants:
        known = next((each for each in deployments if _served(variant.draft) == _served(each.draft)), None)
        if known is None:
            deployments.append(variant)
        elif {line(note) for note in variant.draft.notes} != {line(note) for note in known.draft.notes}:
            why = f"no deployment of its own: what was carried over of it is the same as of {known.name or 'the file'}"
            same.append(Note(Sourced(None, variant.name or "the file", 0), why, "confirm"))
    first = deployments[0].draft
    lists = dict(_differing([_served(variant.draft) for variant in deployments], ()))
    works = list(dict.fromkeys(variant.benchmark.work for variant in variants))
    concurrency = sorted({number for variant in variants for number in variant.benchmark.concurrency})
    rates = sorted({rate for variant in variants for rate in variant.benchmark.rate})
    document: dict[str, Any] = {
        "schema": 1,
        "name": "imported",
        "workload": [{"input_tokens": asked, "output_tokens": answered} for asked, answered in works],
        **({"concurrency": concurrency} if concurrency else {}),
        **({"rate": rates} if rates else {}),
        **({"zip": {".".join(map(str, path)): values for path, values in lists.items()}} if lists else {}),
    }
    every = [*notes, *same, *_more_points(variants, len(deployments), len(works) * (len(concurrency) + len(rates)))]
    every += [note for variant in variants for note in variant.benchmark.notes]
    # What the first recipe lacks is in its own lines; of the others, what is not the same: also of one that is no
    # deployment of its own, because what would make it one was not carried over.
    its_own = {line(note) for note in first.notes}
    every += [note for variant in variants for note in variant.draft.notes if line(note) not in its_own]
    once = {(line(note), note.effect): note for note in every}
    return SweepDraft(
        recipe=replace(first, notes=tuple(first.notes)),
        document=document,
        notes=tuple(once.values()),
        deployments=tuple((variant.name, variant.draft) for variant in deployments),
    )


def _served(draft: Draft) -> dict[str, Any]:
    return {key: value for key, value in draft.document.items() if key not in _OF_THE_RECIPE}


def _differing(documents: Sequence[Any], path: Path) -> Iterator[tuple[Path, list[Any]]]:
    """The smallest parts that are not the same in all of them; null where one has none."""
    if all(document == documents[0] for document in documents):
        return
    mappings = [document for document in documents if isinstance(document, dict) and document]
    keys = list(dict.fromkeys(key for document in mappings for key in document))
    # A key with a dot has no spelling of its own as KEY of --set.
    if len(mappings) < len(documents) or any("." in str(key) for key in keys) or _is_one_value(path):
        yield path, list(documents)
        return
    for key in keys:
        yield from _differing([document.get(key) for document in mappings], (*path, key))


def _is_one_value(path: Path) -> bool:
    """A connector and the value of a flag are taken as they are."""
    return path[-1:] == ("connector",) or path[-2:-1] in (("args",), ("env",))


def _more_points(variants: Sequence[ImportedVariant], deployments: int, each: int) -> Iterator[Note]:
    """A sweep measures every load on every deployment; variants may have loads of their own."""
    asked = sum(len(variant.benchmark.concurrency) + len(variant.benchmark.rate) for variant in variants)
    if (points := deployments * each) != asked:
        why = f"the file measures {asked} points; a sweep has every load on every deployment: {points}"
        yield Note(Sourced(None, "benchmark", 0), why, "confirm")


def shown_names(deployments: Sequence[tuple[str, Draft]]) -> Mapping[int, str]:
    """Place in the lists of `zip` -> the variant of the file."""
    return {place: name or "the file" for place, (name, _) in enumerate(deployments, start=1)}
