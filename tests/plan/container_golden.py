"""How an agent is started in a container of each kind, on each platform: one argument a line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pdserve.plan.container import Around, wrap_agent
from pdserve.recipe.base import SecretRef
from pdserve.recipe.sections import Container, Kind

FOLDER = Path(__file__).parent / "golden_containers"
KINDS: tuple[Kind, ...] = ("docker", "apptainer", "pyxis")
PLATFORMS: tuple[Literal["cpu", "cuda", "rocm"], ...] = ("cpu", "cuda", "rocm")
IMAGE = "docker.io/vllm/vllm-openai:v0.31.0"
ARGUMENTS = ("-m", "pdserve.node.agent", "--node", "n1", "--run-dir", "/nfs/runs/demo")


def container(kind: Kind) -> Container:
    """With everything that the section has, besides options."""
    return Container(
        kind=kind,
        mounts=["/data/hub:/hub", "/opt/rdma/lib:/opt/rdma/lib:ro"],
        env={"HF_HOME": "/hub", "HF_TOKEN": SecretRef(secret="MY_TOKEN"), "OMP_NUM_THREADS": 8},
    )


def around(platform: Literal["cpu", "cuda", "rocm"] = "rocm", *, in_slurm: bool = True, rdma: bool = False) -> Around:
    """A node of a Slurm job, a user with two more groups, and a local model."""
    return Around(
        run_id="20260101-abc",
        run_dir="/nfs/runs/demo",
        node="n1",
        platform=platform,
        package="/nfs/pdserve",
        paths=("/nfs/models/kimi",),
        user="1000:100",
        groups=(44, 109),
        forward=("SLURM_JOB_ID",),
        in_slurm=in_slurm,
        rdma=rdma,
    )


def golden_files() -> dict[Path, str]:
    """Path -> what it must contain."""
    files = {}
    for kind in KINDS:
        for platform in PLATFORMS:
            wrapped = wrap_agent(container(kind), IMAGE, ARGUMENTS, around(platform))
            srun = ["srun", *wrapped.srun_options] if wrapped.srun_options else []
            files[FOLDER / f"{kind}-{platform}.txt"] = "\n".join([*srun, *wrapped.argv, ""])
    return files
