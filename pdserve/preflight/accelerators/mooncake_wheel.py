"""Whether the Mooncake of the engines can be loaded where they run, and can copy the memory of the plan's devices.

vLLM hides the import that fails: its engines end with "Mooncake is not available".
"""

from __future__ import annotations

import os
from collections.abc import Collection

from pdserve.installed import mooncake_build
from pdserve.installed.mooncake_build import CUDA, NON_CUDA, Build, wheel_for
from pdserve.logs.causes import explain
from pdserve.node.supervised import environment
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding, Status
from pdserve.system.interpreter import NoAnswerError, ask_interpreter

_ASK_SECONDS = 120.0
"""It imports torch, perhaps from a network file system."""
_RUNTIMES = {"rocm": "hip", "cuda": "cuda"}
_NAMES = {"hip": "ROCm", "none": f"no device ({NON_CUDA})"}
ONLY_ITS_RUNTIME = (
    "Mooncake copies device memory, over tcp too, only through the runtime that it was compiled for (USE_CUDA, USE_HIP)"
)
_TWO_OWNERS = "the one that was installed last has overwritten the files of the other, which gives the version"


def find_mooncake_wheel(plan: Plan, node: str, starting: Collection[Process]) -> list[Finding]:
    """One finding for each interpreter whose engines use Mooncake; on CPU only where something is wrong. Of a process
    whose command is the recipe's own nothing is said."""
    users: dict[str, list[Process]] = {}
    for process in starting:
        if process.is_engine and "mooncake" in process.packages:
            users.setdefault(process.argv[0], []).append(process)
    found = (_look(plan.platform, node, python, processes) for python, processes in users.items())
    return [finding for finding in found if finding is not None]


def replacement(platform: str, build: Build | None = None) -> str:
    """How to come to a Mooncake that copies the memory of the platform's devices."""
    if platform == "rocm":
        return "install a Mooncake that was built for ROCm (cmake -DUSE_HIP=ON) in its place, or use connector nixl"
    wanted = NON_CUDA if platform == "cpu" else wheel_for((build and build.torch_cuda) or CUDA)
    # All of them: the one that is uninstalled takes along files that the others have too.
    there = " ".join(build.distributions) if build is not None else NON_CUDA
    return f"pip uninstall -y {there}, then pip install {wanted}" if there else f"pip install {wanted}"


def _look(platform: str, node: str, python: str, processes: list[Process]) -> Finding | None:
    names = ", ".join(process.name for process in processes)
    need = f"one that copies the memory of {platform} devices, for {names}"
    if platform == "cpu":
        need = f"one that can be loaded, for {names}"

    def finding(status: Status, value: str, fix: str | None = None, *evidence: str) -> Finding:
        what = f"the Mooncake of {python} {value}"
        return Finding(node=node, check="versions", status=status, value=what, need=need, fix=fix, evidence=evidence)

    try:
        environ = environment(processes[0].env, os.environ, {})
        answer = ask_interpreter(python, mooncake_build, timeout=_ASK_SECONDS, environ=environ)
    except NoAnswerError as why:
        return finding("unknown", f"could not be tried: {why}")
    if answer is None:
        return None
    build, error = Build(**answer["build"]), answer["error"]
    built_for = f"was built for {_NAMES.get(build.device) or f'CUDA {build.cuda}'}"
    replace = replacement(platform, build)
    if platform in _RUNTIMES and build.device not in ("unknown", _RUNTIMES[platform]):
        return finding("failed", built_for, replace, f"likely cause: {ONLY_ITS_RUNTIME}")
    if error is not None:
        return finding("failed", f"cannot be loaded: {error}", *_why_not_loaded(error, build, replace))
    if build.cuda is not None and build.torch_cuda not in (None, build.cuda):
        value = f"{built_for}, and torch brings CUDA {build.torch_cuda}: it loads by a runtime of this host"
        return finding("warning", value, replace)
    if len(build.distributions) > 1:
        return finding("warning", f"is of several wheels, {' and '.join(build.distributions)}: {_TWO_OWNERS}", replace)
    return finding("ok", built_for) if platform in _RUNTIMES and build.device != "unknown" else None


def _why_not_loaded(error: str, build: Build, replace: str) -> tuple[str, ...]:
    """The fix, and the evidence."""
    if build.cuda is not None and f"libcudart.so.{build.cuda}" in error:
        brings = f"CUDA {build.torch_cuda}" if build.torch_cuda is not None else "no CUDA"
        return replace, f"likely cause: it was built for CUDA {build.cuda}, and torch brings {brings}"
    hint = explain([error], exit_code=None, role="")
    if hint is None:
        return ("python -c 'import torch, mooncake.engine' shows the whole error",)
    return hint.todo, f"likely cause: {hint.cause}"
