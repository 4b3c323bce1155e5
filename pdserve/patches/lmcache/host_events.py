"""LMCache's two sides must be able to wait for each other without opening an event of another process.

In the mode lmcache_driven each side sends the other a handle of a device event, and the other makes its own stream wait
for that event. On some ROCm stacks opening such a handle never returns (in HIP, below PyTorch), and the engine hangs.

With this patch a side waits itself, on the host, for the work that it would have sent an event of, and sends a mark
that says so. The other side has nothing to open and nothing to wait for. That is the same order, without the overlap:
an engine waits for the end of a step that stores, a server for each copy. The patch that was proposed upstream instead
answers a handle with an event that is complete already, and the server then copies KV that is not written yet.

There is a patch for the server's half and one for the engines'; both are asked for by one switch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.lmcache.clients import HOOK, once_loaded
from pdserve.patches.patch import Patch, PatchTarget, wrap

SWITCH = "LMCACHE_ROCM_HOST_EVENTS"
"""1 in `lmcache.env` asks for both halves."""
MARK = b"pdserve: complete"
"""In place of a handle. No device's handle has this length (HIP and CUDA: 64 bytes)."""
AWAITED = "transfers-awaited"
"""What it counts."""
_SERVER_NAME = "lmcache-host-events-server"
_BACKEND = "lmcache.v1.platform.base.event_ipc.DefaultEventIPCBackend"


class CompletedEvent:
    """An event of the other side that has happened."""

    def wait(self, _stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


def _apply_server() -> None:
    """Wraps two methods of DefaultEventIPCBackend."""
    take_hold(_SERVER_NAME)


def take_hold(patch: str) -> None:
    """Wrap the methods, in either process. `patch`: under whose name."""
    from lmcache.v1.platform.base.event_ipc import DefaultEventIPCBackend

    wrap(DefaultEventIPCBackend, "export_event", patch=patch, around=lambda original: _awaiting(original, patch))
    wrap(DefaultEventIPCBackend, "import_event", patch=patch, around=_opening_nothing)


def _awaiting(_original: Callable[..., bytes], patch: str) -> Callable[..., bytes]:
    """Wait for the event instead of sending its handle. The original is not called: it makes the handle that must not
    be opened."""

    def export_event(self: Any, event: Any, device: Any) -> bytes:
        self.synchronize_event(event, device)
        effects.count(patch, AWAITED)
        return MARK

    return export_event


def _opening_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    def import_event(self: Any, handle: bytes, device: Any) -> Any:
        return CompletedEvent() if handle == MARK else original(self, handle, device)

    return import_event


TARGETS = tuple(
    PatchTarget(f"{_BACKEND}.{name}", body=name in ("export_event", "import_event"))
    for name in ("export_event", "import_event", "synchronize_event", "wait_event", "query_event")
)
ISSUE = "https://github.com/LMCache/LMCache/issues/4419"
REMOVE_WHEN = "LMCache's import_event has a way of its own for ROCm that keeps the order"

SERVER = Patch(
    name=_SERVER_NAME,
    behaviour="LMCache server",
    summary=(
        "The server's half of lmcache-host-events: it answers when a copy is done, not when it is queued, and opens no "
        "event of an engine."
    ),
    issue=ISSUE,
    targets=TARGETS,
    runs_in=("lmcache-server",),
    platforms=("rocm",),
    settings=frozenset({SWITCH}),
    required=True,
    instead=f"leave {SWITCH} out of lmcache.env",
    effects={AWAITED: "copies whose end was waited for on the host"},
    remove_when=REMOVE_WHEN,
    apply=_apply_server,
)


_WORKER_NAME = "lmcache-host-events"


def _apply_worker() -> None:
    """Wraps two methods of DefaultEventIPCBackend as soon as vLLM has imported LMCache's clients."""
    once_loaded(_WORKER_NAME, lambda: take_hold(_WORKER_NAME))


WORKER = Patch(
    name=_WORKER_NAME,
    behaviour="LMCache server",
    summary=(
        "With lmcache_driven each side opens events of the other's process, which never returns on some ROCm stacks: "
        "the engine hangs at its start or at its first reload. Each side waits on the host for its own work instead, "
        "and says that it is done. Costs the overlap of a step that stores with what follows it. Not run on ROCm yet."
    ),
    issue=ISSUE,
    targets=(HOOK, *TARGETS),
    runs_in=("worker",),
    connectors=frozenset({"LMCacheMPConnector"}),
    platforms=("rocm",),
    settings=frozenset({SWITCH}),
    required=True,
    instead=f"leave {SWITCH} out of lmcache.env",
    effects={AWAITED: "steps and loads whose begin was waited for on the host"},
    remove_when=REMOVE_WHEN,
    apply=_apply_worker,
)
