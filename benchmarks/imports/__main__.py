"""How many launch files of public repositories `pdserve import` reads: python -m benchmarks.imports CHECKOUT...

A file counts as whole where the recipe loads and nothing was lost that changes what is served, as partial where the
recipe loads and something was, as refused otherwise. Of a file with several deployments all are imported, and the worst
counts. docs/importing.md has the last figures, with the commits of the checkouts.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.imports.respelled import respelled
from pdserve.errors import PdserveError
from pdserve.importing.formats import Choice
from pdserve.operations.import_recipe import ImportedRecipe, import_file

RANK = ("whole", "partial", "refused")
_NUMBER = re.compile(r"(line )?\d+")


def outcome(file: Path, choice: Choice) -> tuple[str, list[str]]:
    """The rank of one deployment, and why."""
    try:
        recipe = import_file(file, choice, environ={})
    except PdserveError as error:
        detail = f": {error.evidence[0]}" if error.evidence else ""
        return "refused", [f"{error.what}{detail}".replace(str(file), "FILE")]
    return ("partial" if recipe.draft.losses() else "whole"), reasons(recipe)


def reasons(recipe: ImportedRecipe) -> list[str]:
    """Why an import is partial, without what is of this one file."""
    return sorted({f"{note.at.key.rpartition('.')[2]}: {note.why}" for note in recipe.draft.losses()})


def variants(file: Path) -> list[str | None]:
    """All deployments of a file, by their names."""
    try:
        import_file(file, Choice(), environ={})
    except PdserveError as error:
        names = (error.todo or "").partition("--variant: ")[2]
        return [*re.sub(r" and \d+ more$", "", names).split()] or [None]
    return [None]


def srt_files(checkout: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The recipes of srt-slurm with a vllm backend."""
    for file in sorted(checkout.rglob("*.yaml")):
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            continue
        top = data.get("base", data) if isinstance(data, dict) else None
        if not isinstance(top, dict):
            continue
        engine = top.get("engine") or top.get("backend")
        kind = engine.get("type") if isinstance(engine, dict) else engine
        if kind == "vllm" and ("resources" in top or "roles" in top):
            yield file, data


def disaggregated(data: dict[str, Any]) -> bool:
    """Whether prefill and decode are engines of their own."""
    top = data.get("base", data)
    return bool((top.get("resources") or {}).get("prefill_workers") or (top.get("roles") or {}).get("prefill"))


def count(files: Iterator[tuple[str, Path]]) -> None:
    """Print what became of the files of each kind."""
    ranks: dict[str, Counter[str]] = {}
    why: Counter[str] = Counter()
    for kind, file in files:
        results = [outcome(file, Choice(variant=name)) for name in variants(file)]
        worst = max((rank for rank, _ in results), key=RANK.index)
        ranks.setdefault(kind, Counter())[worst] += 1
        why.update({_NUMBER.sub("N", reason) for _, each in results for reason in each})
    for kind, counted in sorted(ranks.items()):
        total = sum(counted.values())
        shares = ", ".join(f"{counted[rank]} {rank}" for rank in RANK)
        print(f"{kind}: {total} files: {shares} ({100 * counted['whole'] / total:.0f} % whole)")
    for reason, number in why.most_common(25):
        print(f"  {number:4} {reason}")


def _of_srt(checkouts: list[Path], folder: Path) -> Iterator[tuple[str, Path]]:
    for checkout in checkouts:
        for number, (file, data) in enumerate(srt_files(checkout)):
            shape = "disaggregated" if disaggregated(data) else "aggregated"
            written = data.get("schema", 1)
            yield f"{checkout.name}, schema {written}, {shape}", file
            if written == 1:
                other = folder / f"{checkout.name}-{number}.yaml"
                other.write_text(yaml.safe_dump(respelled(copy.deepcopy(data)), sort_keys=False), encoding="utf-8")
                yield f"{checkout.name}, schema 2 (spelled anew), {shape}", other


def main() -> None:
    """The command line."""
    import tempfile

    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description=__doc__)
    parser.add_argument("checkout", nargs="+", type=Path, help="a checkout of a repository with launch files")
    checkouts = parser.parse_args().checkout
    with tempfile.TemporaryDirectory() as folder:
        count(_of_srt(checkouts, Path(folder)))


if __name__ == "__main__":
    main()
