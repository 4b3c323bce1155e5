"""The engines' half of host_events.py."""

from __future__ import annotations

from pdserve.patches.lmcache import host_events as server
from pdserve.patches.lmcache.clients import HOOK, once_loaded
from pdserve.patches.patch import Patch

_NAME = "lmcache-host-events"


def apply() -> None:
    """Wraps two methods of DefaultEventIPCBackend as soon as vLLM has imported LMCache's clients."""
    once_loaded(_NAME, lambda: server.take_hold(_NAME))


PATCH = Patch(
    name=_NAME,
    behaviour="LMCache server",
    summary=(
        "With lmcache_driven each side opens events of the other's process, which never returns on some ROCm stacks: "
        "the engine hangs at its start or at its first reload. Each side waits on the host for its own work instead, "
        "and says that it is done. Costs the overlap of a step that stores with what follows it. Not run on ROCm yet."
    ),
    issue=server.ISSUE,
    targets=(HOOK, *server.TARGETS),
    runs_in=("worker",),
    connectors=frozenset({"LMCacheMPConnector"}),
    platforms=("rocm",),
    settings=frozenset({server.SWITCH}),
    required=True,
    instead=f"leave {server.SWITCH} out of lmcache.env",
    effects={server.AWAITED: "steps and loads whose begin was waited for on the host"},
    remove_when=server.REMOVE_WHEN,
    apply=apply,
)
