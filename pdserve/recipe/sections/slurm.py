"""What a recipe asks of Slurm: the job's size, its time and what a site wants to know."""

from __future__ import annotations

from pydantic import Field

from pdserve.recipe.base import Count, Strict


class Slurm(Strict):
    """The job that `slurm/disagg.sh`, `render --slurm` and `up --slurm` ask for; sbatch's own options win over it."""

    nodes: Count | None = Field(
        default=None,
        description="Nodes of the job; null: as many as the roles need with devices_per_node devices on each.",
    )
    time: str | None = Field(
        default=None, description='Time limit as sbatch takes it, in quotes ("08:00:00"); null: the partition\'s own.'
    )
    partition: str | None = Field(default=None, description="Partition; null: the site's default.")
    account: str | None = Field(default=None, description="Account that is charged; null: the user's default.")
    qos: str | None = Field(default=None, description="Quality of service; null: the user's default.")
    reservation: str | None = Field(default=None, description="Reservation to run in.")
    constraint: str | None = Field(default=None, description="Node features that sbatch must find (mi355x&ib).")
    options: list[str] = Field(
        default=[],
        description="Further sbatch options, one `--name=value` each. --gres, --gpus-per-node, --mem, --exclusive and "
        "--requeue take the place of what pdserve writes there.",
    )
