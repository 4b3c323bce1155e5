"""The measurement of an srt-slurm recipe -> prompts, answers and loads of a sweep. What is sent otherwise is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pdserve.importing.launch import Effect, Note, Sourced
from pdserve.importing.tracked_tree import whole
from pdserve.importing.yaml_tree import Tree

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
    """What one variant is measured with."""

    work: tuple[int, int]
    """Tokens of a prompt, and of an answer."""
    concurrency: tuple[int, ...]
    rate: tuple[float, ...] = ()
    notes: list[Note] = field(default_factory=list)


def read_benchmark(tree: Tree) -> SrtBenchmark:
    """The section, or what `pdserve bench` usually sends where it is no benchmark of prompts of a fixed length."""
    section = tree.get(_SECTION)
    section = section if isinstance(section, dict) else {}
    kind = section.get("type")
    work = whole(section.get("isl")), whole(section.get("osl"))
    loads = tuple(_concurrencies(section.get("concurrencies")))
    if kind != _OF_FIXED_LENGTH or work[0] is None or work[1] is None or not (loads or _rates(section)):
        what = f"the benchmark is {kind}" if kind is not None else "there is no benchmark"
        at = Sourced(kind, _SECTION, tree.line(_SECTION, "type"))
        why = f"{what}, or it has no isl, osl and concurrencies: workload and loads are the usual ones of pdserve bench"
        return SrtBenchmark(USUAL_WORK, USUAL_LOADS, notes=[Note(at, why, "confirm")])
    result = SrtBenchmark((work[0], work[1]), loads, tuple(_rates(section)))
    result.notes.extend(_loads_otherwise(section, result, tree))
    for key, value in section.items():
        at = Sourced(value, f"{_SECTION}.{key}", tree.line(_SECTION, key))
        if key in ("type", "isl", "osl", "concurrencies"):
            continue
        if key == "req_rate" and result.rate:
            continue
        if key == "random_range_ratio" and value in (1, 1.0, "1.0"):
            continue
        if key == "num_prompts_mult" and whole(value) not in (None, _USUAL_PROMPTS):
            why = f"requests of a load: {value} times the load there; here `requests`, else {_USUAL_PROMPTS} times"
            result.notes.append(Note(at, why, "confirm"))
            continue
        effect, why = _KEYS.get(key, ("confirm", "pdserve does not know this key of a benchmark"))
        result.notes.append(Note(at, why, effect))
    return result


def _loads_otherwise(section: dict[str, Any], result: SrtBenchmark, tree: Tree) -> Iterator[Note]:
    """What is no load, and loads that are limited by both (srt-slurm's sa-bench gives its client --request-rate and
    --max-concurrency at once)."""
    value = section.get("concurrencies")
    at = Sourced(value, f"{_SECTION}.concurrencies", tree.line(_SECTION, "concurrencies"))
    if bad := [part for part in _parts(value) if not whole(part)]:
        yield Note(at, f"no number of requests: {', '.join(map(str, bad))}", "confirm")
    if result.concurrency and result.rate:
        why = (
            f"there each of them is the most at a time of req_rate {result.rate[0]:g}; here `concurrency` and `rate` "
            "are loads of their own"
        )
        yield Note(at, why, "confirm")


def _concurrencies(value: Any) -> Iterator[int]:
    yield from (number for part in _parts(value) if (number := whole(part)))


def _parts(value: Any) -> list[Any]:
    """Of a list, one number, or `1x2x4`."""
    return value if isinstance(value, list) else str(value).split("x") if value is not None else []


def _rates(section: dict[str, Any]) -> list[float]:
    try:
        rate = float(section.get("req_rate") or "inf")
    except (TypeError, ValueError):
        return []
    return [rate] if 0 < rate < float("inf") else []
