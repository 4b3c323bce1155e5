"""python -m tests.cluster: whether this machine can hold a cluster. Fetches the packages that one needs.

Exit code 3, with what is missing, if it cannot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.cluster.machine import SLURM, LabError, check_machine, unpacked

CANNOT = 3


def fetch(*more: Callable[[], object]) -> int:
    """Return the exit code, after what a cluster needs and these have been fetched."""
    try:
        check_machine(slurm=True)
        unpacked("cluster", *SLURM)
        for fetched in more:
            fetched()
    except LabError as error:
        print(error)
        return CANNOT
    return 0


if __name__ == "__main__":
    sys.exit(fetch())
