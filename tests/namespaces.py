"""What a program says in namespaces of its own, of which nothing reaches the machine."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.launch.deployment import REPOSITORY


def unshared(kind: str, *argv: str) -> Any:
    """What it prints as JSON, as root of a user namespace and of one of another kind (an option of `unshare`)."""
    done = subprocess.run(
        ["unshare", "--map-root-user", kind, *argv],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
