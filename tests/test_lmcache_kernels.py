"""Which runtime LMCache's kernels are for, and what follows on ROCm, where the wrong ones mean wrong KV."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.errors import PreflightError
from pdserve.installed import distributions
from pdserve.installed.distributions import lmcache_kernels
from pdserve.launch.start_proofs import without_kernels
from pdserve.plan.model import Plan
from pdserve.preflight import engine_packages
from pdserve.preflight.engine_packages import check_installed
from pdserve.run.directory import RunDir
from tests.tables import each_row
from tests.test_engine_env import ALL, plan, process, recipe

CUDA = b"\x7fELF\0libcudart.so.13\0libc10_cuda.so\0"
HIP = b"\x7fELF\0libamdhip64.so.7\0libc10_hip.so\0"
WARNING = "LMCache WARNING: lmcache.cuda_ops compiled extension not found; CudaDeviceOps stays on the torch baseline"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> Path:
    """Puts an lmcache with these files on the path."""
    package = folder / "site" / "lmcache"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    for name, content in files.items():
        (package / f"{name}.cpython-311-x86_64-linux-gnu.so").write_bytes(content)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(engine_packages, "_kernels", engine_packages._kernels.__wrapped__)
    return package.parent


@each_row("files, expected", [
    ({"cuda_ops": CUDA, "lmcache_native": b"\x7fELF"}, "cuda"),
    ({"cuda_ops": HIP}, "hip"), ({"c_ops": HIP}, "hip"), ({"c_ops": CUDA}, "cuda"),
    ({"lmcache_native": b"\x7fELF"}, "none"), ({"cuda_ops": b"\x7fELF\0libelse.so"}, "unknown"),
])  # fmt: skip
def test_the_runtime_is_what_kernels_link_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], expected: str
) -> None:
    install(tmp_path, monkeypatch, files)
    assert lmcache_kernels() == expected


@pytest.mark.process
def test_another_interpreter_is_asked_with_the_modules_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install(tmp_path, monkeypatch, {"cuda_ops": HIP})
    argv = [sys.executable, "-S", "-c", Path(distributions.__file__).read_text(), "kernels"]
    assert subprocess.check_output(argv, env={"PYTHONPATH": str(site)}, cwd="/", text=True) == '"hip"'


@pytest.mark.real
def test_pypis_wheel_is_one_for_cuda() -> None:
    assert lmcache_kernels() == "cuda"


def on(platform: str) -> Plan:
    return plan(
        process("lmcache-0", "lmcache", "lmcache"),
        process("prefill-0", "prefill", "vllm", "mooncake", "lmcache").model_copy(update={"lmcache": "lmcache-0"}),
        process("decode-0", "decode", "vllm", "mooncake"),
        platform=platform,
    )


@each_row("platform, files, refused", [
    ("rocm", {"cuda_ops": CUDA}, "for CUDA only"), ("rocm", {}, "no compiled kernels"),
    ("rocm", {"cuda_ops": HIP}, None), ("rocm", {"cuda_ops": b"\x7fELF"}, None), ("cpu", {}, None), ("cuda", {}, None),
])  # fmt: skip
def test_rocm_alone_refuses_kernels_without_hip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, files: dict[str, bytes], refused: str | None
) -> None:
    install(tmp_path, monkeypatch, files)
    monkeypatch.setattr(engine_packages, "_check_plugin", lambda python: None)
    monkeypatch.setattr(engine_packages, "_check_libraries", lambda needed: None)
    if refused is None:
        check_installed(ALL, on(platform), recipe())
        return
    with pytest.raises(PreflightError, match=refused) as caught:
        check_installed(ALL, on(platform), recipe())
    assert "-rocm wheel" in str(caught.value.todo)


def run_with(folder: Path, logs: dict[str, str]) -> RunDir:
    run = RunDir(folder)
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    return run


@each_row("line", [
    WARNING,
    "\x1b[33;20m[2026-11-21 12:57:00,1] LMCache WARNING:\x1b[0m lmcache.c_ops compiled extension not found; x",
    "(EngineCore pid=7) LMCache WARNING: Failed to import backend lmcache.c_ops: libcudart.so.13: cannot open",
    "LMCache WARNING: Fallback to python backend lmcache.non_cuda_equivalents",
])  # fmt: skip
@each_row("name", ["lmcache-0", "prefill-0"])
def test_on_rocm_the_warning_that_kernels_are_missing_fails_the_start(tmp_path: Path, name: str, line: str) -> None:
    run = run_with(tmp_path, {"lmcache-0": "INFO x\n", "prefill-0": "INFO y\n", name: f"INFO z\n{line}\nINFO more\n"})
    error = without_kernels(on("rocm"), run)
    assert error is not None
    assert error.where == f"{name}@n"
    assert "wrong KV" in error.what


def test_engines_without_lmcache_and_missing_logs_are_not_looked_at(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"decode-0": f"{WARNING}\n"})
    assert without_kernels(on("rocm"), run) is None
    long = run_with(tmp_path, {"lmcache-0": "INFO nothing to see here\n" * 30_000 + f"{WARNING}\n"})
    assert without_kernels(on("rocm"), long) is not None
    for platform in ("cpu", "cuda"):
        assert without_kernels(on(platform), long) is None, "it is harmless"
