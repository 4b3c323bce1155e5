"""Runs a probe module against one upstream version's sources, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.upstream.sources import CACHE, ROOT, source_tree

VLLM_VERSIONS = ("0.26.0", "0.27.1", "0.30.0", "0.32.0", "0.33.0")
"""The oldest and the newest that is supported (installed/versions.py, KNOWN), and those between that differ most."""
BETWEEN = ("0.28.0", "0.29.0", "0.31.0")
"""Further releases, each with code that load-timeout relies on and none of the others has."""
ALL_VLLM_VERSIONS = tuple(sorted((*VLLM_VERSIONS, *BETWEEN)))
INSTALLED_VLLM = "0.32.0"


class ProbeError(AssertionError):
    """A probe ended with an error; the message has what it said."""


def probe(
    version: str,
    module: str,
    *args: str,
    timeout: float = 800,
) -> Any:
    """What `python -m module args` prints as its last line, parsed as JSON.

    `version`: of vllm; its sources come first on the path, except for the installed one. LMCache is the installed one.
    The probe is a fork of a process that has this vLLM imported, and no lmcache.
    Raises ProbeError with the end of its output when it fails.
    """
    code, output = preloaders().run(version, module, args, timeout)
    lines = [
        line for line in output.splitlines() if line.startswith(("{", "[", '"')) or line in ("true", "false", "null")
    ]
    if code != 0 or not lines:
        raise ProbeError(f"{module} on vllm {version} ended with {code}:\n{output[-6000:]}")
    return json.loads(lines[-1])


def _environment(version: str) -> dict[str, str]:
    path = [str(ROOT)]
    if version != INSTALLED_VLLM:
        path.insert(0, str(source_tree("vllm", version)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "VLLM_"))}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        # The probes share the machine with those of another version; what they compute is small.
        "OMP_NUM_THREADS": "1",
        # A randomized probe is the same one every time.
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
        # What one version finds out of a model class displaces what another one did.
        "VLLM_CACHE_ROOT": str(CACHE / "of-vllm" / version),
        "LMCACHE_TRACK_USAGE": "false",
    }


class Preloaders:
    """One preloaded.py for each version of vLLM, all children of one process that lives as long as the test run."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.upstream.preloaders"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        version: str,
        module: str,
        args: tuple[str, ...],
        timeout: float,
    ) -> tuple[int, str]:
        """Exit code and output of a probe. Raises ProbeError when it is late or its process died."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            request = {"module": module, "args": args, "output": str(output)}
            order = {"key": version, "environment": _environment(version), "request": request, "timeout": timeout}
            self._popen.stdin.write(json.dumps(order) + "\n")
            self._popen.stdin.flush()
            answer = json.loads(self._popen.stdout.readline())
            text = output.read_text() if output.exists() else ""
            if answer["code"] is None:
                raise ProbeError(f"{module} did not end within {timeout:.0f} s, or its process died:\n{text[-6000:]}")
            return int(answer["code"]), text

    def close(self) -> None:
        """Ends all of them. They end with this process, too."""
        self._popen.stdin.close() if self._popen.stdin else None
        self._popen.wait()
        if self._popen.stdout:
            self._popen.stdout.close()


@cache
def preloaders() -> Preloaders:
    """Of this test run. tests/upstream/conftest.py starts and closes it."""
    return Preloaders()
