"""Patch mooncake-late-bootstrap: workers of a prefill wait for the bootstrap server of its first rank.

The first data-parallel rank of a prefill has the bootstrap server, and starts it once its own memory is registered. The
workers of all ranks register there. Up to vllm 0.30 they try it every second for as long as it takes; since 0.31 three
times, for about three seconds (vllm#55763). Ranks that load faster, on other nodes, fail then, and with them the
instance.
"""

from __future__ import annotations

from pdserve.patches.patch import Patch, PatchTarget

_NAME = "mooncake-late-bootstrap"
_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector.MooncakeConnectorWorker"
_ATTEMPTS = 400
"""Ten seconds apart: longer than any start. A first rank that fails ends the instance, and with it who waits."""


def apply() -> None:
    """Sets the number of attempts. Upstream derives from it also how long a worker waits until it is registered."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    mooncake_connector._BOOTSTRAP_MAX_ATTEMPTS = _ATTEMPTS


PATCH = Patch(
    name=_NAME,
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
    apply=apply,
)
