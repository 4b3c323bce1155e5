"""The batch scripts of a sweep: job arrays of Slurm whose tasks bring up one deployment each, measure it, take it down.

All tasks of an array get the same nodes and options, so deployments that ask for different ones are in arrays of their
own. A task is a number of the array; what it runs is written in the script, so that a sweep file that is changed, or
points that are measured meanwhile, cannot give it another deployment.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.plan.model import Plan
from pdserve.plan.nodes.allocation import job_shape
from pdserve.plan.render.sbatch import FIND_PDSERVE, IN_BACKGROUND, directives_of, options_of, signal_seconds
from pdserve.recipe.model import Recipe

ARRAY_OUTPUT = "pdserve-%A_%a.out"
_MISSING = 2
_SCRIPT = """\
#!/usr/bin/env bash
# Measures {many} of the sweep {name}: each task of this array brings one up, measures it, and takes it down.
#
# `pdserve sweep {words} --slurm` submits it. What is measured already is not measured again, so it may be submitted
# again after a crash.
{directives}
{find}
deployments=(
{deployments}
)
deployment=${{deployments[${{SLURM_ARRAY_TASK_ID:?this script is a job array: submit it with sbatch}}]}}

{wait}"""


@dataclass(frozen=True)
class ArrayMember:
    """A deployment of a sweep."""

    id: str
    """What `pdserve sweep --only` takes."""
    title: str
    recipe: Recipe
    plan: Plan


@dataclass(frozen=True)
class RenderedArray:
    """A job array: its tasks in the order of their numbers, the nodes of each, and the script for sbatch."""

    members: tuple[ArrayMember, ...]
    nodes: int
    script: str


def render_arrays(
    members: Sequence[ArrayMember], words: Sequence[str], *, name: str, at_once: int | None = None
) -> tuple[RenderedArray, ...]:
    """One array for each set of nodes and options. `words`: the sweep file and the options that each task is given;
    `name`: of the sweep; `at_once`: tasks of an array that may run at a time, None: as many as Slurm starts.

    Raises RecipeError where slurm.nodes are too few, or slurm.time is too short to start anything.
    """
    signal = max((signal_seconds(member.plan, runs=True) for member in members), default=0)
    groups: dict[tuple[str, ...], list[ArrayMember]] = {}
    for member in members:
        asked = options_of(member.recipe, signal, name=f"{member.recipe.name}-{name}", output=ARRAY_OUTPUT)
        groups.setdefault(tuple(asked), []).append(member)
    return tuple(
        RenderedArray(
            tuple(some), job_shape(some[0].recipe).nodes, _script(options, some, words, name=name, at_once=at_once)
        )
        for options, some in groups.items()
    )


def _script(
    options: Sequence[str], some: Sequence[ArrayMember], words: Sequence[str], *, name: str, at_once: int | None
) -> str:
    array = f"--array=0-{len(some) - 1}" + ("" if at_once is None else f"%{at_once}")
    quoted = shlex.join(words)
    return _SCRIPT.format(
        many="1 deployment" if len(some) == 1 else f"{len(some)} deployments",
        name=name,
        words=_in_comment(shlex.quote(words[0])),
        directives=directives_of([*options, array]),
        find=FIND_PDSERVE.format(missing=_MISSING),
        deployments="\n".join(
            f"  {member.id}  # task {number}: {_in_comment(member.title)}" for number, member in enumerate(some)
        ),
        wait=IN_BACKGROUND.format(verb="sweep", arguments=f'{quoted} --only "$deployment"'),
    )


def _in_comment(text: str) -> str:
    """A line break would end the comment."""
    return text if text.isprintable() else ascii(text)
