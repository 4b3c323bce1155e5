"""`pdserve` as a user runs it on nodes with docker: over fake engines inside of containers, or over real ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import PATIENT, RECIPE, Lab
from tests.containers.daemon import Docker
from tests.containers.image import IMAGE, host_mounts, limits
from tests.launch.deployment import wait_until

_LIMIT = 60.0
MOUNTED = {"image": IMAGE, "python": sys.executable, "mounts": host_mounts()}


class Boxes(Lab):
    """A cluster whose nodes have docker and the image."""

    def __init__(self, cluster: Cluster, dockers: dict[str, Docker], folder: Path) -> None:
        super().__init__(cluster, folder)
        self.dockers = dockers

    @property
    def node(self) -> str:
        """The only one, or the first."""
        return self.cluster.nodes[0]

    @property
    def docker(self) -> Docker:
        """Return the docker of that node."""
        return self.dockers[self.node]

    def boxed(self, **changes: Any) -> Path:
        """1P1D with LMCache in a container on this machine. Every fake engine has a segment of shared memory."""
        ours: dict[str, Any] = {
            "slurm__nodes": 1,
            "container": {"kind": "docker", "options": limits(), **MOUNTED},
            "engine__env": {"VLLM_CPU_KVCACHE_SPACE": 1, "FAKE_SHM": "1"},
        }
        return self.recipe(**ours | changes)

    def over_two(self, **changes: Any) -> Path:
        """Write the recipe for two nodes."""
        return self.boxed(**{"slurm__nodes": 2} | changes)

    def container(self, node: str | None = None) -> str:
        """The id of the only container on a node."""
        (container,) = self.dockers[node or self.node].containers()
        return container

    def inside(self, node: str) -> str:
        """Return what runs in the only container on a node, as `docker top` shows it."""
        return self.dockers[node].output("top", self.container(node), "-o", "pid,args")

    def processes_of(self, word: str, node: str | None = None) -> list[int]:
        """PIDs, as the test process sees them, of Python processes of a node that have `word` among their arguments."""
        return [
            pid
            for pid, argv in self.cluster.processes(node or self.node)
            if word in argv and Path(argv[0]).name.startswith("python")
        ]

    def guard_and_agent(self, node: str | None = None) -> tuple[int, int]:
        """PIDs as the test process sees them: the agent is the younger one."""
        guard, agent = self.processes_of("pdserve.node.agent", node)
        return guard, agent

    def left(self) -> list[str]:
        """Return what a deployment has left on any node: besides what every cluster looks for, containers and
        mounts."""
        left = self.cluster.left()
        for node, docker in self.dockers.items():
            left += [f"{node}: container {each}" for each in (docker.containers() if docker.lives else [])]
            left += [f"{node}: mount {point}" for point in sorted(docker.new_mounts())]
        return left

    def assert_nothing_left(self) -> None:
        wait_until("nothing left", lambda: not self.left(), _LIMIT, why=lambda: "\n" + "\n".join(self.left()))

    def reset(self) -> None:
        """Tidy up after a test that failed half-way."""
        for docker in self.dockers.values():
            if not docker.lives:
                docker.start()
            for each in docker.containers():
                docker.call("rm", "--force", each)
        self.cluster.reset()


TINY_BOX = "tiny-box"


def contained(folder: Path, cache: Path, *, container: Mapping[str, object] = MOUNTED, **changes: object) -> Path:
    """The recipe of the repository in a container, for a user who adds nothing else."""
    container = {"kind": "docker", "options": limits(), "compile_cache": str(cache), **container}
    # Eager engines compile one function all the same, that of logprobs, in each fresh compile cache.
    engine = {"env": {"TORCHDYNAMO_DISABLE": 1}}
    recipe = {"extends": str(RECIPE), "name": TINY_BOX, "container": container, "engine": engine, "timeouts": PATIENT}
    file = folder / f"{TINY_BOX}.yaml"
    file.write_text(yaml.safe_dump(recipe | changes, sort_keys=False))
    return file
