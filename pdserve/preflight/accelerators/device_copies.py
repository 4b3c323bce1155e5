"""Whether the Mooncake of the engines can copy the memory of the plan's devices."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection
from pathlib import Path

from pdserve.installed import mooncake_build
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding
from pdserve.system.process import output_of

_ASK_SECONDS = 30.0
_RUNTIMES = {"rocm": "hip", "cuda": "cuda"}
_NAMES = {"hip": "ROCm", "cuda": "CUDA", "none": f"no device ({mooncake_build.NON_CUDA})"}
REPLACE = {
    "rocm": "install a Mooncake that was built for ROCm (cmake -DUSE_HIP=ON) in its place, or use connector nixl",
    "cuda": f"pip uninstall {mooncake_build.NON_CUDA}, then pip install mooncake-transfer-engine",
}
"""Platform -> how to come to a Mooncake that copies the memory of its devices."""
ONLY_ITS_RUNTIME = (
    "Mooncake copies device memory, over tcp too, only through the runtime that it was compiled for (USE_CUDA, USE_HIP)"
)


def find_device_copies(plan: Plan, node: str, starting: Collection[Process]) -> list[Finding]:
    """One finding for each interpreter whose engines use Mooncake; nothing on CPU. Of a process whose command is the
    recipe's own, and of an engine whose origin is not known, nothing is said."""
    runtime = _RUNTIMES.get(plan.platform)
    if runtime is None:
        return []
    users: dict[str, list[str]] = {}
    for process in starting:
        if process.is_engine and "mooncake" in process.packages:
            users.setdefault(process.argv[0], []).append(process.name)
    answers = {python: compiled_for(python) for python in users}
    return [
        _judge(plan.platform, node, python, users[python], built, right=built == runtime)
        for python, built in answers.items()
        if built is not None and built in _NAMES
    ]


@functools.cache
def compiled_for(python: str) -> str | None:
    """As `mooncake_build.compiled_for` answers in that interpreter; None also where it does not answer."""
    if python == sys.executable:
        return mooncake_build.compiled_for()
    source = Path(mooncake_build.__file__).read_text(encoding="utf-8")
    # -c puts the current folder on its path.
    asked = output_of([python, "-c", source], timeout=_ASK_SECONDS, cwd=Path("/"))
    try:
        answer: str | None = json.loads(asked.out)
    except json.JSONDecodeError:
        return None
    return answer


def _judge(platform: str, node: str, python: str, names: list[str], built: str, *, right: bool) -> Finding:
    return Finding(
        node=node,
        check="versions",
        status="ok" if right else "failed",
        value=f"the Mooncake of {python} was built for {_NAMES[built]}",
        need=f"one that copies the memory of {platform} devices, for {', '.join(names)}",
        fix=None if right else REPLACE[platform],
        evidence=() if right else (f"likely cause: {ONLY_ITS_RUNTIME}",),
    )
