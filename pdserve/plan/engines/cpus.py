"""Which of its node's CPUs an engine gets on the CPU platform.

Engines that share CPUs stand in each other's way: a vLLM worker waits for its next step by yielding its CPU again and
again, and whoever is to give it that step waits behind it. With two engines on two cores a request of 256 tokens took
0.27 s in the median and 9 s at worst; with a core for each, 0.1 s and 0.15 s.
"""

from __future__ import annotations

from pdserve.plan.model import Plan
from pdserve.plan.process import Process

_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_IN_ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""0: a single worker lives in its EngineCore, and nothing reads the setting above (vLLM 0.32, multiproc_executor)."""
_LEFT_TO_US = ("nobind", "auto")
"""Values of vLLM's own setting that name no CPUs. `auto` takes all that the engine may use: its part."""


def cpu_share(plan: Plan, name: str) -> tuple[int, int] | None:
    """(i, n): a process may use the i-th of n equal parts of its node's CPUs; None: all. No part of `Process`: another
    engine beside one that runs changes what both get at their next start, and is no reason to start that one anew."""
    node = plan.process(name).node
    engines = [process for process in plan.processes if process.ranks is not None and process.node == node]
    bound = any(map(_is_bound, engines))
    names = [engine.name for engine in engines]
    if plan.platform != "cpu" or bound or len(names) < 2 or name not in names:
        return None
    return names.index(name), len(names)


def _is_bound(engine: Process) -> bool:
    """Whether vLLM binds its workers to CPUs that the recipe names."""
    single = engine.ranks is not None and engine.ranks.workers == engine.ranks.cores
    if single and engine.env.set.get(_IN_ONE_PROCESS) == "0":
        return False
    return engine.env.set.get(_BINDING, "auto") not in _LEFT_TO_US
