"""Loads what the extra `cuda` resolves to on a machine without a GPU: `python -m tests.upstream.cuda_extra`.

It and the extra `router` are resolved together, from package metadata. Mooncake's wheel and torch's CUDA runtime are
fetched into .cache, and loaded as an engine loads them, by the program that preflight runs. In place of torch itself
there is a module that loads its runtime; in place of the driver a library that has the driver's names.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pdserve.installed import distributions
from pdserve.installed.distributions import MooncakeBuild
from tests.cluster.machine import PackageSet, unpacked
from tests.upstream.sources import ROOT

CACHE = ROOT / ".cache" / "cuda-extra"
MOONCAKE = "mooncake-transfer-engine"
RUNTIME = "nvidia-cuda-runtime"
_CUDA = re.compile(rb"libcudart\.so\.(\d+)")
_DRIVER = re.compile(rb"(?<=\0)cu[A-Z]\w+(?=\0)")


def main() -> int:
    """Entry: 0 when Mooncake is loaded and all kernels at hand are for the CUDA of torch."""
    packages = _resolved()
    shown = (
        f"{name}=={packages[name]}" for name in packages if name in ("vllm", "lmcache", "torch") or MOONCAKE in name
    )
    print(f"{len(packages)} packages:", *shown)
    problems = list(problems_of(packages))
    for problem in problems:
        print(f"extra cuda: {problem}", file=sys.stderr)
    if not problems:
        print("Mooncake of the extra cuda was loaded, and no kernel at hand is for another CUDA than torch")
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
    if index := _setting_of_pip("index-url"):
        argv += ["--default-index", index]
    if (cert := _setting_of_pip("cert")) and "SSL_CERT_FILE" not in environ:
        environ["SSL_CERT_FILE"] = cert
    subprocess.run(argv, cwd=ROOT, env=environ, check=True)
    return dict(line.split("==") for line in target.read_text().split() if "==" in line)


def _setting_of_pip(name: str) -> str:
    if value := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
        return value
    argv = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def problems_of(packages: Mapping[str, str]) -> Iterator[str]:
    """Return what cannot work of these packages, a line each."""
    [mooncake] = [name for name in packages if name.startswith(MOONCAKE)]
    site = _site(f"{mooncake}=={packages[mooncake]}", f"{RUNTIME}=={packages[RUNTIME]}")
    build, error = _loaded(site)
    if build.cuda != build.torch_cuda:
        yield f"{mooncake} is for CUDA {build.cuda}, and torch brings {build.torch_cuda}"
    if error is not None:
        yield f"{mooncake} cannot be loaded: {error}"
    for name in ("lmcache", "nixl-cu13"):
        if other := _links_of(name, packages[name]) - {build.torch_cuda}:
            yield f"{name} links to the CUDA runtime {', '.join(other)}, and torch brings {build.torch_cuda}"


def _site(*requirements: str) -> Path:
    """A folder with these wheels and the stand-ins, made once."""
    site = CACHE / "-".join((*requirements, sys.implementation.cache_tag or ""))
    if site.exists():
        return site
    shutil.rmtree(CACHE, ignore_errors=True)
    wheels, partial = CACHE / "wheels", CACHE / "partial"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(wheels), *requirements], check=True)
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
    [runtime] = partial.glob("nvidia/*/lib/libcudart.so.*")
    number = runtime.name.removeprefix("libcudart.so.")
    torch = partial / "torch"
    torch.mkdir()
    torch.joinpath("version.py").write_text(f"cuda = '{number}.0'\n")
    load = f"ctypes.CDLL({str(site / runtime.relative_to(partial))!r}, mode=ctypes.RTLD_GLOBAL)"
    torch.joinpath("__init__.py").write_text(f"import ctypes\n\n{load}\n")
    _make_driver(partial)
    shutil.rmtree(wheels)
    partial.rename(site)
    return site


def _make_driver(site: Path) -> None:
    """A libcuda.so.1 with the names that Mooncake's engine looks for."""
    names = {name.decode() for file in site.glob("mooncake/*.so") for name in _DRIVER.findall(file.read_bytes())}
    source = "".join(f"void {name}(void) {{}}\n" for name in sorted(names))
    target = site / "driver" / "libcuda.so.1"
    target.parent.mkdir()
    make = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-o", str(target), "-"]
    subprocess.run(make, input=source, text=True, check=True)


def _loaded(site: Path) -> tuple[MooncakeBuild, str | None]:
    """Return what was found there, and why it cannot be loaded."""
    folders = [str(site / "driver"), *_adapters()]
    environ = os.environ | {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": ":".join(folders)}
    source = Path(distributions.__file__).read_text(encoding="utf-8")
    asked = subprocess.run(
        [sys.executable, "-c", source, "mooncake"], env=environ, capture_output=True, text=True, check=True
    )
    answer = json.loads(asked.stdout)
    return MooncakeBuild(**answer["build"]), answer["error"]


def _adapters() -> list[str]:
    """Where the library of Mellanox adapters is that Mooncake's wheels for CUDA link to, if this machine lacks it."""
    try:
        ctypes.CDLL("libmlx5.so.1")
    except OSError:
        root = unpacked(CACHE.with_name("adapters"), PackageSet(("ibverbs-providers",), programs=()))
        return [str(file.parent) for file in root.glob("usr/lib/**/libmlx5.so.1")]
    return []


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
