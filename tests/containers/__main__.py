"""python -m tests.containers: whether docker and podman can run on this machine, below a cluster's nodes. Fetches them.

Exit code 3, with what is missing, if it cannot.
"""

from __future__ import annotations

import sys

from tests.cluster.__main__ import fetch
from tests.containers.daemon import docker_layers, podman_layers

if __name__ == "__main__":
    sys.exit(fetch(docker_layers, podman_layers))
