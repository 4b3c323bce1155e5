"""Runs tests on the sources of one upstream version.

    if IN_RELEASE:
        from tests.upstream.scheduler_lab import Lab

    @on(*VLLM_VERSIONS)
    def test_something(version: str) -> None:
        lab = Lab()

Its body runs in a fork of a process that has imported this vLLM, and no client of LMCache. Whatever it patches ends
with it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from pdserve.patches import effects
from pdserve.patches.patch import Patch
from tests.upstream.sources import CACHE, ROOT, source_tree

VLLM_VERSIONS = ("0.26.0", "0.27.1", "0.30.0", "0.32.0", "0.33.0")
"""The oldest and the newest that is supported (installed/versions.py, KNOWN), and those between that differ most."""
BETWEEN = ("0.28.0", "0.29.0", "0.31.0")
"""Further releases, each with code that load-timeout relies on and none of the others has."""
ALL_VLLM_VERSIONS = tuple(sorted((*VLLM_VERSIONS, *BETWEEN)))
INSTALLED_VLLM, INSTALLED_LMCACHE = "0.32.0", "0.5.6"
LANDING = (ALL_VLLM_VERSIONS[0], INSTALLED_VLLM, ALL_VLLM_VERSIONS[-1])
"""The versions that a change may be tested on before it lands. A test of several leaves the installed one to `full`."""
IN_RELEASE = os.environ.get("UPSTREAM_RELEASE", "")
"""vLLM's version, in a process that has it imported; elsewhere empty: there a module of tests imports nothing of it."""


def on(*versions: str) -> Callable[[Callable[..., None]], Any]:
    """Make a function a test that runs on each of these versions of vLLM. It may ask for its `version`.

    Before a change lands it runs on the oldest and the newest of them, on those between in `scripts/test --full`.
    """
    between = set(versions[1:-1])
    table = [pytest.param(each, marks=[pytest.mark.full] * (each in between)) for each in versions]

    def made(function: Callable[..., None]) -> Any:
        asked = inspect.signature(function)
        version = inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY)
        parameters = [each for each in asked.parameters.values() if each.name != "version"]

        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            where = arguments["version"] if "version" in asked.parameters else arguments.pop("version")
            preloaders().run(where, function.__module__, function.__name__, arguments)

        test.__signature__ = asked.replace(parameters=[*parameters, version])  # type: ignore[attr-defined]
        return pytest.mark.upstream(pytest.mark.parametrize("version", table)(test))

    return made


def all_hold(*cases: Callable[[], None]) -> None:
    """Runs all of them, and shows every one that fails."""
    failed: list[Exception] = []
    for case in cases:
        try:
            case()
        except Exception as error:  # noqa: BLE001 (whatever upstream raises: the other cases run all the same)
            failed.append(error)
            error.add_note(f"in {case.__name__}: {case.__doc__}")
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(cases)}", failed)


def count(patch: str, effect: str) -> float:
    """Return how often a patch has counted it in this process."""
    return effects.totals().get((patch, effect), 0)


def quiet_port() -> int:
    """Return one below those that the kernel gives out: a client that reconnects to a port of that range meets itself
    there sooner or later, and the next server cannot bind it."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port := random.SystemRandom().randrange(20000, 30000)))
            return port


def verdict(patch: Patch) -> str:
    """Of a patch, on the release of this process."""
    from pdserve.installed.distributions import installed
    from pdserve.patches.verdict import judge

    return judge(patch, {**installed(), "vllm": IN_RELEASE}).outcome


def _environment(version: str) -> dict[str, str]:
    path = [str(ROOT)]
    if version != INSTALLED_VLLM:
        path.insert(0, str(source_tree("vllm", version)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "VLLM_"))}
    return {
        **inherited,
        "UPSTREAM_RELEASE": version,
        "PYTHONPATH": os.pathsep.join(path),
        # They share the machine with those of another version; what they compute is small.
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
        # What one version finds out of a model class displaces what another one did.
        "VLLM_CACHE_ROOT": str(CACHE / "of-vllm" / version),
        "LMCACHE_TRACK_USAGE": "false",
    }


class Preloaders:
    """A process for each version of vLLM, all children of one that lives as long as the test run."""

    def __init__(self) -> None:
        self._orders, there = multiprocessing.Pipe()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.upstream.preloaded", str(there.fileno())],
            cwd=ROOT,
            # What is random is the same every time.
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"},
            pass_fds=[there.fileno()],
            stdout=subprocess.DEVNULL,
        )
        there.close()

    def run(self, version: str, module: str, function: str, arguments: Any, timeout: float = 800) -> None:
        """Run a function there. Raises AssertionError with the end of its output."""
        with tempfile.NamedTemporaryFile() as output:
            call = module, function, arguments, output.name
            self._orders.send((version, _environment(version), timeout, *call))
            succeeded: bool | None = self._orders.recv()
            if not succeeded:
                how = "failed" if succeeded is False else f"did not end within {timeout:.0f} s, or its process died"
                text = output.read().decode(errors="replace")
                raise AssertionError(f"{module} {function} on vllm {version} {how}:\n{text[-12000:]}")

    def close(self) -> None:
        """Ends all of them. They end with this process, too."""
        self._orders.close()
        self._popen.wait()


@cache
def preloaders() -> Preloaders:
    """Of this test run. tests/upstream/conftest.py starts and closes it."""
    return Preloaders()
