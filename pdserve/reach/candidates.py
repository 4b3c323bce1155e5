"""The machines that a deployment may use, and the way to each, before any check of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pdserve
from pdserve.errors import PreflightError
from pdserve.plan.container import Around, cache_of, image_of, needed_paths, shared_file, source_folder, wrap_agent
from pdserve.plan.environment import DEVICE_VARIABLES
from pdserve.plan.node import Local, Srun, Ssh
from pdserve.plan.slurm_nodes import expand_nodelist
from pdserve.reach.cluster_file import LoadedCluster, machine_of
from pdserve.reach.slurm import gpus_asked_per_node
from pdserve.recipe.container_options import uses_rdma
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Network
from pdserve.system.host import local_node
from pdserve.system.process import output_of

_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)\s*sec", re.MULTILINE)
DEFAULT_KILL_WAIT_SECONDS = 30.0
"""slurm.conf's own."""
_SCONTROL_SECONDS = 10.0


@dataclass(frozen=True)
class Candidate:
    """Describes one machine. `address` and `devices` None: as the node reports them."""

    name: str
    reach: Local | Srun | Ssh
    target: str
    """What the other nodes call it: a name or an address."""
    address: str | None = None
    devices: tuple[int, ...] | None = None
    key: str = ""
    """The key of the cluster file that describes the machine: `hosts.1`."""
    command: tuple[str, ...] = (sys.executable,)
    """What runs Python there: an interpreter, or a container with one."""


@dataclass(frozen=True)
class Candidates:
    """Holds all machines, in the order in which roles are placed on them. `origin`: where they come from, for
    messages."""

    origin: str
    machines: tuple[Candidate, ...]
    file: LoadedCluster | None = None
    """The cluster file that names them."""
    job: str | None = None
    """The Slurm job whose nodes they are."""
    gpus_per_node: int | None = None
    """What the job's steps have on each node, where Slurm knows it."""
    all_names: tuple[str, ...] = ()
    """The names of all nodes of the job, those included that the recipe excludes."""

    @property
    def network(self) -> Network | None:
        """Return the network of the cluster file; it wins over the recipe's."""
        return None if self.file is None else self.file.cluster.network


def of_cluster(loaded: LoadedCluster, exclude: Sequence[str]) -> Candidates:
    """Return the hosts of a cluster file, reached by ssh. Raises PreflightError when none is left."""
    cluster = loaded.cluster
    machines = tuple(
        Candidate(
            name=host.name,
            reach=Ssh(
                destination=host.ssh or host.name,
                config=None if loaded.ssh_config is None else str(loaded.ssh_config),
                options=tuple(word for option in cluster.ssh.options for word in ("-o", option)),
                connect_seconds=cluster.ssh.connect_seconds,
            ),
            target=host.address or machine_of(host.ssh or host.name),
            address=host.address,
            devices=None if host.devices is None else tuple(host.devices),
            key=f"hosts.{cluster.hosts.index(host)}",
            command=(host.python or sys.executable,),
        )
        for host in cluster.usable(exclude)
    )
    if not machines:
        raise PreflightError("exclude_nodes leaves out every host of the cluster file", where=str(loaded.path))
    return Candidates(str(loaded.path), machines, file=loaded)


def of_this_machine(platform: str) -> Candidates:
    """Return this machine alone, reached as others are: in a container its packages and devices are seen from
    inside."""
    name = local_node(platform).name
    return Candidates("this machine", (Candidate(name=name, reach=Local(), target="127.0.0.1"),))


def of_job(environ: Mapping[str, str], exclude: Sequence[str]) -> Candidates | None:
    """Return the nodes of the Slurm job that this runs in; None outside of one.

    Raises PreflightError for a node list that cannot be read, and when nothing of it is left.
    """
    job, nodelist = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not nodelist:
        return None
    everything = expand_nodelist(nodelist, where="SLURM_JOB_NODELIST")
    names = [name for name in everything if name not in exclude]
    if not names:
        raise PreflightError(
            f"exclude_nodes leaves out every node of job {job}",
            where="exclude_nodes",
            cause=f"the job has {nodelist}",
            todo="submit with --exclude, so that Slurm gives other nodes",
        )
    reach = Srun(job=job, kill_wait=kill_wait())
    machines = tuple(Candidate(name=name, reach=reach, target=name) for name in names)
    return Candidates(f"job {job}", machines, job=job, gpus_per_node=_gpus_per_node(environ, job), all_names=everything)


def _gpus_per_node(environ: Mapping[str, str], job: str) -> int | None:
    """Return what our steps will have of each node: of what the job has, no more than it has asked for."""
    has = environ.get("SLURM_GPUS_ON_NODE", "")
    if not has.isdecimal():
        return None
    asked = gpus_asked_per_node(job)
    return int(has) if asked is None else min(int(has), asked)


def in_containers(
    candidates: Candidates, recipe: Recipe, *, run_id: str, run_dir: str, recipe_dir: str, store: str
) -> Candidates:
    """Put the recipe's container around whatever pdserve starts on these machines.

    `store`: the folder of the files that are made of images. Raises PreflightError where the container cannot be had
    that way.
    """
    container = recipe.container
    if container is None:
        return candidates
    image, paths = image_of(recipe), needed_paths(recipe, recipe_dir)
    image, cache = shared_file(container.kind, image, store) or image, cache_of(recipe)
    package, rdma = source_folder(str(Path(pdserve.__file__).parent)), uses_rdma(recipe)

    def wrapped(candidate: Candidate) -> Candidate:
        in_slurm = isinstance(candidate.reach, Srun)
        around = Around(
            run_id=run_id,
            run_dir=run_dir,
            node=candidate.name,
            platform=recipe.platform,
            package=package,
            paths=paths,
            user=f"{os.getuid()}:{os.getgid()}",
            groups=tuple(os.getgroups()),
            # What Slurm, or the user's shell, has narrowed this down to. An image is given all devices of the node.
            forward=(*DEVICE_VARIABLES, *(("SLURM_JOB_ID",) if in_slurm else ())),
            in_slurm=in_slurm,
            rdma=rdma,
            compile_cache=cache,
        )
        match = wrap_agent(container, image, (), around)
        reach = candidate.reach.model_copy(update={"options": match.srun_options}) if in_slurm else candidate.reach
        return replace(candidate, command=match.argv, reach=reach)

    return replace(candidates, machines=tuple(map(wrapped, candidates.machines)))


def kill_wait() -> float:
    """Return Slurm's KillWait in seconds; its default where scontrol does not have it."""
    tool = output_of(["scontrol", "show", "config"], timeout=_SCONTROL_SECONDS)
    match = _KILL_WAIT.search(tool.out)
    return float(match.group(1)) if match else DEFAULT_KILL_WAIT_SECONDS
