"""Looks at what the extra `cuda` resolves to, on a machine without a GPU: `python -m tests.upstream.cuda_extra`.

It and the extra `router` are resolved together, from package metadata. What Mooncake's wheel and the kernels at hand
link to is compared with the CUDA runtime that torch brings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tests.upstream.sources import ROOT, pip_setting

CACHE = ROOT / ".cache" / "cuda-extra"
MOONCAKE = "mooncake-transfer-engine"
RUNTIME = "nvidia-cuda-runtime"
_CUDA = re.compile(rb"libcudart\.so\.(\d+)")


def main() -> int:
    """Entry: 0 when Mooncake and all kernels at hand are for the CUDA of torch."""
    packages = _resolved()
    shown = (
        f"{name}=={packages[name]}" for name in packages if name in ("vllm", "lmcache", "torch") or MOONCAKE in name
    )
    print(f"{len(packages)} packages:", *shown)
    problems = list(problems_of(packages))
    for problem in problems:
        print(f"extra cuda: {problem}", file=sys.stderr)
    if not problems:
        print("neither Mooncake of the extra cuda nor a kernel at hand is for another CUDA than torch")
    return 1 if problems else 0


def _resolved() -> dict[str, str]:
    """Name -> version, for the platform of current CUDA wheels and the interpreter that most CUDA images have."""
    target = CACHE.with_suffix(".txt")
    target.parent.mkdir(exist_ok=True)
    argv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "pyproject.toml", "--extra", "cuda", "--extra"]
    argv += ["router", "--python-platform", "x86_64-manylinux_2_31", "--python-version", "3.12"]
    argv += ["--only-binary", ":all:", "--no-header", "--no-annotate", "--quiet", "--output-file", str(target)]
    environ = {"UV_CACHE_DIR": str(CACHE.with_name("uv"))} | os.environ
    # uv knows neither pip's configuration nor its certificates.
    if index := pip_setting("index-url"):
        argv += ["--default-index", index]
    if (cert := pip_setting("cert")) and "SSL_CERT_FILE" not in environ:
        environ["SSL_CERT_FILE"] = cert
    subprocess.run(argv, cwd=ROOT, env=environ, check=True)
    return dict(line.split("==") for line in target.read_text().split() if "==" in line)


def problems_of(packages: Mapping[str, str]) -> Iterator[str]:
    """Return what cannot work of these packages, a line each."""
    [mooncake] = [name for name in packages if name.startswith(MOONCAKE)]
    runtime = packages[RUNTIME].partition(".")[0]
    links = {mooncake: _links_of_wheel(f"{mooncake}=={packages[mooncake]}")}
    links |= {name: _links_of(name, packages[name]) for name in ("lmcache", "nixl-cu13")}
    if not links[mooncake]:
        yield f"{mooncake} links to no CUDA runtime"
    for name, numbers in links.items():
        if other := numbers - {runtime}:
            yield f"{name} links to the CUDA runtime {', '.join(other)}, and torch brings {runtime}"


def _links_of_wheel(requirement: str) -> set[str]:
    """The CUDA runtimes that a wheel's libraries link to. It is fetched once."""
    folder = CACHE / requirement
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(folder), requirement], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = [archive.read(name) for name in archive.namelist() if ".so" in name]
    return {number.decode() for content in files for number in _CUDA.findall(content)}


def _links_of(name: str, version: str) -> set[str]:
    """The CUDA runtimes that the installed distribution links to; none where another version is installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return set()
    if found.version != version:
        return set()
    files = [Path(str(found.locate_file(file))) for file in found.files or () if ".so" in file.name]
    return {number.decode() for file in files for number in _CUDA.findall(file.read_bytes())}


if __name__ == "__main__":
    sys.exit(main())
