"""Debian's Prometheus and promtool, unpacked into .cache/prometheus and not installed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.cluster.machine import CACHE, PackageSet, unpacked

_PACKAGE = PackageSet(("prometheus",), programs=("bin/prometheus", "bin/promtool"))
_SECONDS = 600


def program(name: str) -> str:
    """The path of a program of the package. Raises LabError without a route to a mirror."""
    return str(unpacked(CACHE.parent / "prometheus", _PACKAGE) / "usr" / "bin" / name)


def promtool(*arguments: str | Path) -> str:
    """What promtool prints. AssertionError, with that, unless it is content."""
    ended = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=_SECONDS
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@contextmanager
def running(config: Path, port: int) -> Iterator[httpx.Client]:
    """A Prometheus with this configuration, on a port of loopback: a client of its HTTP API."""
    data = config.with_name("data")
    argv = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={data}"]
    with (
        subprocess.Popen(
            [*argv, f"--web.listen-address=127.0.0.1:{port}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False) as client,
    ):
        try:
            yield client
        finally:
            server.kill()
