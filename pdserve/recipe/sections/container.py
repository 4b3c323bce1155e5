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
    store: str | None = Field(
        default=None,
        description="apptainer, pyxis: folder that all nodes share, for the file that is made of a registry's image "
        "(.sif, .sqsh), once for all nodes and runs. null: `.images` in PDSERVE_HOME.",
    )
    disk_gib: float = Field(
        default=60,
        gt=0,
        description="Free disk that is asked for before an image is fetched: its size unpacked. An image of vLLM for "
        "GPUs takes tens of GiB.",
    )
    compile_cache: str | None = Field(
        default=None,
        description="Absolute folder on each node that outlives a run, for the kernels that vLLM, torch, Triton, "
        "FlashInfer and AITER compile, in a folder of its own for each image and model. null: they are compiled anew "
        "by each run.",
    )
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
        description="Further options of `docker run`, `apptainer exec` or srun (pyxis): `--name=value`, `--name value` "
        "or short (`-v`, `-e`). Those that may stand several times are added to pdserve's own (a device, limit or "
        "capability that pdserve sets too is replaced); one that stands once takes the place of pdserve's.",
    )
    leave_out: list[str] = Field(
        default=[],
        description="Options that pdserve sets and shall not: a name takes all of it away (`--gpus`), a value that one "
        "(`--device=/dev/dri`, `--ulimit=memlock`). `pdserve render` shows what is set.",
    )
