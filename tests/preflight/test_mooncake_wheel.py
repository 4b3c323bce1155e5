"""A Mooncake that cannot be loaded, or cannot copy the memory of the plan's devices, is refused before anything starts.

The engines here are extension modules that a C compiler makes, linked to runtimes of the same kind: the loader of this
machine decides whether they can be loaded.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

from pdserve.installed.distributions import NON_CUDA_WHEEL
from pdserve.preflight.engine_packages import find_mooncake_wheel
from pdserve.preflight.finding import Finding
from tests.plan.kit import NIXL, hosts, on_gpus, plan, recipe
from tests.tables import each_row

pytestmark = pytest.mark.process

CUDA_12, CUDA_13 = "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"
ROCM = "mooncake-transfer-engine-rocm"
OTHER = "libcudart.so.97"
"""A runtime that no machine has."""
MODULE = """#include <Python.h>
static struct PyModuleDef about = {PyModuleDef_HEAD_INIT, "engine"};
PyMODINIT_FUNC PyInit_engine(void) { return PyModule_Create(&about); }
"""


class Environment:
    """An interpreter that sees nothing but what a test installs."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.runtimes = folder / "runtimes"
        for each in (self.site, self.runtimes):
            each.mkdir()
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        self.python.chmod(0o755)

    def install(self, *wheels: str, links: str | None = None) -> None:
        """Mooncake, as if it were of these distributions, with an engine that links to such a library."""
        self._compile(self._package("mooncake") / "engine.so", MODULE, self._runtime(links) if links else ())
        for name in wheels:
            about = self.site / f"{name.replace('-', '_')}-0.3.14.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 0.3.14\n")

    def install_torch(self, runtime: str | None, cuda: str | None = None) -> None:
        """A torch that brings a runtime, and loads it when it is imported."""
        torch = self._package("torch")
        (torch / "version.py").write_text(f"cuda: str | None = {cuda!r}\n")
        if runtime is not None:
            self._runtime(runtime)
            load = f"ctypes.CDLL({str(self.runtimes / runtime)!r}, mode=ctypes.RTLD_GLOBAL)"
            (torch / "__init__.py").write_text(f"import ctypes\n\n{load}\n")

    def look(self, platform: str, **changes: object) -> list[Finding]:
        """What preflight says, for one prefill and one decode."""
        sees = {"engine": {"env": {"PYTHONPATH": str(self.site)}}}
        where = () if platform == "cpu" else (on_gpus(platform=platform),)
        nodes = () if platform == "cpu" else hosts(2)
        wanted = plan(recipe(*where, sees, changes), *nodes, python=str(self.python))
        return find_mooncake_wheel(wanted, "host0", wanted.processes)

    def _package(self, name: str) -> Path:
        package = self.site / name
        package.mkdir()
        (package / "__init__.py").touch()
        return package

    def _runtime(self, name: str) -> tuple[str, ...]:
        if not (self.runtimes / name).exists():
            self._compile(self.runtimes / name, "", (f"-Wl,-soname,{name}",))
        return ("-Wl,--no-as-needed", f"-L{self.runtimes}", f"-l:{name}")

    @staticmethod
    def _compile(target: Path, source: str, options: tuple[str, ...]) -> None:
        headers = f"-I{sysconfig.get_path('include')}"
        argv = ["cc", "-shared", "-fPIC", headers, "-x", "c", "-o", str(target), "-", "-x", "none", *options]
        subprocess.run(argv, input=source, text=True, check=True)


ANOTHER_CUDA = "built for CUDA 97, and torch brings CUDA"


class Case(NamedTuple):
    """What is installed, and what preflight says of it."""

    platform: str
    status: str | None
    words: tuple[str, ...] = ()
    wheels: tuple[str, ...] = (CUDA_13,)
    links: str | None = "libcudart.so.13"
    torch: tuple[str, str | None] | None = ("libcudart.so.13", "13.0")
    """The runtime that torch brings, and its CUDA."""
    all_runtimes: bool = False
    """The host has every runtime itself."""


REPLACED = f"pip uninstall -y {CUDA_12}, then pip install {CUDA_13}"
NO_DEVICE = (f"no device ({NON_CUDA_WHEEL})", "over tcp too")
CASES = (
    Case("cuda", "ok", ("was built for CUDA 13",)),
    # mooncake-transfer-engine 0.3.13.post1 needs libcudart.so.12, beside vllm 0.33.
    Case("cuda", "failed", (f"{OTHER}: cannot open", REPLACED, f"{ANOTHER_CUDA} 13"), (CUDA_12,), OTHER),
    Case("cuda", "failed", (f"{ANOTHER_CUDA} 12",), (CUDA_12,), OTHER, ("libcudart.so.12", "12.9")),
    Case("cuda", "warning", ("by a runtime of this host", CUDA_13), (CUDA_12,), OTHER, all_runtimes=True),
    Case("cuda", "warning", ("is of several wheels", f"pip uninstall -y {CUDA_12} {CUDA_13}"), (CUDA_12, CUDA_13)),
    Case("rocm", "failed", (*NO_DEVICE, "-DUSE_HIP=ON"), (NON_CUDA_WHEEL,), None, None),
    Case("cuda", "failed", (*NO_DEVICE, CUDA_13), (NON_CUDA_WHEEL,), None, None),
    Case("rocm", "failed", ("CUDA 13",), torch=("libamdhip64.so.7", None)),
    Case("rocm", "ok", (), (ROCM,), "libamdhip64.so.7", ("libamdhip64.so.7", None)),
    Case("cpu", "failed", ("libmlx5.so.98", "ibverbs-providers"), links="libmlx5.so.98", torch=None),
    Case("cpu", "failed", ("libcuda.so.98", "--gpus all"), links="libcuda.so.98", torch=None),
    # One of another origin may be linked to the runtime by way of a library of its own.
    Case("rocm", None, (), ("mooncake-of-a-site",), None, None),
    Case("cpu", None, (), (NON_CUDA_WHEEL,), None, None),
)


@each_row("case", CASES)
def test_what_is_installed_must_load_and_copy_the_memory_of_the_devices(tmp_path: Path, case: Case) -> None:
    environment = Environment(tmp_path)
    environment.install(*case.wheels, links=case.links)
    if case.torch is not None:
        environment.install_torch(*case.torch)
    more = {"LD_LIBRARY_PATH": str(environment.runtimes)} if case.all_runtimes else {}
    found = environment.look(case.platform, engine={"env": {"PYTHONPATH": str(environment.site), **more}})
    assert [finding.status for finding in found] == ([] if case.status is None else [case.status])
    for finding in found:
        assert finding.check == "versions"
        assert all(word in f"{finding.line()} {finding.evidence}" for word in case.words), finding


def test_one_that_cannot_be_tried_stops_nothing(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    assert environment.look("cuda") == [], "no Mooncake at all is said by another check"
    environment.install(CUDA_13)
    (environment.site / "mooncake/__init__.py").write_text("raise RuntimeError('no such thing')")
    [finding] = environment.look("cuda")
    assert (finding.status, "no such thing" in finding.value) == ("unknown", True)


def test_other_connectors_and_commands_of_the_recipe_need_no_word(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.install(NON_CUDA_WHEEL)
    assert environment.look("rocm", prefill={"connector": NIXL}, decode={"connector": NIXL}) == []
    assert environment.look("rocm", engine={"command": ["serve"]}) == []
