"""The log of an LMCache server's lookups -> hit rates by the size of L1, from LMCache's own cache simulator."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pdserve.errors import PreflightError, RecipeError
from pdserve.operations.lookups import simulator_program
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections.lmcache import Lmcache
from pdserve.sizing.given import GIB, Span
from pdserve.sizing.hit_rates import HitRate, HitRates, enough, held, notes_of, size_in_bytes
from pdserve.sizing.lmcache import L1Size
from pdserve.system.process import output_of

_FILES = "lookup_hashes_*.jsonl"
"""What the server writes."""
_POINTS = 25
"""Sizes: from all chunks down to a 64th of them."""
_SECONDS = 3600.0
"""A log of 100 files with 100 MiB each has some ten million chunks, and each point reads all of them."""


class _Size(Frozen):
    bytes: float
    low: float
    high: float


class _Replayed(Frozen):
    """What the program answers."""

    lmcache: str | None
    lacks: str = ""
    unreadable: str = ""
    models: tuple[str, ...] = ()
    model: str | None = None
    chunk_sizes: tuple[int, ...] = ()
    requests: int = 0
    tokens: int = 0
    chunks: int = 0
    warnings: tuple[str, ...] = ()
    sizes: tuple[_Size, ...] = ()
    best: float = 0.0


def hit_rates(recipe: Recipe, plan: Plan, l1: Sequence[L1Size], log: Path) -> tuple[HitRates, ...]:
    """Of each server whose log is in `log`: a file, a folder of them, or a folder of such folders. Raises RecipeError
    for a recipe without LMCache or a log of another deployment, PreflightError where there is no simulator."""
    section = recipe.lmcache
    if section is None or not l1:
        raise RecipeError(
            "a log of lookups says nothing about this recipe: it has no LMCache server",
            where="lmcache",
            todo="add an lmcache section with l1_size_gb and a role in lmcache.on, or leave --lookup-log out",
        )
    chunk_bytes = int(max(size.chunk_bytes for size in l1))
    python = recipe.engine.python or sys.executable
    return tuple(_of_server(name, paths, section, chunk_bytes, plan, python) for name, paths in servers_in(log).items())


def servers_in(log: Path) -> dict[str, list[Path]]:
    """Name of a server -> its log. Raises RecipeError where there is none."""
    if log.is_file():
        return {log.name: [log]}
    if log.exists() and not log.is_dir():
        raise RecipeError(
            "this is neither a file nor a folder, so there are no lookups in it",
            where=str(log),
            cause="a device or a pipe: the log is read more than once, by its name",
            todo="give the folder of lmcache.lookup_log, or a file of it",
        )
    folders = [folder for folder in (log, *sorted(log.glob("*/"))) if any(folder.glob(_FILES))]
    if not folders:
        raise RecipeError(
            f"there is no {_FILES} in it, nor in a folder in it" if log.is_dir() else "there is no such file or folder",
            where=str(log),
            cause="the server writes its log at the first lookup of a whole chunk, on its own node",
            todo="set lmcache.lookup_log to a folder, serve for a while, and give that folder",
        )
    return {folder.name: [folder] for folder in folders}


def _of_server(
    name: str, paths: Sequence[Path], section: Lmcache, chunk_bytes: int, plan: Plan, python: str
) -> HitRates:
    request = {
        "paths": [str(path.absolute()) for path in paths],
        "model": plan.model,
        "chunk_bytes": chunk_bytes,
        "shares": held(section.eviction),
        "points": _POINTS,
        "sizes": [size_in_bytes(section)],
    }
    where = str(paths[0])
    replayed = _run(python, request, where)
    _check(replayed, section, plan, where)
    sizes = tuple(HitRate(l1_gib=each.bytes / GIB, rate=Span(low=each.low, high=each.high)) for each in replayed.sizes)
    now = next((size for size in sizes if size.l1_gib == section.l1_size_gb), None)
    return HitRates(
        server=name,
        source=f"cache simulator of lmcache {replayed.lmcache}",
        model=replayed.model or "",
        requests=replayed.requests,
        tokens=replayed.tokens,
        chunks=replayed.chunks,
        best=replayed.best,
        sizes=sizes,
        now=now or HitRate(l1_gib=section.l1_size_gb, rate=Span(low=0.0, high=0.0)),
        enough_gib=enough(sizes, replayed.best),
        notes=notes_of(section, replayed.warnings),
    )


def _run(python: str, request: dict[str, Any], where: str) -> _Replayed:
    program = Path(simulator_program.__file__).read_text(encoding="utf-8")
    done = output_of([python, "-c", program], timeout=_SECONDS, stdin=json.dumps(request))
    try:
        replayed = _Replayed.model_validate_json(done.out.strip().rpartition("\n")[2])
    except ValidationError:
        raise PreflightError(
            "LMCache's cache simulator did not answer",
            where=where,
            cause=f"{python} ended with {done.code}" if done.code is not None else done.err,
            todo="run `lmcache tool cache-simulator sweep -i` on this log with that environment, and read its error",
            evidence=tuple(done.err.splitlines()[-5:]),
        ) from None
    if replayed.lacks:
        installed = "lmcache is not installed" if replayed.lmcache is None else f"lmcache {replayed.lmcache} has none"
        raise PreflightError(
            f"there is no cache simulator of LMCache in {python}: {installed}",
            where="--lookup-log",
            cause=replayed.lacks,
            todo="install lmcache >= 0.5.6 there, or name the interpreter that has it with engine.python",
        )
    if replayed.unreadable:
        raise RecipeError(
            "this is no log of lookups that LMCache's cache simulator can read",
            where=where,
            cause=replayed.unreadable,
            todo="give the folder of lmcache.lookup_log (--lookup-hash-log-dir of the server), unchanged",
        )
    return replayed


def _check(replayed: _Replayed, section: Lmcache, plan: Plan, where: str) -> None:
    if replayed.model is None and replayed.models:
        raise RecipeError(
            f"the log has lookups of several models, and none of {plan.model}: {', '.join(replayed.models[:5])}",
            where=where,
            cause="LMCache knows a model by what the engines were given as --model",
            todo="write that as model.id or model.path, or give a log with one model",
        )
    if not replayed.requests:
        raise RecipeError(
            "no lookup is in the log",
            where=where,
            cause="; ".join(replayed.warnings[:2]) or "no request had a whole chunk",
            todo="let the deployment serve for a while with lmcache.lookup_log, and try again",
        )
    if set(replayed.chunk_sizes) != {section.chunk_size}:
        raise RecipeError(
            f"the log has chunks of {', '.join(map(str, replayed.chunk_sizes))} tokens, the recipe of "
            f"{section.chunk_size}",
            where=where,
            cause="the hashes are of whole chunks: those of another size cannot be computed from them",
            todo=f"--set lmcache.chunk_size={replayed.chunk_sizes[0]}, or log with the recipe's chunks",
        )
