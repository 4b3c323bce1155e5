"""Which runtime the kernels of the installed LMCache were compiled for, by its files: nothing is imported.

Standard library only, because its source is also run by interpreters that do not have pdserve (`PYTHON -c`): it
prints the answer as JSON then.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

_LIBRARIES = {"hip": (b"libamdhip64", b"libc10_hip", b"libtorch_hip"), "cuda": (b"libcudart", b"libc10_cuda")}
_EXTENSIONS = ("cuda_ops*.so", "c_ops*.so")
"""Since 0.5.4, and before."""


def compiled_for() -> str | None:
    """hip, cuda; none: it has no kernels; unknown: some that link to neither; None: LMCache is not installed.

    A wheel for ROCm has the same file names as one for CUDA: what they link to is the difference.
    """
    spec = importlib.util.find_spec("lmcache")
    if spec is None or not spec.submodule_search_locations:
        return None
    files = [
        file
        for folder in spec.submodule_search_locations
        for pattern in _EXTENSIONS
        for file in sorted(Path(folder).glob(pattern))
    ]
    if not files:
        return "none"
    for runtime, names in _LIBRARIES.items():
        for file in files:
            content = file.read_bytes()
            if any(name in content for name in names):
                return runtime
    return "unknown"


if __name__ == "__main__":
    json.dump(compiled_for(), sys.stdout)
