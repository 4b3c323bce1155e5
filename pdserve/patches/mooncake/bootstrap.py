"""Patches of Mooncake's bootstrap server, at which the workers of a prefill register.

mooncake-bootstrap: it accepts a prefill that was started again beside it. The server outlives its workers when it is
an external one (`bootstrap_server_address`) or when one data-parallel rank is started again. It then has entries of
workers that are dead, and refuses their successors with status 400, which ends their start.

mooncake-late-bootstrap: workers wait for it. The first data-parallel rank of a prefill has the server, and starts it
once its own memory is registered. Up to vllm 0.30 the workers of all ranks try it every second for as long as it takes;
since 0.31 three times, for about three seconds (vllm#55763). Ranks that load faster, on other nodes, fail then, and
with them the instance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pdserve.patches import effects
from pdserve.patches.mooncake.peer import refuses_connections
from pdserve.patches.patch import Patch, PatchTarget, wrap

_NAME = "mooncake-bootstrap"
_SERVER = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils.MooncakeBootstrapServer"
_PATIENCE_SECONDS = 3.0
"""For a predecessor that is about to end. Before vllm 0.31 a worker gives its registration 5 s."""
_POLL_SECONDS = 0.2

log = logging.getLogger("pdserve.patches")


def _apply_bootstrap() -> None:
    """Wraps MooncakeBootstrapServer.register_worker; vLLM makes a route of it when a server is built."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_utils

    wrap(mooncake_utils.MooncakeBootstrapServer, "register_worker", patch=_NAME, around=_replace_the_dead)


def _replace_the_dead(original: Callable[..., Awaitable[Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def register_worker(self: Any, payload: Any) -> Any:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while in_the_way := _in_the_way(self.workers, payload):
            if not all(await asyncio.gather(*(refuses_connections(address) for address in in_the_way))):
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
    """Return the addresses that must be dead before this worker can be accepted."""
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


BOOTSTRAP = Patch(
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
    apply=_apply_bootstrap,
)


_LATE_NAME = "mooncake-late-bootstrap"
_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector.MooncakeConnectorWorker"
_ATTEMPTS = 400
"""Ten seconds apart: longer than any start. A first rank that fails ends the instance, and with it who waits."""


def _apply_late_bootstrap() -> None:
    """Sets the number of attempts. Upstream derives from it also how long a worker waits until it is registered."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    mooncake_connector._BOOTSTRAP_MAX_ATTEMPTS = _ATTEMPTS


LATE_BOOTSTRAP = Patch(
    name=_LATE_NAME,
    behaviour="abandoned transfers",
    summary=(
        "Since 0.31 the workers of a prefill try the bootstrap server of its first rank for three seconds; a rank that "
        "starts earlier than the first one, on another node, fails, and the start hangs. They try it as long as the "
        "start may take."
    ),
    issue="https://github.com/vllm-project/vllm/issues/55729",
    vllm=">=0.31",
    targets=(PatchTarget(f"{_WORKER}.register_worker_with_bootstrap", body=True),),
    runs_in=("worker",),
    connectors=frozenset({"MooncakeConnector"}),
    required=False,
    remove_when="workers wait for the first rank's server for as long as the engine may take to start",
    apply=_apply_late_bootstrap,
)
