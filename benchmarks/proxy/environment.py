"""Where a run took place, as far as it bears on the numbers. No names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.proxy.pdserve_settings import FEATURES
from benchmarks.proxy.results import FOREIGN_LIMIT
from benchmarks.proxy.scenarios import Size
from benchmarks.proxy.systems import Cores, is_compiled

PACKAGES = ("pdserve", "vllm-router", "fastapi", "uvicorn", "httpx", "uvloop", "httptools", "msgspec")


def describe_machine(kind: str, size: Size, cores: Cores) -> dict[str, Any]:
    return {
        "size": kind,
        **asdict(size),
        "foreign_limit": FOREIGN_LIMIT,
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "cores": asdict(cores),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "pdserve_features": list(FEATURES),
        "pdserve_compiled": is_compiled(),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
