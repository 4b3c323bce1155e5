"""The script of a small job array, with everything that varies held still."""

from __future__ import annotations

from pathlib import Path

from pdserve.plan.sbatch import ArrayMember, render_arrays
from tests.plan.kit import on_gpus, plan, recipe

FILE = Path(__file__).parent / "array.sbatch"


def member(name: str, *changes: dict[str, object]) -> ArrayMember:
    """A deployment of a sweep."""
    made = recipe(*changes)
    return ArrayMember(name, f"title of {name}", made, plan(made))


def array_script() -> str:
    """What array.sbatch must contain."""
    gpus, job = on_gpus(8, 8, "rocm"), {"slurm": {"partition": "batch", "time": "02:00:00"}, "devices_per_node": 8}
    (array,) = render_arrays(
        [member("aaaa", gpus, job), member("bbbb", gpus, job, {"proxy": {"drain_seconds": 3}})],
        ["/sweeps/s.yaml", "--limit", "1800"],
        name="load",
        at_once=2,
    )
    return array.script
