"""A Mooncake that cannot copy the memory of the plan's devices is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from pdserve.installed import mooncake_build
from pdserve.preflight.accelerators import device_copies
from pdserve.preflight.accelerators.device_copies import find_device_copies
from pdserve.preflight.finding import Finding
from tests.plan.kit import NIXL, hosts, on_gpus, plan, recipe

CUDA = b"\x7fELF\0libcudart.so.13\0"
HIP = b"\x7fELF\0libamdhip64.so.7\0"
Install = Callable[..., None]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    device_copies.compiled_for.cache_clear()
    yield
    device_copies.compiled_for.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a mooncake with this engine on the path, as if its distribution were of that name."""

    def install(engine: bytes, distribution: str = mooncake_build.NON_CUDA) -> None:
        package = tmp_path / "mooncake"
        package.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('imported')")
        (package / "engine.cpython-311-x86_64-linux-gnu.so").write_bytes(engine)
        about = tmp_path / f"{distribution.replace('-', '_')}-0.3.13.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {distribution}\nVersion: 0.3.13\n")
        others = [folder for folder in sys.path if "site-packages" not in folder]
        monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
        monkeypatch.delitem(sys.modules, "mooncake", raising=False)

    return install


def look(platform: str, **changes: object) -> list[Finding]:
    wanted = plan(recipe(on_gpus(platform=platform), changes), *hosts(2), python=sys.executable)
    return find_device_copies(wanted, "host0", wanted.processes)


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_the_non_cuda_wheel_is_refused_on_devices(installed: Install, platform: str) -> None:
    installed(b"\x7fELF\0libibverbs.so.1\0")
    [finding] = look(platform)
    assert (finding.status, finding.check) == ("failed", "versions")
    assert "was built for no device (mooncake-transfer-engine-non-cuda)" in finding.value
    assert f"the memory of {platform} devices, for prefill-0, decode-0" in finding.need
    assert "over tcp too" in finding.evidence[0]
    assert {"rocm": "-DUSE_HIP=ON", "cuda": "pip install mooncake-transfer-engine"}[platform] in str(finding.fix)


def test_a_build_for_the_other_vendor_is_refused(installed: Install) -> None:
    installed(CUDA, "mooncake-transfer-engine")
    [finding] = look("rocm")
    assert (finding.status, finding.value.rpartition(" ")[2]) == ("failed", "CUDA")
    assert [finding.status for finding in look("cuda")] == ["ok"]


def test_a_build_for_the_device_is_right(installed: Install) -> None:
    installed(HIP, "mooncake-transfer-engine-rocm")
    assert [finding.status for finding in look("rocm")] == ["ok"]


def test_an_engine_of_unknown_origin_is_not_judged(installed: Install) -> None:
    """It may be linked to the runtime by way of a library of its own."""
    installed(b"\x7fELF\0libtransfer_engine.so\0", "mooncake-of-a-site")
    assert mooncake_build.compiled_for() == "unknown"
    assert look("rocm") == []


def test_cpu_other_connectors_and_commands_of_the_recipe_are_left_alone(installed: Install) -> None:
    installed(b"\x7fELF")
    cpu = plan(recipe(), python=sys.executable)
    assert find_device_copies(cpu, "localhost", cpu.processes) == []
    assert look("rocm", prefill={"connector": NIXL}, decode={"connector": NIXL}) == []
    assert look("rocm", engine={"command": ["serve"]}) == []


@pytest.mark.process
def test_the_wheel_of_this_environment_knows_no_device() -> None:
    """Asked as another interpreter is: the source alone, run by it."""
    version(mooncake_build.NON_CUDA)
    source = Path(mooncake_build.__file__).read_text()
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == '"none"'
