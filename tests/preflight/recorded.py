"""Output of tools that this project could not run, as others have recorded it. Each names its source."""

from __future__ import annotations

NVIDIA_GPUS = """\
0, GPU-ad466f2f-575d-d949-35e0-9a7d912d974e
1, GPU-3410aa41-502b-5cf1-d8c4-58dc1c22fbc9
"""
"""UUIDs of Tesla V100-SXM3: github.com/2maz/slurm-monitor, tests/slurm_monitor/conftest.py (GPU_RESPONSES, nvidia)."""

NVIDIA_APPS = """\
GPU-ad466f2f-575d-d949-35e0-9a7d912d974e, 1, 8032 MiB, /opt/engines/bin/python
"""
"""The process-status of the same recording, in our order of columns; the unit as github.com/NVIDIA/nvidia-docker
issue 1483 shows it."""

NVIDIA_APPS_OF_ANOTHER_NAMESPACE = """\
GPU-3410aa41-502b-5cf1-d8c4-58dc1c22fbc9, 40170, [N/A], [Not Found]
"""
"""A process of another PID namespace: the PID is that of github.com/NVIDIA/nvidia-docker issue 1483, the two brackets
are what nvidia-smi writes for what it cannot tell."""

ROCM_BUSY = """\


============================ ROCm System Management Interface ============================
===================================== KFD Processes ======================================
KFD process information:
PID     PROCESS NAME    GPU(s)  VRAM USED       SDMA USED       CU OCCUPANCY
3722222 test_ref        0       0               0               0           
3814512 test_ref        0       0               0               0           
1168514 pt_main_thread  1       177386942464    0               4           
3714485 test_ref        0       0               0               0           
==========================================================================================
================================== End of ROCm SMI Log ===================================
"""  # noqa: W291  (the tool pads its columns)
"""rocm-smi --showpids: github.com/ROCm/ROC-smi issue 60, four of its rows."""

ROCM_UNTOLD = """\
========================= ROCm System Management Interface =========================
================================== KFD Processes ===================================
get_compute_process_info_by_pid, Not supported on the given system
get_compute_process_info_by_pid, Not supported on the given system
KFD process information
PID     PROCESS NAME    GPU(s)  VRAM USED       SDMA USED       CU OCCUPANCY
55573   gmx_mpi         1       UNKNOWN         UNKNOWN         UNKNOWN     
55571   gmx_mpi         1       UNKNOWN         UNKNOWN         UNKNOWN     
====================================================================================
=============================== End of ROCm SMI Log ================================
"""  # noqa: W291  (the tool pads its columns)
"""github.com/ROCm/rocm_smi_lib issue 166, two of its rows."""

ROCM_NONE = """\
============================ ROCm System Management Interface ============================
===================================== KFD Processes ======================================
No KFD PIDs currently running
==========================================================================================
================================== End of ROCm SMI Log ===================================
"""
"""The sentence of showPids in python_smi_tools/rocm_smi.py, github.com/ROCm/rocm_smi_lib at a1295714."""

AMD_BUSY = """\
[{"gpu": 0, "process_list": [{"process_info": {"name": "/usr/bin/python3.12", "pid": 2168274,
  "memory_usage": {"gtt_mem": {"value": 6180000, "unit": "B"}, "cpu_mem": {"value": 0, "unit": "B"},
                   "vram_mem": {"value": 65588000, "unit": "B"}}}}]},
 {"gpu": 1, "process_list": [{"process_info": {"name": "/usr/bin/python3.12", "pid": 2168274,
  "memory_usage": {"gtt_mem": {"value": 6180000, "unit": "B"}, "cpu_mem": {"value": 0, "unit": "B"},
                   "vram_mem": {"value": 65588000, "unit": "B"}}}}]}]
"""
"""Values of github.com/ROCm/rocm-systems pull request 6396, in the layout of `amd-smi process --json` (process_list,
process_info) that amdsmi_commands.py stores."""

AMD_NONE = """\
[{"gpu": 0, "process_list": [{"process_info": "No running processes detected"}]},
 {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]}]
"""
"""The sentence of amdsmi_commands.py in its place."""

INFINIBAND = {
    "hfi1_0": {"1": {"state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)"}},
    "mlx4_0": {
        "1": {"state": "4: ACTIVE", "rate": "40 Gb/sec (4X QDR)"},
        "2": {"state": "4: ACTIVE", "rate": "40 Gb/sec (4X QDR)"},
    },
    "mlx5_0": {"1": {"state": "4: ACTIVE", "rate": "25 Gb/sec (1X EDR)"}},
}
"""/sys/class/infiniband, device -> port -> file: github.com/prometheus/procfs, testdata/fixtures.ttar at 3c943fdb."""

INFINIBAND_DOWN = "1: DOWN"
"""The kernel's other spelling of a port's state: drivers/infiniband/core/sysfs.c, state_show."""
