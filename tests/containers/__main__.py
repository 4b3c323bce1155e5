"""python -m tests.containers: whether docker and podman can run on this machine, below a cluster's nodes. Fetches them.

Exit code 3, with what is missing, if it cannot.
"""

from __future__ import annotations

import sys

from tests.cluster.machine import LabError, check_machine, unpacked
from tests.containers.daemon import docker_layers, podman_layers

CANNOT = 3


def main() -> int:
    try:
        check_machine(slurm=True)
        unpacked()
        docker_layers()
        podman_layers()
    except LabError as error:
        print(error)
        return CANNOT
    return 0


if __name__ == "__main__":
    sys.exit(main())
