"""python -m benchmarks.proxy: runs, prints the table, writes results.json, results.png and the README's results."""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.proxy.connections import LoadError
from benchmarks.proxy.environment import describe_machine
from benchmarks.proxy.goals import judge
from benchmarks.proxy.pdserve_settings import variants
from benchmarks.proxy.plot import plot
from benchmarks.proxy.profiling import profile
from benchmarks.proxy.readme import fill_in
from benchmarks.proxy.results import Results
from benchmarks.proxy.run import run_rounds, run_soak
from benchmarks.proxy.scenarios import SCENARIOS, SIZES
from benchmarks.proxy.systems import SYSTEMS, Cores, StartError, router_argv
from benchmarks.proxy.table import FEATURE_SCENARIOS, print_report

HERE = Path(__file__).parent
SCRATCH = HERE.parents[1] / ".cache" / "bench-proxy" / "results"


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench-proxy", description="What a prefill/decode proxy costs.")
    parser.add_argument(
        "--quick", action="store_true", help="everything once, under two minutes; its numbers are hints"
    )
    parser.add_argument("--size", choices=SIZES, default=None, help="smoke: does it run at all; no numbers")
    parser.add_argument("--rounds", type=int, help="instead of the size's own")
    names = ", ".join(scenario.name for scenario in SCENARIOS)
    parser.add_argument("--only", action="append", metavar="NAME", help=f"scenarios whose name begins so: {names}")
    parser.add_argument(
        "--systems",
        default=",".join(SYSTEMS),
        help="comma-separated; also pdserve-without-FEATURE, pdserve-with-kv-events, and pdserve@PYTHON: another "
        "build, of that interpreter's environment (default: %(default)s)",
    )
    parser.add_argument("--soak", action="store_true", help="only whether memory stays flat (vllm-router, pdserve)")
    parser.add_argument("--features", action="store_true", help="only what each feature of pdserve costs")
    parser.add_argument("--profile", metavar="SCENARIO", help="pdserve under cProfile in one scenario, top 25 printed")
    parser.add_argument(
        "--cores", metavar="HARNESS,PROXY", help="CPU numbers (default: the first and the last allowed)"
    )
    parser.add_argument("--retries", type=int, default=0, help="of a sample taken under foreign load (default: 0)")
    parser.add_argument("--output", type=Path, help="folder of results.json and results.png")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = arguments(argv)
    console = Console(stderr=True, highlight=False)
    kind = args.size or ("quick" if args.quick else "full")
    size = replace(SIZES[kind], **({"rounds": args.rounds} if args.rounds else {}))
    cores = Cores.choose(args.cores)
    if cores.harness == cores.proxy:
        console.print("Only one CPU: proxy, mock and generator share it, and the numbers mean nothing.", style="red")
    if args.features:
        args.only, args.systems = list(FEATURE_SCENARIOS), ",".join(variants())
    scenarios = [item for item in SCENARIOS if not args.only or item.name.startswith(tuple(args.only))]
    if not scenarios:
        console.print("No scenario has such a name.", style="red")
        return 2
    systems = [name for name in args.systems.split(",") if name]
    if "vllm-router" in systems and router_argv() is None:
        console.print("vllm-router is not installed: no ratios and no goals in this run.", style="red")
        systems.remove("vllm-router")
    try:
        machine = describe_machine(kind, size, cores)
    except StartError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    if not machine["pdserve_compiled"]:
        console.print("The installed pdserve is not compiled: both systems of that name are the same.", style="red")
    results = Results(machine | {"started": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")})

    def log(line: str) -> None:
        console.print(line, style="red" if "FAILED" in line else "dim", soft_wrap=True)

    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.profile:
                return profile(args.profile, cores, Path(folder), size)
            if args.soak:
                proxies = [name for name in systems if name not in ("direct", "toy")]
                results.soak = run_soak(proxies, size, cores, Path(folder), log)
            else:
                results.samples = run_rounds(systems, scenarios, size, cores, Path(folder), log, args.retries)
        except (StartError, LoadError) as error:
            console.print(str(error), style="red", markup=False)
            return 1
    # Only a whole full run replaces what is published.
    whole = kind == "full" and not args.only and args.systems == ",".join(SYSTEMS)
    output: Path = args.output or (HERE if whole or (args.features and kind == "full") else SCRATCH)
    output.mkdir(parents=True, exist_ok=True)
    name = "soak" if args.soak else "features" if args.features else "results"
    file = output / f"{name}.json"
    goals = judge(results.samples, results.soak)
    results.write(file, goals)
    print_report(results, goals)
    if name == "results":
        plot(results, output / "results.png", log)
    if output == HERE and (HERE / "results.json").exists():
        fill_in(HERE / "README.md", output)
    console.print(f"written: {output}", soft_wrap=True)
    return 1 if results.failures() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
