"""How many launch files of public repositories `pdserve import` reads: python -m benchmarks.imports CHECKOUT...

A file counts as whole where the recipe loads and nothing was lost that changes what is served, as partial where the
recipe loads and something was, as refused otherwise. Of a file with several deployments all are imported, and the worst
counts. docs/importing.md has the last figures, with the commits of the checkouts.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from benchmarks.imports.respelled import respelled
from pdserve.errors import PdserveError
from pdserve.importing.formats import TAXONOMY
from pdserve.importing.launch import ImportChoice
from pdserve.importing.srt_variants import variants
from pdserve.importing.yaml_tree import read
from pdserve.operations.import_recipe import ImportedRecipe, import_file
from pdserve.recipe.load.recipe_document import text_of

RANK = ("whole", "partial", "refused")
_STORE = "kv_store_distributed_mooncake"
_NUMBER = re.compile(r"\d+")
_SERVER = re.compile(r"^[^#\n]*\bvllm serve\b", re.MULTILINE)


def outcomes(file: Path, choice: ImportChoice) -> list[tuple[str, list[str]]]:
    """The rank of each deployment that differs from the others, and why. A base with overrides is none: srtctl submits
    the overrides."""
    rank, why, error = _outcome(file, choice)
    if error is None or "--variant: " not in (error.todo or ""):
        return [(rank, why)]
    trees = variants(read(text_of(file), str(file)))
    names: dict[str, str] = {}
    for name, tree in trees.items():
        if name == "base":
            continue
        served = json.dumps({**tree.data, "name": "", "benchmark": ""}, default=str, sort_keys=True)
        names.setdefault(served, name)
    return [_outcome(file, ImportChoice(variant=name))[:2] for name in names.values()]


def _outcome(file: Path, choice: ImportChoice) -> tuple[str, list[str], PdserveError | None]:
    try:
        recipe = import_file(file, choice, environ={})
    except PdserveError as error:
        detail = f": {error.evidence[0]}" if error.evidence else ""
        return "refused", [f"{error.what}{detail}".replace(str(file), "FILE")], error
    return ("partial" if recipe.draft.losses() else "whole"), reasons(recipe), None


def reasons(recipe: ImportedRecipe) -> list[str]:
    """Why an import is partial, without what is of this one file."""
    return sorted({f"{note.at.key.rpartition('.')[2]}: {note.why}" for note in recipe.draft.losses()})


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
    variants = [each for key, each in data.items() if key.startswith(("override_", "zip_override_"))]
    return any(
        (top.get("resources") or {}).get("prefill_workers") or (top.get("roles") or {}).get("prefill")
        for top in (data.get("base", data), *variants)
        if isinstance(top, dict)
    )


def count(files: Iterator[tuple[str, Path, ImportChoice]]) -> None:
    """Print what became of the files of each kind."""
    ranks: dict[str, Counter[str]] = {}
    why: Counter[str] = Counter()
    for kind, file, choice in files:
        results = outcomes(file, choice)
        worst = max((rank for rank, _ in results), key=RANK.index)
        ranks.setdefault(kind, Counter())[worst] += 1
        why.update({_NUMBER.sub("N", reason) for _, each in results for reason in each})
    for kind, counted in sorted(ranks.items()):
        total = sum(counted.values())
        shares = ", ".join(f"{counted[rank]} {rank}" for rank in RANK)
        print(f"{kind}: {total} files: {shares} ({100 * counted['whole'] / total:.0f} % whole)")
    for reason, number in why.most_common(25):
        print(f"  {number:4} {reason}", flush=True)


def of_srt(checkout: Path, folder: Path) -> Iterator[tuple[str, Path, ImportChoice]]:
    """The recipes of srt-slurm; disaggregated ones of schema 1 once more in the spelling of schema 2."""
    for number, (file, data) in enumerate(srt_files(checkout)):
        apart = disaggregated(data)
        shape = "disaggregated" if apart else "aggregated"
        schema = data.get("schema", 1)
        yield f"{checkout.name}, srt-slurm schema {schema}, {shape}", file, ImportChoice()
        if schema == 1 and apart:
            other = folder / f"{checkout.name}-{number}.yaml"
            other.write_text(yaml.safe_dump(respelled(copy.deepcopy(data)), sort_keys=False), encoding="utf-8")
            yield f"{checkout.name}, srt-slurm schema 2 (spelled anew), {shape}", other, ImportChoice()


def of_vllm(checkout: Path) -> Iterator[tuple[str, Path, ImportChoice]]:
    """The models of vLLM's collection with what its page begins with, with stores, and as prefill and decode where it
    has that."""
    if not (checkout / TAXONOMY).is_file():
        return
    for file in sorted((checkout / "models").rglob("*.yaml")):
        yield f"{checkout.name}, default strategy", file, ImportChoice()
        for offload in ("lmcache", "simple", _STORE):
            yield f"{checkout.name}, {offload}", file, ImportChoice(kv_offload=offload)
        if "pd_cluster" in (yaml.safe_load(file.read_text(encoding="utf-8")).get("compatible_strategies") or []):
            yield f"{checkout.name}, pd_cluster", file, ImportChoice(strategy="pd_cluster")
            yield f"{checkout.name}, pd_cluster, {_STORE}", file, ImportChoice(strategy="pd_cluster", kv_offload=_STORE)


def of_scripts(checkout: Path, given: dict[str, str]) -> Iterator[tuple[str, Path, ImportChoice]]:
    """Shell scripts with a server of vLLM, with the variables of the command line."""
    for file in sorted(checkout.rglob("*.sh")):
        if _SERVER.search(file.read_text(encoding="utf-8", errors="replace")):
            yield f"{checkout.name}, shell scripts", file, ImportChoice(variables=given)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description=__doc__)
    parser.add_argument("checkout", nargs="+", type=Path, help="a checkout of a repository with launch files")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help="of the shell scripts")
    options = parser.parse_args()
    given = dict(text.split("=", 1) for text in options.var)
    with tempfile.TemporaryDirectory() as folder:
        for checkout in options.checkout:
            count(chain(of_srt(checkout, Path(folder)), of_vllm(checkout), of_scripts(checkout, given)))


if __name__ == "__main__":
    main()
