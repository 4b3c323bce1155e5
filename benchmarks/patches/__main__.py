"""python -m benchmarks.patches"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.patches.engines import SCENARIOS
from benchmarks.patches.measure import FULL, SMOKE, as_json, environment, measure, systems
from benchmarks.patches.report import HERE, judged, table, write


def main() -> None:
    names, known = [scenario.name for scenario in SCENARIOS], list(systems())
    parser = argparse.ArgumentParser(
        prog="scripts/bench-patches", description="What the patches cost a step of vLLM's scheduler."
    )
    parser.add_argument("--only", default=",".join(names), help="scenarios, comma-separated (default: all)")
    parser.add_argument(
        "--systems", default=",".join(known), help="all, unpatched, or names of patches (default: each)"
    )
    parser.add_argument("--minutes", type=float, default=FULL.minutes, help="for rounds of the clock")
    parser.add_argument("--no-instructions", action="store_true", help="leaves out what takes valgrind some minutes")
    parser.add_argument("--smoke", action="store_true", help="a step of each: whether it works, no figures")
    parser.add_argument("--output", type=Path, help="folder of the results (default: beside this, if all has run)")
    parser.add_argument("--json", action="store_true", help="the results on stdout instead of a table and files")
    options = parser.parse_args()
    scenarios, chosen = options.only.split(","), options.systems.split(",")
    for given, allowed in ((scenarios, names), (chosen, known)):
        if unknown := set(given) - set(allowed):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(allowed)}")
    wanted = dataclasses.replace(FULL, minutes=options.minutes, instructions=not options.no_instructions)
    size = SMOKE if options.smoke else wanted
    before = environment()
    figures = measure(chosen, scenarios, size)
    if options.json:
        print(json.dumps(as_json(figures, before)))
        return
    print("\n".join([*table(figures), "", *judged(figures)]))
    whole = (scenarios, chosen) == (names, known) and size == FULL
    write(as_json(figures, before), figures, options.output or (HERE if whole else Path(".cache/bench-patches")))


if __name__ == "__main__":
    main()
