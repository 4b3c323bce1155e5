"""Jobs of Slurm: the shape that a recipe needs, its check against a job, the batch script (`render --slurm`, and
slurm/disagg.sh for the two-node recipe), and the job arrays of a sweep.

It asks Slurm for the recipe's nodes and runs `pdserve up` on the first of them. Everything that needs thought about
nodes is in `up`, which refuses a job of another shape in its first second.

Slurm 22.05, as tried: the copy of a script that runs lies in slurmd's spool folder; a TERM at the time limit reaches
the batch shell alone only with `--signal=B:`, up to a minute early; a trap runs only between commands.

All tasks of an array get the same nodes and options, so deployments that ask for different ones are in arrays of their
own. What a task runs is written in the script, so that a sweep file that is changed, or points that are measured
meanwhile, cannot give it another deployment.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.errors import PreflightError, RecipeError
from pdserve.plan import placement
from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.plan.slurm_nodes import shape_options, submit_line
from pdserve.plan.time_limits import stops_in_order
from pdserve.recipe.model import Recipe


@dataclass(frozen=True)
class JobShape:
    """The nodes to ask of Slurm. `gpus_per_node` is 0 on the CPU platform."""

    nodes: int
    gpus_per_node: int


def job_shape(recipe: Recipe) -> JobShape:
    """Return the shape of a recipe's job: slurm.nodes, or as many nodes as the roles need; each with devices_per_node
    devices, or as many as they need.

    Raises RecipeError where slurm.nodes are too few, and for what fits on no number of nodes.
    """
    wanted = recipe.slurm.nodes
    if recipe.platform == "cpu":
        needed = len(placement.nodes_for(recipe))
        if wanted is not None and wanted < needed:
            raise RecipeError(
                f"{_nodes_text(wanted)}, and an instance spans {needed}",
                where="slurm.nodes",
                todo=f"write {needed}, or leave it out",
            )
        return JobShape(wanted or needed, 0)
    if wanted is None or recipe.devices_per_node:
        nodes = placement.nodes_for(recipe)
        if wanted is not None and wanted < len(nodes):
            raise RecipeError(
                f"{_nodes_text(wanted)} of {recipe.devices_per_node} devices cannot hold "
                f"{placement.device_sum(recipe)}",
                where="slurm.nodes",
                todo=f"write {len(nodes)}, or leave it out",
            )
        return JobShape(wanted or len(nodes), len(nodes[0].devices))
    for size in range(1, placement.devices_needed(recipe) + 1):
        if placement.has_room(recipe, _assumed_nodes(wanted, size)):
            return JobShape(wanted, size)
    raise RecipeError(
        f"{_nodes_text(wanted)} cannot hold {placement.device_sum(recipe)}, however many devices they have",
        where="slurm.nodes",
        cause="an instance spans more nodes than there are",
        todo="raise it, or leave it out",
    )


def usable_nodes(recipe: Recipe, names: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes of a job without those that the recipe excludes."""
    return tuple(name for name in names if name not in recipe.exclude_nodes)


def check_allocation(
    recipe: Recipe, names: Sequence[str], gpus_per_node: int | None, *, words: Sequence[str]
) -> str | None:
    """Check that the nodes of a job can hold the recipe, and return a warning if some are left without work. Raises
    PreflightError, with the sbatch line to type, if they cannot. `names`: all nodes of the job. `gpus_per_node`: of the
    job; None where Slurm does not say, the nodes are then taken to be the recipe's own kind. `words`: the recipe and
    overrides, for that line."""
    shape = job_shape(recipe)
    usable = usable_nodes(recipe, names)
    left_out = [name for name in names if name in recipe.exclude_nodes]
    gpus = shape.gpus_per_node if gpus_per_node is None else gpus_per_node
    here = f"this job has {_nodes_text(len(names))}" + (f" with {gpus} GPUs each" if recipe.platform != "cpu" else "")
    if left_out:
        here += f", and the recipe excludes {', '.join(left_out)}"
    fits = len(usable) >= (recipe.slurm.nodes or 1)
    if fits and recipe.platform != "cpu":
        fits = placement.has_room(recipe, _assumed_nodes(len(usable), gpus))
    if not fits:
        needs = _nodes_text(shape.nodes)
        if shape.gpus_per_node:
            needs += f" with {shape.gpus_per_node} GPUs each, for {placement.device_sum(recipe)}"
        line = submit_line(
            nodes=shape.nodes, gpus_per_node=shape.gpus_per_node, exclude=recipe.exclude_nodes, words=words
        )
        raise PreflightError(f"{here}; {recipe.name} needs {needs}", where="Slurm job", todo=line)
    idle = len(usable) - _nodes_with_work(recipe, len(usable), gpus)
    if idle > 0:
        return f"{here}; {recipe.name} leaves {_nodes_text(idle)} without work"
    return None


def _nodes_with_work(recipe: Recipe, count: int, gpus: int) -> int:
    placed = placement.place(recipe, _assumed_nodes(count, gpus))
    return len({share.node.name for instance in placed for share in instance.shares})


def _assumed_nodes(count: int, gpus: int) -> list[Node]:
    """Return nodes before any was looked at; their names do not matter."""
    return [Node(name=f"node{i}", devices=tuple(range(gpus))) for i in range(count)]


def _nodes_text(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


_EARLY_SECONDS = 60
"""Slurm may send a job its signal so much earlier than it was asked."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def check_job_time(recipe: Recipe, signal: int) -> None:
    """Check that a job is not stopped when it starts. `signal`: seconds before the job's end at which it gets a TERM.
    Raises RecipeError where that is its start."""
    text = recipe.slurm.time
    seconds = None if text is None else job_seconds(text)
    least = signal + _EARLY_SECONDS
    if seconds is None or seconds > least:
        return
    hours, minutes = divmod(least // 60 + 1, 60)
    raise RecipeError(
        f"a job of {text} ({seconds} s) is stopped when it starts: it gets a TERM {signal} s before its end, which "
        f"Slurm may send {_EARLY_SECONDS} s earlier",
        where="slurm.time",
        cause=f"the proxy drains and all stages stop in those {signal} s, one after the other",
        todo=f'set slurm.time to "{hours:02d}:{minutes:02d}:00" and the time that start and work take; or lower '
        "timeouts.stop_seconds and proxy.drain_seconds",
    )


def job_seconds(text: str) -> int | None:
    """Read a time limit: `MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS`, in whole minutes as Slurm
    counts. None: no limit, or sbatch's to refuse."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.group("days", "first", "second", "third"))
    if match["days"] is not None or match["third"] is not None:
        seconds = days * 86400 + first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    return -(-seconds // 60) * 60 or None


MARGIN_SECONDS = 60
"""Slurm looks at time limits every half a minute, and KillWait must find nothing left to kill."""
_REPLACED_OPTIONS = {
    "gpus": "gres",
    "gpus-per-node": "gres",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "oversubscribe": "exclusive",
    "requeue": "no-requeue",
}
"""An option of the recipe -> ours that it takes the place of, besides the one of its own name."""

FIND_PDSERVE = """\
set -euo pipefail

# $0 is a copy in slurmd's spool folder; where the job was submitted is the repository, or the folder of the recipes.
cd -- "${{PDSERVE_REPOSITORY:-${{SLURM_SUBMIT_DIR:-$PWD}}}}"
pdserve=$(command -v pdserve || true)
[[ -n $pdserve ]] || pdserve=$PWD/.venv/bin/pdserve
if [[ ! -x $pdserve ]]; then
  echo "error: no pdserve in PATH or in $PWD/.venv: submit from the repository, or export PDSERVE_REPOSITORY" >&2
  exit {missing}
fi
"""
"""The beginning of a batch script; `{missing}`: the exit code where there is no pdserve."""
IN_BACKGROUND = """\
# In the background, because bash runs a trap only between commands, and a signal ends `wait` but no other command. The
# trap comes first: a signal that finds none ends this shell, and the launcher does not get it.
launcher="" asked=""
forward() {{ asked=yes; [[ -z $launcher ]] || kill -TERM "$launcher" 2>/dev/null || true; }}
trap forward TERM INT
"$pdserve" {verb} {arguments} &
launcher=$!
[[ -z $asked ]] || forward
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done
wait "$launcher"
"""
"""Its end: runs a verb so that a TERM to the batch shell reaches it, and ends with its code."""

_SCRIPT = """\
#!/usr/bin/env bash
# {does}
#
#   sbatch [OPTION...] {script} [RECIPE [--set KEY=VALUE ...]{tail}]
#
# Without arguments: {default}
# sbatch's own options (--partition, --account, --time, ...) win over the lines below. A recipe of another size needs
# its own --nodes and --gres: `pdserve render --slurm RECIPE` writes this script with them, and `pdserve up` refuses a
# job of the wrong shape with the line to type. A container: --set container.kind=docker, apptainer or pyxis.
{directives}
{find}if (($# == 0)); then set -- {words}; fi

{wait}"""


_SERVES = "Brings a recipe up over the nodes of a Slurm job and serves until `pdserve down`, scancel or the time limit."
_RUNS = "Brings a recipe up over the nodes of a Slurm job, runs a command against it on the first, and takes it down."


def render_sbatch(
    recipe: Recipe, plan: Plan, words: Sequence[str], *, script: str = "THIS_FILE", command: Sequence[str] = ()
) -> str:
    """Render the script of a job. `words`: the recipe's file and the overrides that `up` is given; `script`: what the
    usage calls it; `command`: what `run` is given in the place of `up`.

    Raises RecipeError where slurm.nodes are too few, or slurm.time is too short to start anything.
    """
    directives = sbatch_directives(sbatch_options(recipe, signal_seconds(plan, runs=bool(command))))
    quoted = shlex.join([*words, "--", *command] if command else words)
    default = quoted if quoted.isprintable() else "the recipe below"  # a line break would end the comment
    return _SCRIPT.format(
        does=_RUNS if command else _SERVES,
        tail=" -- COMMAND" if command else "",
        script=script,
        default=default,
        words=quoted,
        directives=directives,
        find=FIND_PDSERVE.format(missing=202 if command else 2),  # of `run`, a 2 would be the command's
        wait=IN_BACKGROUND.format(verb="run" if command else "up", arguments='"$@"'),
    )


def signal_seconds(plan: Plan, *, runs: bool = False) -> int:
    """Return the seconds from the launcher's signal to the job's end: the proxy's drain and the stops of all stages,
    one after the other as each takes its whole time, and a margin. `runs`: the command of `pdserve run` ends before
    them."""
    return MARGIN_SECONDS + math.ceil(stops_in_order(plan.processes) + (plan.timeouts.stop_seconds if runs else 0))


def sbatch_options(
    recipe: Recipe, signal: int, *, name: str | None = None, output: str = "pdserve-%j.out"
) -> Iterator[str]:
    """Yield the options that the recipe asks of sbatch. `signal`: seconds before the job's end at which it gets a TERM;
    `name`: of the job, else that of the recipe. Raises RecipeError as `render_sbatch`."""
    section = recipe.slurm
    check_job_time(recipe, signal)
    shape = job_shape(recipe)
    ours = [
        f"--job-name={name or recipe.name}",
        *shape_options(shape.nodes, shape.gpus_per_node, recipe.exclude_nodes),
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        *(
            f"--{key}={value}"
            for key in ("time", "partition", "account", "qos", "reservation", "constraint")
            if (value := getattr(section, key)) is not None
        ),
        f"--output={output}",
        "--open-mode=append",
        f"--signal=B:TERM@{signal}",
        # A job that failed would fail again with its nodes held; one that was preempted may be wanted back: --requeue.
        "--no-requeue",
        *(["--no-kill"] if recipe.on_node_loss == "degrade" else []),
    ]
    replaced = {
        name
        for option in section.options
        for name in (_option_name(option), _REPLACED_OPTIONS.get(_option_name(option)))
    }
    yield from (option for option in ours if _option_name(option) not in replaced)
    yield from section.options


def sbatch_directives(options: Iterable[str]) -> str:
    """Return the lines that sbatch reads."""
    return "\n".join(f"#SBATCH {_directive(option)}" for option in options)


def _directive(option: str) -> str:
    """Quote an option as sbatch reads a line: quotes of both kinds hold words together, a backslash takes the next
    character as it is, also in quotes, and # begins a comment (`_get_argument` in Slurm's src/sbatch/opt.c)."""
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[^\s#'\"\\]*", value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def _option_name(option: str) -> str:
    return option.partition("=")[0].removeprefix("--")


ARRAY_OUTPUT = "pdserve-%A_%a.out"
_MISSING = 2
_ARRAY_SCRIPT = """\
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
    """Holds a job array: its tasks in the order of their numbers, the nodes of each, and the script for sbatch."""

    members: tuple[ArrayMember, ...]
    nodes: int
    script: str


def render_arrays(
    members: Sequence[ArrayMember], words: Sequence[str], *, name: str, at_once: int | None = None
) -> tuple[RenderedArray, ...]:
    """Render one array for each set of nodes and options. `words`: the sweep file and the options that each task is
    given; `name`: of the sweep; `at_once`: tasks of an array that may run at a time, None: as many as Slurm starts.

    Raises RecipeError where slurm.nodes are too few, or slurm.time is too short to start anything.
    """
    signal = max((signal_seconds(member.plan, runs=True) for member in members), default=0)
    groups: dict[tuple[str, ...], list[ArrayMember]] = {}
    for member in members:
        asked = sbatch_options(member.recipe, signal, name=f"{member.recipe.name}-{name}", output=ARRAY_OUTPUT)
        groups.setdefault(tuple(asked), []).append(member)
    return tuple(
        RenderedArray(
            tuple(some),
            job_shape(some[0].recipe).nodes,
            _array_script(options, some, words, name=name, at_once=at_once),
        )
        for options, some in groups.items()
    )


def _array_script(
    options: Sequence[str], some: Sequence[ArrayMember], words: Sequence[str], *, name: str, at_once: int | None
) -> str:
    array = f"--array=0-{len(some) - 1}" + ("" if at_once is None else f"%{at_once}")
    quoted = shlex.join(words)
    return _ARRAY_SCRIPT.format(
        many="1 deployment" if len(some) == 1 else f"{len(some)} deployments",
        name=name,
        words=_in_comment(shlex.quote(words[0])),
        directives=sbatch_directives([*options, array]),
        find=FIND_PDSERVE.format(missing=_MISSING),
        deployments="\n".join(
            f"  {member.id}  # task {number}: {_in_comment(member.title)}" for number, member in enumerate(some)
        ),
        wait=IN_BACKGROUND.format(verb="sweep", arguments=f'{quoted} --only "$deployment"'),
    )


def _in_comment(text: str) -> str:
    """Return a text that fits into a comment: a line break would end it."""
    return text if text.isprintable() else ascii(text)
