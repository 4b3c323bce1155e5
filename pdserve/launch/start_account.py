"""Where the time of a start went: all of it minus what the processes took is our own share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.plan.process import Process
from pdserve.run.state import ProcessState


def shares(
    processes: Iterable[Process], states: Mapping[str, ProcessState], *, total: float, canary: float
) -> dict[str, float]:
    """Seconds by part, as the event `up` has them. `processes`: those that were started.

    Processes of one stage run beside each other, so the slowest counts; commands of the setup run one after the other.
    """
    started = [(process, states[process.name].start_seconds or 0.0) for process in processes]
    setup: dict[int, float] = {}
    for process, seconds in started:
        if process.is_setup:
            setup[process.start_stage] = max(seconds, setup.get(process.start_stage, 0.0))
    weights = max((seconds for process, seconds in started if process.fetches_weights), default=0.0)
    lmcache = max((seconds for process, seconds in started if process.is_lmcache), default=0.0)
    engines = max((seconds for process, seconds in started if process.is_engine), default=0.0)
    prepared = sum(setup.values())
    return {
        "total_seconds": round(total, 3),
        "setup_seconds": round(prepared, 3),
        "weights_seconds": weights,
        "lmcache_seconds": lmcache,
        "engine_seconds": engines,
        "canary_seconds": round(canary, 3),
        "orchestration_seconds": round(total - prepared - weights - lmcache - engines - canary, 3),
    }
