"""The container in which a node's agent runs, and with it every process that the agent starts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.recipe.base import EnvMap, Strict

Kind = Literal["docker", "apptainer", "pyxis"]


class Container(Strict):
    """A container around each node's agent, so that PIDs and shared memory stay local to the agent. pdserve itself, the
    run directory and a local model are mounted at their own paths."""

    kind: Kind = Field(description="docker, apptainer, or pyxis (enroot through srun: Slurm only).")
    image: str | None = Field(default=None, description="Image, or a file of one; null: the recipe's own `image`.")
    mounts: list[str] = Field(
        default=[], description="SRC:DST or SRC:DST:ro, absolute paths: a model cache, libraries of the host, ..."
    )
    env: EnvMap = Field(default={}, description="Environment inside; it wins over what the image and the node say.")
    shm_gib: float | None = Field(
        default=None,
        gt=0,
        description="docker: a /dev/shm of its own of this size, which vanishes with the container. null: the node's.",
    )
    python: str = Field(
        default="python3", description="Interpreter inside that has vLLM and pdserve's dependencies; it runs the agent."
    )
    options: list[str] = Field(
        default=[],
        description="Further options of `docker run`, `apptainer exec` or srun (pyxis), one `--name=value` each.",
    )
