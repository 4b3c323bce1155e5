"""The sbatch line that asks for nodes of a shape, as errors quote it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pdserve.plan.nodes.nodelist import fold

SCRIPT = "slurm/disagg.sh"


def submit_line(*, nodes: int, gpus_per_node: int, exclude: Sequence[str], words: Sequence[str]) -> str:
    """`words`: the recipe and overrides, as given to `pdserve up`."""
    # The script itself asks for GPUs; `none` takes that back (tried on Slurm 22.05).
    no_gpus = [] if gpus_per_node else ["--gres=none"]
    return shlex.join(["sbatch", *shape_options(nodes, gpus_per_node, exclude), *no_gpus, SCRIPT, *words])


def shape_options(nodes: int, gpus_per_node: int, exclude: Sequence[str]) -> list[str]:
    """sbatch's options for so many nodes with so many GPUs (0: a job without GPUs)."""
    return [
        f"--nodes={nodes}",
        *([f"--gres=gpu:{gpus_per_node}"] if gpus_per_node else []),
        *([f"--exclude={fold(exclude)}"] if exclude else []),
    ]
