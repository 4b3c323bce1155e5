"""Which devices the installed Mooncake can copy memory of, by what its engine links to: nothing is imported.

Standard library only, because its source is also run by interpreters that do not have pdserve (`PYTHON -c`): it
prints the answer as JSON then.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NON_CUDA = "mooncake-transfer-engine-non-cuda"
_LIBRARIES = {"hip": b"libamdhip64", "cuda": b"libcudart"}
_ENGINE = "engine*.so"


def compiled_for() -> str | None:
    """hip, cuda; none: the wheel that knows no device; unknown: an engine of another origin that links to neither, and
    may do so by a library of its own; None: Mooncake is not installed, or not where it is looked for.

    Of 0.3.13.post1 the engine of mooncake-transfer-engine links to libcudart, that of the non-CUDA wheel to neither.
    """
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return None
    files = [file for folder in spec.submodule_search_locations for file in sorted(Path(folder).glob(_ENGINE))]
    if not files:
        return None
    contents = [file.read_bytes() for file in files]
    for runtime, library in _LIBRARIES.items():
        if any(library in content for content in contents):
            return runtime
    return "none" if _installed(NON_CUDA) else "unknown"


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    json.dump(compiled_for(), sys.stdout)
