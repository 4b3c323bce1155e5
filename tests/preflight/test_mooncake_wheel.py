"""A Mooncake that cannot be loaded, or cannot copy the memory of the plan's devices, is refused before anything starts.

The engines here are extension modules that a C compiler makes, linked to runtimes of the same kind: the loader of this
machine decides whether they can be loaded.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pdserve.installed.distributions import NON_CUDA_WHEEL
from pdserve.preflight.engine_packages import find_mooncake_wheel
from pdserve.preflight.finding import Finding
from tests.plan.kit import NIXL, hosts, on_gpus, plan, recipe

pytestmark = pytest.mark.process

CUDA_12, CUDA_13 = "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"
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


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def test_a_wheel_for_the_cuda_of_torch_is_loaded(environment: Environment) -> None:
    environment.install(CUDA_13, links="libcudart.so.13")
    environment.install_torch("libcudart.so.13", "13.0")
    [finding] = environment.look("cuda")
    assert (finding.status, finding.check) == ("ok", "versions")
    assert finding.value.endswith("was built for CUDA 13")


@pytest.mark.parametrize(("cuda", "wanted"), [("13.0", CUDA_13), ("12.9", CUDA_12)])
def test_a_wheel_for_another_cuda_than_torch_is_refused_with_the_one_to_install(
    environment: Environment, cuda: str, wanted: str
) -> None:
    """As mooncake-transfer-engine 0.3.13.post1, which needs libcudart.so.12, beside vllm 0.33."""
    environment.install(CUDA_12, links=OTHER)
    environment.install_torch(f"libcudart.so.{cuda[:2]}", cuda)
    [finding] = environment.look("cuda")
    assert finding.status == "failed"
    assert f"{OTHER}: cannot open shared object file" in finding.value
    assert finding.fix == f"pip uninstall -y {CUDA_12}, then pip install {wanted}"
    assert f"built for CUDA 97, and torch brings CUDA {cuda[:2]}" in finding.evidence[0]


def test_another_cuda_whose_runtime_the_host_has_is_a_warning(environment: Environment) -> None:
    environment.install(CUDA_12, links=OTHER)
    environment.install_torch("libcudart.so.13", "13.0")
    changes = {"engine": {"env": {"PYTHONPATH": str(environment.site), "LD_LIBRARY_PATH": str(environment.runtimes)}}}
    [finding] = environment.look("cuda", **changes)
    assert finding.status == "warning"
    assert str(finding.fix).endswith(CUDA_13)


def test_files_of_two_wheels_are_a_warning_that_removes_both(environment: Environment) -> None:
    environment.install(CUDA_12, CUDA_13, links="libcudart.so.13")
    environment.install_torch("libcudart.so.13", "13.0")
    [finding] = environment.look("cuda")
    assert finding.status == "warning"
    assert finding.fix == f"pip uninstall -y {CUDA_12} {CUDA_13}, then pip install {CUDA_13}"


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_the_non_cuda_wheel_is_refused_on_devices(environment: Environment, platform: str) -> None:
    environment.install(NON_CUDA_WHEEL)
    [finding] = environment.look(platform)
    assert (finding.status, finding.check) == ("failed", "versions")
    assert f"was built for no device ({NON_CUDA_WHEEL})" in finding.value
    assert f"the memory of {platform} devices, for prefill-0, decode-0" in finding.need
    assert "over tcp too" in finding.evidence[0]
    assert {"rocm": "-DUSE_HIP=ON", "cuda": f"pip install {CUDA_13}"}[platform] in str(finding.fix)


def test_a_build_for_the_other_vendor_is_refused(environment: Environment) -> None:
    environment.install(CUDA_13, links="libcudart.so.13")
    environment.install_torch("libamdhip64.so.7")
    [finding] = environment.look("rocm")
    assert (finding.status, finding.value.rpartition(" for ")[2]) == ("failed", "CUDA 13")


def test_a_build_for_rocm_is_right_there(environment: Environment) -> None:
    environment.install("mooncake-transfer-engine-rocm", links="libamdhip64.so.7")
    environment.install_torch("libamdhip64.so.7")
    assert [finding.status for finding in environment.look("rocm")] == ["ok"]


@pytest.mark.parametrize(
    ("library", "fix"),
    [
        ("libmlx5.so.98", "ibverbs-providers"),
        ("libcuda.so.98", "--gpus all"),
        ("libelsewhere.so.98", "libelsewhere.so.98"),
    ],
)
def test_a_missing_library_is_named_with_what_has_it(environment: Environment, library: str, fix: str) -> None:
    environment.install(CUDA_13, links=library)
    [finding] = environment.look("cpu")
    assert finding.status == "failed"
    assert library in finding.value
    assert fix in str(finding.fix)


def test_an_engine_of_unknown_origin_is_not_judged(environment: Environment) -> None:
    """It may be linked to the runtime by way of a library of its own."""
    environment.install("mooncake-of-a-site")
    assert environment.look("rocm") == []


def test_one_that_cannot_be_tried_stops_nothing(environment: Environment) -> None:
    environment.install(CUDA_13)
    (environment.site / "mooncake/__init__.py").write_text("raise RuntimeError('no such thing')")
    [finding] = environment.look("cuda")
    assert (finding.status, "no such thing" in finding.value) == ("unknown", True)


def test_what_is_well_on_cpu_other_connectors_and_commands_of_the_recipe_need_no_word(environment: Environment) -> None:
    environment.install(NON_CUDA_WHEEL)
    assert environment.look("cpu") == []
    assert environment.look("rocm", prefill={"connector": NIXL}, decode={"connector": NIXL}) == []
    assert environment.look("rocm", engine={"command": ["serve"]}) == []


def test_no_mooncake_at_all_is_said_by_another_check(environment: Environment) -> None:
    assert environment.look("cuda") == []
