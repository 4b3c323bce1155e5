"""Who sees which of Slurm's variables."""

from __future__ import annotations

from pdserve.reach.slurm import for_srun, without_slurm

INSIDE_A_JOB = {
    "PATH": "/usr/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_NTASKS_PER_NODE": "1", "SLURM_CPU_BIND": "verbose", "SLURM_PROCID": "0", "SRUN_CPUS_PER_TASK": "4",
    "SBATCH_REQUEUE": "1", "PMI_RANK": "3", "PMIX_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1",
    "MY_SLURM_SCRIPT": "stays",
}  # fmt: skip


def test_our_srun_knows_its_cluster_and_obeys_no_inherited_option() -> None:
    assert for_srun(INSIDE_A_JOB) == {
        "PATH": "/usr/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MY_SLURM_SCRIPT": "stays",
    }


def test_engines_do_not_take_slurms_ranks_for_theirs() -> None:
    assert without_slurm(INSIDE_A_JOB) == {
        "PATH": "/usr/bin",
        "SLURM_JOB_ID": "7",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MY_SLURM_SCRIPT": "stays",
    }


def test_outside_of_slurm_nothing_changes() -> None:
    assert for_srun({"A": "b"}) == without_slurm({"A": "b"}) == {"A": "b"}
