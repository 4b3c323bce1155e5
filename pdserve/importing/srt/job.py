"""The job of an srt-slurm recipe: what is asked of Slurm, the container, its mounts, how long a start may take."""

from __future__ import annotations

import re

from pdserve.importing.launch import Launch, Sourced
from pdserve.importing.tracked_tree import TrackedTree, whole

_SLURM = {"time_limit": "time", "account": "account", "partition": "partition"}
_DIRECTIVES = ("time", "account", "partition", "qos", "reservation", "constraint")
_FILE_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")
_DEPENDENCIES = "vllm-container-deps.sh"
"""A script of srt-slurm's own (c88ef731, configs/patches): numactl for numa-bind, msgpack for Dynamo, and a patch of
vLLM for numa-bind (vllm#41098, merged in April 2026, thus in all that pdserve supports)."""
_NUMACTL = (["apt-get", "-y", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "numactl"])


def read_job(tracked: TrackedTree, launch: Launch) -> None:
    """The sections `slurm` and `container`, and the timeout of an engine."""
    for key, ours in _SLURM.items():
        if (at := tracked.take("slurm", key)) is not None:
            launch.slurm[ours] = at.of(str(at.value))
    options: list[Sourced] = []
    for key, at in tracked.mapping("sbatch_directives").items():
        if key in _DIRECTIVES:
            launch.slurm[key] = at.of(str(at.value))
        elif key == "exclude":
            launch.exclude_nodes.extend(at.of(name) for name in str(at.value).split(","))
        else:
            options.append(at.of(_option(key, at.value)))
    if options:
        launch.slurm["options"] = options
    launch.container["kind"] = Sourced("pyxis", "srt-slurm starts its containers by pyxis", 0)
    if srun := [at.of(_option(key, at.value)) for key, at in tracked.mapping("srun_options").items()]:
        launch.container["options"] = srun
    _mounts(tracked, launch)
    _setup(tracked, launch)
    attempts, interval = tracked.take("health_check", "max_attempts"), tracked.take("health_check", "interval_seconds")
    if attempts is not None and (number := whole(attempts.value)):
        pause = whole(interval.value) if interval is not None else 10
        launch.engine_seconds = attempts.of(number * (pause or 10))


def _option(name: str, value: object) -> str:
    return f"--{name}" if value in (None, "") else f"--{name}={value}"


def _mounts(tracked: TrackedTree, launch: Launch) -> None:
    mounts: list[Sourced] = []
    wanted = [at.of(f"{source}:{at.value}") for source, at in tracked.mapping("container_mounts").items()]
    extra = tracked.take("extra_mount")
    if extra is not None and isinstance(extra.value, list):
        wanted += [tracked.at("extra_mount", index) for index in range(len(extra.value))]
    for at in wanted:
        parts = str(at.value).split(":")
        if len(parts) in (2, 3) and all(part.startswith("/") and "$" not in part for part in parts[:2]):
            mounts.append(at)
        else:
            why = "a path of the site: add it to container.mounts, as SRC:DST with absolute paths"
            launch.note(at, why, "confirm")
    if mounts:
        launch.container["mounts"] = mounts


def _setup(tracked: TrackedTree, launch: Launch) -> None:
    script = tracked.take("setup_script")
    if script is None:
        return
    if script.value != _DEPENDENCIES:
        # What is no file name may hold anything, a secret among it.
        name = script.value if _FILE_NAME.fullmatch(str(script.value)) else "FILE"
        why = f"what it does is not known: mount it, and add it to the recipe: setup: [[bash, /configs/{name}]]"
        launch.note(script, why, "served")
    elif any(name == "numa-bind" for engines in launch.roles.values() for name in engines.args):
        launch.setup.extend(script.of(list(words)) for words in _NUMACTL)
        why = "setup installs numactl, which numa-bind needs; msgpack is for Dynamo, and its patch is vllm#41098"
        launch.note(script, why, "replaced")
    else:
        launch.note(script, "it installs numactl and msgpack, for numa-bind and for Dynamo; neither is here", "unused")
