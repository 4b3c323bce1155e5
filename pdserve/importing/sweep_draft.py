"""The variants of a launch file -> one recipe and a sweep file over it. Pure.

The recipe is the first variant. What differs between the variants becomes lists of `zip`: the first value of each is
that of the first variant, and so on. So every variant is in it, whether the file had them side by side or each with
each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdserve.importing.launch import Draft, Effect, Note, SourcedValue
from pdserve.importing.recipe_text import line
from pdserve.importing.yaml_tree import Tree, whole_number
from pdserve.recipe.load.problems import Path


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
    """The document of the sweep file, without the name of the recipe's file."""
    notes: tuple[Note, ...]
    """The notes of the sweep; those of the recipe are its own."""
    deployments: tuple[tuple[str, Draft], ...]
    """Name and draft of each, in the order of the lists of `zip`."""

    def losses(self) -> list[Note]:
        """Return the notes of what changes what is served at some point."""
        return [note for note in (*self.recipe.notes, *self.notes) if note.effect == "served"]


def sweep_draft(variants: Sequence[ImportedVariant], notes: Sequence[Note]) -> SweepDraft:
    """Draft a sweep of these variants. `notes`: of variants that are not in it, and of what the file's tool does
    otherwise."""
    deployments: list[ImportedVariant] = []
    same: list[Note] = []
    for variant in variants:
        known = next((each for each in deployments if variant.draft.served() == each.draft.served()), None)
        if known is None:
            deployments.append(variant)
        elif {line(note) for note in variant.draft.notes} != {line(note) for note in known.draft.notes}:
            why = f"no deployment of its own: what was carried over of it is the same as of {known.name or 'the file'}"
            same.append(Note(SourcedValue(None, variant.name or "the file", 0), why, "confirm"))
    first = deployments[0].draft
    lists = dict(_differing([variant.draft.served() for variant in deployments], ()))
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


def _differing(documents: Sequence[Any], path: Path) -> Iterator[tuple[Path, list[Any]]]:
    """Yield the smallest parts that are not the same in all documents; null where a document has none."""
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
    """Tell whether what is at a path is one value: a connector and the value of a flag are taken as they are."""
    return path[-1:] == ("connector",) or path[-2:-1] in (("args",), ("env",))


def _more_points(variants: Sequence[ImportedVariant], deployments: int, each: int) -> Iterator[Note]:
    """Note that the sweep has more points than the file. A sweep measures every load on every deployment; variants may
    have loads of their own."""
    asked = sum(len(variant.benchmark.concurrency) + len(variant.benchmark.rate) for variant in variants)
    if (points := deployments * each) != asked:
        why = f"the file measures {asked} points; a sweep has every load on every deployment: {points}"
        yield Note(SourcedValue(None, "benchmark", 0), why, "confirm")


def shown_names(deployments: Sequence[tuple[str, Draft]]) -> Mapping[int, str]:
    """Place in the lists of `zip` -> the variant of the file."""
    return {place: name or "the file" for place, (name, _) in enumerate(deployments, start=1)}


USUAL_WORK, USUAL_LOADS = (1024, 128), (1, 4, 8)
_SECTION = "benchmark"
_OF_FIXED_LENGTH = "sa-bench"
_USUAL_PROMPTS = 10
_KEYS: dict[str, tuple[Effect, str]] = {
    "random_range_ratio": (
        "replaced",
        "srt-slurm varies the lengths of prompts and answers; here each has the whole one",
    ),
    "num_warmup_mult": ("replaced", "warm-ups are a number of requests here: `warmup` of a workload, 8 by itself"),
    "use_chat_template": ("replaced", "prompts are tokens as they are"),
    "req_rate": ("replaced", "a list `rate` of the sweep has requests a second; `inf` is no limit, as here"),
    "num_prompts_mult": ("replaced", f"requests of a load are {_USUAL_PROMPTS} times the load here, 32 at least"),
}
"""Keys that a sweep file has no word for, and what it does instead."""


@dataclass
class SrtBenchmark:
    """The workload and loads of one variant."""

    work: tuple[int, int]
    """Tokens of a prompt, and of an answer."""
    concurrency: tuple[int, ...]
    rate: tuple[float, ...] = ()
    notes: list[Note] = field(default_factory=list)


def read_benchmark(tree: Tree) -> SrtBenchmark:
    """Return the section, or what `pdserve bench` usually sends where it is no benchmark of prompts of a fixed
    length."""
    section = tree.get(_SECTION)
    section = section if isinstance(section, dict) else {}
    kind = section.get("type")
    work = whole_number(section.get("isl")), whole_number(section.get("osl"))
    loads = tuple(_concurrencies(section.get("concurrencies")))
    if kind != _OF_FIXED_LENGTH or work[0] is None or work[1] is None or not (loads or _rates(section)):
        what = f"the benchmark is {kind}" if kind is not None else "there is no benchmark"
        at = SourcedValue(kind, _SECTION, tree.line(_SECTION, "type"))
        why = f"{what}, or it has no isl, osl and concurrencies: workload and loads are the usual ones of pdserve bench"
        return SrtBenchmark(USUAL_WORK, USUAL_LOADS, notes=[Note(at, why, "confirm")])
    result = SrtBenchmark((work[0], work[1]), loads, tuple(_rates(section)))
    result.notes.extend(_loads_otherwise(section, result, tree))
    for key, value in section.items():
        at = SourcedValue(value, f"{_SECTION}.{key}", tree.line(_SECTION, key))
        if key in ("type", "isl", "osl", "concurrencies"):
            continue
        if key == "req_rate" and result.rate:
            continue
        if key == "random_range_ratio" and value in (1, 1.0, "1.0"):
            continue
        if key == "num_prompts_mult" and whole_number(value) not in (None, _USUAL_PROMPTS):
            why = f"requests of a load: {value} times the load there; here `requests`, else {_USUAL_PROMPTS} times"
            result.notes.append(Note(at, why, "confirm"))
            continue
        effect, why = _KEYS.get(key, ("confirm", "pdserve does not know this key of a benchmark"))
        result.notes.append(Note(at, why, effect))
    return result


def _loads_otherwise(section: dict[str, Any], result: SrtBenchmark, tree: Tree) -> Iterator[Note]:
    """Name what is no load, and loads that are limited by both: srt-slurm's sa-bench gives its client --request-rate
    and --max-concurrency at once."""
    value = section.get("concurrencies")
    at = SourcedValue(value, f"{_SECTION}.concurrencies", tree.line(_SECTION, "concurrencies"))
    if bad := [part for part in _parts(value) if not whole_number(part)]:
        yield Note(at, f"no number of requests: {', '.join(map(str, bad))}", "confirm")
    if result.concurrency and result.rate:
        why = (
            f"there each of them is the most at a time of req_rate {result.rate[0]:g}; here `concurrency` and `rate` "
            "are loads of their own"
        )
        yield Note(at, why, "confirm")


def _concurrencies(value: Any) -> Iterator[int]:
    yield from (number for part in _parts(value) if (number := whole_number(part)))


def _parts(value: Any) -> list[Any]:
    """Return the parts of a list, of one number, or of `1x2x4`."""
    return value if isinstance(value, list) else str(value).split("x") if value is not None else []


def _rates(section: dict[str, Any]) -> list[float]:
    try:
        rate = float(section.get("req_rate") or "inf")
    except (TypeError, ValueError):
        return []
    return [rate] if 0 < rate < float("inf") else []
