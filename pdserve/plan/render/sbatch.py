"""The batch script of a recipe: `render --slurm`, and slurm/disagg.sh, which is the one of the two-node recipe.

It asks Slurm for the recipe's nodes and runs `pdserve up` on the first of them. Everything that needs thought about
nodes is in `up`, which refuses a job of another shape in its first second.

Slurm 22.05, as tried: the copy of a script that runs lies in slurmd's spool folder; a TERM at the time limit reaches
the batch shell alone only with `--signal=B:`, up to a minute early; a trap runs only between commands.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from pdserve.plan.model import Plan
from pdserve.plan.nodes.allocation import job_shape
from pdserve.plan.nodes.submit_line import shape_options
from pdserve.plan.render.job_time import check_time
from pdserve.plan.time_limits import stops_in_order
from pdserve.recipe.model import Recipe

MARGIN_SECONDS = 60
"""Slurm looks at time limits every half a minute, and KillWait must find nothing left to kill."""
_REPLACES = {
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
    """The script. `words`: the recipe's file and the overrides that `up` is given; `script`: what the usage calls it;
    `command`: what `run` is given in the place of `up`.

    Raises RecipeError where slurm.nodes are too few, or slurm.time is too short to start anything.
    """
    directives = directives_of(options_of(recipe, signal_seconds(plan, runs=bool(command))))
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
    """Seconds from the launcher's signal to the job's end: the proxy's drain and the stops of all stages, one after the
    other as each takes its whole time, and a margin. `runs`: the command of `pdserve run` ends before them."""
    return MARGIN_SECONDS + math.ceil(stops_in_order(plan.processes) + (plan.timeouts.stop_seconds if runs else 0))


def options_of(
    recipe: Recipe, signal: int, *, name: str | None = None, output: str = "pdserve-%j.out"
) -> Iterator[str]:
    """What the recipe asks of sbatch. `signal`: seconds before the job's end at which it gets a TERM; `name`: of the
    job, else that of the recipe. Raises RecipeError as `render_sbatch`."""
    section = recipe.slurm
    check_time(recipe, signal)
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
    replaced = {name for option in section.options for name in (_name(option), _REPLACES.get(_name(option)))}
    yield from (option for option in ours if _name(option) not in replaced)
    yield from section.options


def directives_of(options: Iterable[str]) -> str:
    """The lines that sbatch reads."""
    return "\n".join(f"#SBATCH {_directive(option)}" for option in options)


def _directive(option: str) -> str:
    """As sbatch reads a line: quotes of both kinds hold words together, a backslash takes the next character as it is,
    also in quotes, and # begins a comment (`_get_argument` in Slurm's src/sbatch/opt.c)."""
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[^\s#'\"\\]*", value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def _name(option: str) -> str:
    return option.partition("=")[0].removeprefix("--")
