"""The check of an image, by what is installed in it: `python -m pdserve.installed.image_check PLATFORM`.

The last step of containers/*.Dockerfile. `pdserve preflight` checks the same for a recipe, on the nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires
from importlib.metadata import version as installed_version

from packaging.requirements import Requirement

from pdserve.installed import proxy_build
from pdserve.installed.distributions import (
    DISTRIBUTIONS,
    find_mooncake_build,
    installed,
    lmcache_kernels,
    mooncake_wheel_for,
    version_of,
)

_OF_ONE_CONNECTOR = ("nixl", "mori")
"""Parts that only a recipe with that connector needs: preflight asks for them."""
_PLUGINS = "vllm.general_plugins"
KERNELS: Mapping[str, tuple[str | None, ...]] = {
    "cpu": ("none", "cuda", "unknown"),
    "cuda": ("cuda",),
    "rocm": ("hip",),
}
"""Platform -> what LMCache may be compiled for. On a CPU no kernel of it runs."""
MOONCAKE: Mapping[str, tuple[str, ...]] = {
    "cpu": DISTRIBUTIONS["mooncake"],
    "cuda": tuple(name for name in DISTRIBUTIONS["mooncake"] if "non-cuda" not in name and "rocm" not in name),
    "rocm": ("mooncake-transfer-engine-rocm",),
}
"""Platform -> wheels of Mooncake that can copy the memory of its devices."""


def find_shortcomings(platform: str) -> Iterator[str]:
    """Say what is missing or made for another platform, a line each."""
    for part, version in installed().items():
        if version is None and part not in _OF_ONE_CONNECTOR:
            yield f"{part} is not installed"
    kernels = lmcache_kernels()
    if kernels is not None and kernels not in KERNELS[platform]:
        yield f"the kernels of LMCache are for {kernels}, and {platform} needs {KERNELS[platform][0]}"
    wheels = [name for name in DISTRIBUTIONS["mooncake"] if version_of(name) is not None]
    if wheels and not set(wheels) & set(MOONCAKE[platform]):
        yield f"{', '.join(wheels)} cannot copy memory of {platform} devices: install {' or '.join(MOONCAKE[platform])}"
    if len(wheels) > 1:
        yield f"{' and '.join(wheels)} have the same files: uninstall both, then install the right one"
    yield from _other_cuda(platform)
    if not any(entry.name == "pdserve" for entry in entry_points(group=_PLUGINS)):
        yield f"vLLM does not find pdserve's plugin ({_PLUGINS}): pdserve must be installed, not only mounted"
    yield from _not_satisfied()
    if proxy_build() != "compiled":
        yield "the proxy is not compiled: a C compiler and Python's headers were missing (PDSERVE_COMPILE=1 shows it)"
    if platform == "cpu":  # elsewhere an import wants the driver of a device
        yield from _not_imported("vllm", "lmcache", "mooncake.engine")


def _other_cuda(platform: str) -> Iterator[str]:
    """Compare by numbers alone: where images are built there is no driver, without which it cannot be loaded."""
    build = find_mooncake_build() if platform == "cuda" else None
    if build is not None and build.cuda is not None and build.torch_cuda not in (None, build.cuda):
        yield (
            f"{', '.join(build.distributions)} was built for CUDA {build.cuda}, and torch brings CUDA "
            f"{build.torch_cuda}: install {mooncake_wheel_for(build.torch_cuda)} in its place"
        )


def _not_satisfied() -> Iterator[str]:
    """Find requirements of pdserve itself: an installation without them would fail only once its proxy starts."""
    try:
        texts = requires("pdserve") or []
    except PackageNotFoundError:
        return  # that it is not installed is said by the plugin that is missing
    for requirement in map(Requirement, texts):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = installed_version(requirement.name)
        except PackageNotFoundError:
            yield f"{requirement.name} is not installed, and pdserve needs it"
        else:
            if not requirement.specifier.contains(found, prereleases=True):
                yield f"{requirement.name} is {found}, and pdserve needs {requirement.specifier}"


def _not_imported(*modules: str) -> Iterator[str]:
    for module in modules:
        try:
            import_module(module)
        except (ImportError, OSError) as error:
            yield f"{module} cannot be imported: {error}"


def main() -> int:
    """Return 0 when nothing is missing."""
    if len(sys.argv) != 2 or sys.argv[1] not in KERNELS:
        print(f"usage: python -m pdserve.installed.image_check {'|'.join(KERNELS)}", file=sys.stderr)
        return 2
    problems = list(find_shortcomings(sys.argv[1]))
    for problem in problems:
        print(f"image: {problem}", file=sys.stderr)
    if not problems:
        print(", ".join(f"{part} {version}" for part, version in installed().items() if version is not None))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
