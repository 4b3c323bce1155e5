"""What Slurm leaves in the environment, and who must not see it.

Every option of sbatch and srun is also a variable, set for everything inside the job: an srun in it obeys
SLURM_NTASKS_PER_NODE or SLURM_CPU_BIND set by another step (22.05, srun(1), "input environment variables"), and
libraries inside an engine take SLURM_PROCID, SLURM_NTASKS or PMI_RANK for their own ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMI2_", "PMIX_")
_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Where the cluster is."""
_JOB = "SLURM_JOB_ID"


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of our own srun: it knows its cluster; the job and every option are on its command line."""
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIXES) or name in _CLUSTER}


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of what an agent starts. The job's id stays, for logs and for people."""
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIXES) or name == _JOB}
