"""What the installed Mooncake was built for, by what its engine links to, and whether it can be loaded.

Standard library only, because its source is also run by interpreters that do not have pdserve (`PYTHON -c`): it
prints the answer as JSON then.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

_NAME = "mooncake-transfer-engine"
NON_CUDA = f"{_NAME}-non-cuda"
CUDA = "13"
"""The major version of the CUDA that the torch of vllm 0.26 and newer brings."""
_ENGINE = "engine*.so"
_CUDA = re.compile(rb"libcudart\.so\.(\d+)")
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """The Mooncake of an environment."""

    device: str
    """hip, cuda; none: the wheel that knows no device; unknown: an engine of another origin that links to neither, and
    may do so by a library of its own."""
    cuda: str | None
    """The major version of the CUDA runtime that its engine links to."""
    torch_cuda: str | None
    """That of the runtime which torch brings. None: torch is not installed, or not for CUDA."""
    distributions: tuple[str, ...]
    """Those that own its files. Of several, the one that was installed last has written them."""


def wheel_for(cuda: str) -> str:
    """The distribution that is built for that major version of CUDA."""
    return _NAME if cuda == "12" else f"{_NAME}-cuda{cuda}"


def find_build() -> Build | None:
    """Read its files; nothing is imported. None: Mooncake is not installed, or not where it is looked for."""
    contents = [file.read_bytes() for folder in _folders("mooncake") for file in sorted(folder.glob(_ENGINE))]
    if not contents:
        return None
    cuda = next((found[1].decode() for content in contents if (found := _CUDA.search(content))), None)
    names = {name.lower().replace("_", "-") for each in distributions() if (name := each.metadata["Name"])}
    owners = tuple(sorted(name for name in names if name.startswith(_NAME)))
    if any(b"libamdhip64" in content for content in contents):
        device = "hip"
    elif any(b"libcudart" in content for content in contents):
        device = "cuda"
    else:
        device = "none" if NON_CUDA in owners else "unknown"
    return Build(device, cuda, _torch_cuda(), owners)


def loading_error(build: Build) -> str | None:
    """Import it as an engine does, behind torch, whose wheel brings the device's runtime. None: that works."""
    try:
        if build.device in ("hip", "cuda"):
            import_module("torch")
        import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _torch_cuda() -> str | None:
    for folder in _folders("torch"):
        file = folder / "version.py"
        if file.exists() and (found := _TORCH_CUDA.search(file.read_text(encoding="utf-8"))):
            return found[1]
    return None


def _folders(package: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        yield Path(folder)


if __name__ == "__main__":
    build = find_build()
    print(json.dumps(None if build is None else {"build": asdict(build), "error": loading_error(build)}))
