"""Models for instances of several data-parallel ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.launch.deployment import REPOSITORY

TINY = REPOSITORY / ".cache/tiny-model"


def claiming_experts(folder: Path) -> Path:
    """The tiny model with a config.json by which vLLM takes it for one with experts; its layers have none."""
    shutil.copytree(TINY, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_local_experts": 2}))
    return folder
