"""Runs a probe module against one upstream version's sources, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.upstream.sources import ROOT, source_tree

VLLM_VERSIONS = ("0.21.0", "0.22.1", "0.24.0", "0.27.1", "0.30.0", "0.32.0", "0.33.0")
INSTALLED_VLLM = "0.32.0"


class ProbeError(AssertionError):
    """A probe ended with an error; the message has what it said."""


def probe(
    version: str,
    module: str,
    *args: str,
    env: dict[str, str] | None = None,
    lmcache: str | None = None,
    timeout: float = 280,
) -> Any:
    """What `python -m module args` prints as its last line, parsed as JSON.

    `version`: of vllm; its sources come first on the path, except for the installed one. `lmcache`: likewise; None
    means the installed one. Raises ProbeError with the end of its output when it fails.
    """
    path = [str(ROOT)]
    if lmcache is not None:
        path.insert(0, str(source_tree("lmcache", lmcache)))
    if version != INSTALLED_VLLM:
        path.insert(0, str(source_tree("vllm", version)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1" if version == INSTALLED_VLLM else "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_PLUGINS": "",
            "LMCACHE_TRACK_USAGE": "false",
            **(env or {}),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if done.returncode != 0 or not done.stdout.strip():
        said = (done.stdout + done.stderr)[-6000:]
        raise ProbeError(f"{module} on vllm {version} ended with {done.returncode}:\n{said}")
    return json.loads(done.stdout.strip().splitlines()[-1])
