"""What P/D and its proxy cost beside one engine alone, on the real CPU stack, with one client and in turns.

    python -m benchmarks.overhead --rounds 5 --json benchmarks/overhead/results.json

Three systems, all there at once: one engine of tiny-cpu asked directly; a prefill and a decode behind pdserve's proxy;
the same two engines behind vllm-router (its wheel must be installed). In each round each system gets the same load,
with prompts that none has seen. About 12 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import yaml

from pdserve.bench import vllm_program
from pdserve.operations.plan_recipe import load, plan_for
from pdserve.plan.process import HttpProbe
from pdserve.run.directory import find, home

_REPOSITORY = Path(__file__).parents[2]
_TINY = _REPOSITORY / "recipes" / "tiny-cpu.yaml"
_ROUTER_PORT = 8001
_MOONCAKE = {"kind": "mooncake", "protocol": "tcp"}
RECIPES: Mapping[str, dict[str, Any]] = {
    "overhead-pd": {
        "requires": {"lmcache": None},
        "prefill": {"connector": _MOONCAKE},
        "lmcache": None,
    },
    "overhead-one": {
        "requires": {"lmcache": None},
        "mode": "aggregated",
        "prefill": None,
        "decode": None,
        "aggregated": {},
        "lmcache": None,
        "ports": {"aggregated": 8300, "proxy": 8010},
    },
}
FIGURES = {
    "ttft_ms": "median_ttft_ms",
    "itl_ms": "median_itl_ms",
    "e2e_ms": "median_e2el_ms",
    "tokens_a_second": "output_throughput",
}
"""Ours -> the name in the result of `vllm bench serve`."""
ALONE, OURS, ROUTER = "one engine", "pdserve", "vllm-router"


@dataclass(frozen=True)
class System:
    """Where it listens, and the key that it wants."""

    name: str
    url: str
    key: str


def main() -> int:
    """Brings everything up, measures, prints a table, takes everything down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=24, help="a load of a system in a round, for each concurrency")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, systems(Path(folder)) as made:
        results = measured(made, given, Path(folder))
    table = summary(results)
    print_table(table)
    if given.json is not None:
        load_of = {key: value for key, value in vars(given).items() if key != "json"}
        given.json.write_text(json.dumps({"load": load_of, "rounds": results, "summary": table}, indent=2) + "\n")
    return 0


@contextmanager
def systems(folder: Path) -> Iterator[list[System]]:
    """All three; they are gone afterwards."""
    router: subprocess.Popen[bytes] | None = None
    try:
        for name, changes in RECIPES.items():
            path = folder / f"{name}.yaml"
            path.write_text(yaml.safe_dump({"extends": str(_TINY), "name": name, **changes}))
            _pdserve("up", str(path), "--detach")
        pair, one = (find(home(os.environ), name) for name in RECIPES)
        router = _router(folder, pair.read_key())
        engine = one.read_plan().process("aggregated-0").probe
        assert isinstance(engine, HttpProbe)
        endpoint = str(next(event["endpoint"] for event in pair.read_events()[0] if event["event"] == "up"))
        made = [
            System(ALONE, f"http://{engine.host}:{engine.port}", one.read_key()),
            System(OURS, endpoint, "none"),
            System(ROUTER, f"http://127.0.0.1:{_ROUTER_PORT}", pair.read_key()),
        ]
        _until_served(made[-1])
        yield made
    finally:
        if router is not None:
            router.terminate()
            router.wait()
        for name in RECIPES:
            _pdserve("down", name)


def _pdserve(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pdserve.cli.main", *words], check=True)


def _router(folder: Path, key: str) -> subprocess.Popen[bytes]:
    """In front of the engines of overhead-pd, as a recipe would start it."""
    path = folder / "router.yaml"
    changes = {**RECIPES["overhead-pd"], "proxy": {"kind": "vllm-router"}, "ports": {"proxy": _ROUTER_PORT}}
    path.write_text(yaml.safe_dump({"extends": str(_TINY), "name": "overhead-router", **changes}))
    plan = plan_for(load(path, (), ()), None, run_dir=str(folder), run_id="router").plan
    with (folder / "router.log").open("wb") as log:
        environ = {**os.environ, "OPENAI_API_KEY": key}
        return subprocess.Popen(plan.process("proxy").argv, env=environ, stdout=log, stderr=log)


def _until_served(system: System) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            answer = httpx.post(
                f"{system.url}/v1/completions",
                json={"model": "tiny", "prompt": "a", "max_tokens": 1},
                headers={"Authorization": f"Bearer {system.key}"},
                timeout=60,
            )
            if answer.status_code == 200:
                return
            why = answer.text
        except httpx.HTTPError as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise SystemExit(f"{system.name} does not serve: {why}")
        time.sleep(0.5)


def measured(made: list[System], given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """An entry for each round, concurrency and system. Which comes first goes round."""
    results: list[dict[str, Any]] = []
    seeds = count(1)
    for number in range(given.rounds):
        for concurrency in given.concurrency:
            for system in made[number % len(made) :] + made[: number % len(made)]:
                seed = next(seeds)
                file = folder / f"{seed}.json"
                _bench(system, given, concurrency, seed, file)
                answer = json.loads(file.read_text())
                if answer["completed"] != given.requests or answer.get("failed"):
                    raise SystemExit(f"{system.name}: {answer['completed']} of {given.requests} requests were answered")
                figures = {ours: round(answer[theirs], 3) for ours, theirs in FIGURES.items()}
                results.append({"round": number, "concurrency": concurrency, "system": system.name, **figures})
                print(results[-1], flush=True)
    return results


def _bench(system: System, given: argparse.Namespace, concurrency: int, seed: int, file: Path) -> None:
    words = {
        "backend": "openai",
        "base-url": system.url,
        "endpoint": "/v1/completions",
        "model": str(_REPOSITORY / ".cache" / "tiny-model"),
        "served-model-name": "tiny",
        "tokenizer": str(_REPOSITORY / ".cache" / "tiny-model"),
        "dataset-name": "random",
        "random-range-ratio": 0,
        "temperature": 0,
        "ready-check-timeout-sec": 0,
        "random-input-len": given.prompt,
        "random-output-len": given.output,
        "num-prompts": given.requests,
        "num-warmups": concurrency,
        "max-concurrency": concurrency,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "seed": seed,
        "result-dir": file.parent,
        "result-filename": file.name,
    }
    program = Path(vllm_program.__file__).read_text()
    argv = [sys.executable, "-c", program, *(f"--{name}={value}" for name, value in words.items())]
    argv += ["--ignore-eos", "--save-result", "--disable-tqdm"]
    environ = {**os.environ, "OPENAI_API_KEY": system.key}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the client failed on {system.name}:\n{done.stderr[-2000:]}")


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each concurrency and figure: the median of each system, and of the ratios to one engine within a round."""
    table: list[dict[str, Any]] = []
    for concurrency in dict.fromkeys(entry["concurrency"] for entry in results):
        for figure in FIGURES:
            rounds: dict[int, dict[str, float]] = {}
            for entry in results:
                if entry["concurrency"] == concurrency:
                    rounds.setdefault(entry["round"], {})[entry["system"]] = entry[figure]
            row: dict[str, Any] = {"concurrency": concurrency, "figure": figure}
            for system in (ALONE, OURS, ROUTER):
                row[system] = round(statistics.median(values[system] for values in rounds.values()), 2)
            for system in (OURS, ROUTER):
                ratios = [values[system] / values[ALONE] for values in rounds.values()]
                row[f"{system} / {ALONE}"] = round(statistics.median(ratios), 3)
            ratios = [values[OURS] / values[ROUTER] for values in rounds.values()]
            row[f"{OURS} / {ROUTER}"] = round(statistics.median(ratios), 3)
            table.append(row)
    return table


def print_table(table: list[dict[str, Any]]) -> None:
    """As Markdown."""
    names = list(table[0])
    print("| " + " | ".join(names) + " |")
    print("|" + " --- |" * len(names))
    for row in table:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")


if __name__ == "__main__":
    sys.exit(main())
