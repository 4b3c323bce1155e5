"""`recipes/tiny-cpu.yaml` with a `container:` section."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.cluster.tiny import PATIENT, RECIPE
from tests.containers.image import IMAGE, host_mounts, limits

NAME = "tiny-box"
MOUNTED = {"image": IMAGE, "python": sys.executable, "mounts": host_mounts()}


def contained(folder: Path, cache: Path, *, container: Mapping[str, object] = MOUNTED, **changes: object) -> Path:
    """The recipe of the repository in a container, for a user who adds nothing else."""
    container = {"kind": "docker", "options": limits(), "compile_cache": str(cache), **container}
    recipe = {"extends": str(RECIPE), "name": NAME, "container": container, "timeouts": PATIENT}
    file = folder / f"{NAME}.yaml"
    file.write_text(yaml.safe_dump(recipe | changes, sort_keys=False))
    return file
