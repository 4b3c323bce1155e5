"""python -m benchmarks.scale"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.scale.launch import launch
from benchmarks.scale.report import show, write

SIZES = (1, 2, 4, 8, 16, 32, 64)
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench-scale", description="What orchestration costs as it grows.")
    parser.add_argument("--nodes", default=",".join(map(str, SIZES)), help="sizes, comma-separated (default: all)")
    parser.add_argument("--instances", type=int, default=8, help="engines on each node")
    parser.add_argument("--output", type=Path, help="folder of the results (default: beside this, if all sizes ran)")
    options = parser.parse_args()
    sizes = tuple(int(size) for size in options.nodes.split(","))
    launches = []
    for size in sizes:
        launches.append(launch(size, options.instances))
        show(launches)
    whole = sizes == SIZES and options.instances == 8
    write(launches, options.output or (HERE if whole else Path(".cache/bench-scale")))


if __name__ == "__main__":
    main()
