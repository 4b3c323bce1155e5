"""Patch mooncake-bootstrap: Mooncake's bootstrap server accepts a prefill that was started again beside it.

The server outlives its workers when it is an external one (`bootstrap_server_address`) or when one data-parallel rank
is started again. It then has entries of workers that are dead, and refuses their successors with status 400, which
ends their start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pdserve.patches import effects
from pdserve.patches.mooncake.peer import refuses
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.wrap import wrap

_NAME = "mooncake-bootstrap"
_SERVER = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils.MooncakeBootstrapServer"
_PATIENCE_SECONDS = 3.0
"""For a predecessor that is about to end. Before vllm 0.31 a worker gives its registration 5 s."""
_POLL_SECONDS = 0.2

log = logging.getLogger("pdserve.patches")


def apply() -> None:
    """Wraps MooncakeBootstrapServer.register_worker; vLLM makes a route of it when a server is built."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_utils

    wrap(mooncake_utils.MooncakeBootstrapServer, "register_worker", patch=_NAME, around=_after_the_dead)


def _after_the_dead(original: Callable[..., Awaitable[Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def register_worker(self: Any, payload: Any) -> Any:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while in_the_way := _in_the_way(self.workers, payload):
            if not all(await asyncio.gather(*(refuses(address) for address in in_the_way))):
                if time.monotonic() > deadline:
                    break  # alive, or not certainly dead: upstream refuses the newcomer
                await asyncio.sleep(_POLL_SECONDS)
            elif _in_the_way(self.workers, payload) == in_the_way:  # another worker may have done it meanwhile
                _remove(self.workers, payload)
                effects.count(_NAME, "registrations-replaced", len(in_the_way))
                log.warning(
                    "%s of dp rank %s no longer listen: another worker replaces them", in_the_way, payload.dp_rank
                )
        return await original(self, payload)

    return register_worker


def _in_the_way(workers: dict[int, Any], payload: Any) -> list[str]:
    """Addresses that must be dead before this worker can be accepted."""
    entry = workers.get(payload.dp_rank)
    if entry is None:
        return []
    if entry.engine_id != payload.engine_id:
        return [address for stages in entry.worker_addr.values() for address in stages.values()]
    # An engine whose id is fixed keeps it over a restart.
    address = entry.worker_addr.get(payload.tp_rank, {}).get(payload.pp_rank)
    return [address] if address not in (None, payload.addr) else []


def _remove(workers: dict[int, Any], payload: Any) -> None:
    entry = workers[payload.dp_rank]
    if entry.engine_id != payload.engine_id:
        del workers[payload.dp_rank]
    else:
        del entry.worker_addr[payload.tp_rank][payload.pp_rank]


PATCH = Patch(
    name=_NAME,
    behaviour="abandoned transfers",
    summary=(
        "A bootstrap server that outlives its prefill refuses the next one (400, Engine ID mismatch), whose start then "
        "fails. Entries whose addresses refuse connections are dead and give way; living ones are kept."
    ),
    issue="not reported upstream; MooncakeBootstrapServer.register_worker of vllm 0.26 to 0.33",
    targets=(PatchTarget(f"{_SERVER}.register_worker", body=True),),
    runs_in=("worker",),
    connectors=frozenset({"MooncakeConnector"}),
    required=False,
    effects={"registrations-replaced": "addresses of dead workers that gave way to a new one"},
    remove_when="MooncakeBootstrapServer replaces the entries of dead workers",
    apply=apply,
)
