"""Patch mooncake-pulls: decode does not wait for KV that cannot come, nor release blocks that may be written.

Three ends of a pull that upstream does not see: its request is aborted, its prefill dies, or prefill's answer leaves
it out. The scheduler's half is here: it names the requests whose pulls are to be withdrawn. The worker's is in
mooncake_pull_watch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches.mooncake import pull_watch as watch
from pdserve.patches.mooncake import sockets
from pdserve.patches.mooncake.open_pulls import NAME as _NAME
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.wrap import wrap

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
_WORKER = f"{_MODULE}.MooncakeConnectorWorker"
_SCHEDULER = f"{_MODULE}.MooncakeConnectorScheduler"


def apply() -> None:
    """Wraps both halves of MooncakeConnector's decode side."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

    scheduler, worker = upstream.MooncakeConnectorScheduler, upstream.MooncakeConnectorWorker
    wrap(scheduler, "build_connector_meta", patch=_NAME, around=_planned)
    wrap(scheduler, "request_finished", patch=_NAME, around=_ended)
    wrap(worker, "start_load_kv", patch=_NAME, around=watch.with_withdrawals)
    wrap(worker, "_start_load_kv", patch=_NAME, around=watch.registered)
    wrap(worker, "handle_new_engine_id", patch=_NAME, around=watch.known_or_failed)
    wrap(worker, "receive_kv", patch=_NAME, around=watch.asked)
    wrap(worker, "receive_kv_from_single_worker", patch=_NAME, around=watch.watched)
    wrap(worker, "process_pulling_result", patch=_NAME, around=watch.settled)
    wrap(upstream, "make_zmq_socket", patch=_NAME, around=watch.monitoring)
    if hasattr(worker, "_handle_failed_recv"):
        wrap(worker, "_handle_failed_recv", patch=_NAME, around=watch.failed)
    else:
        wrap(upstream.MooncakeConnector, "get_block_ids_with_load_errors", patch=_NAME, around=watch.with_failed_blocks)


# --- the scheduler: which requests' pulls are to be withdrawn


def _planned(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        meta = original(self, scheduler_output)
        pulling, ended = _scheduled(self)
        for pulls in meta.reqs_to_recv.values():
            pulling.update(request for request, pull in pulls.items() if any(pull.local_block_ids))
        if ended:
            # Upstream's metadata is pickled for the workers whole; one without the patch does not look at this.
            meta.pdserve_withdrawn = frozenset(ended)
            ended.clear()
        return meta

    return build_connector_meta


def _ended(original: Callable[..., tuple[bool, Any]]) -> Callable[..., tuple[bool, Any]]:
    def request_finished(self: Any, request: Any, block_ids: Any) -> tuple[bool, Any]:
        from vllm.v1.request import RequestStatus

        pulling, ended = _scheduled(self)
        request_id = request.request_id
        _, planned = self._reqs_need_recv.get(request_id, (None, ()))
        if request_id in pulling or any(planned):
            pulling.discard(request_id)
            # After any other end its KV has long arrived; the worker ignores what it has no pull for.
            if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
                ended.add(request_id)
        return original(self, request, block_ids)

    return request_finished


def _scheduled(scheduler: Any) -> tuple[set[str], set[str]]:
    """Requests that were given to the workers to pull and have not ended; those that have, since the last step."""
    pulls: tuple[set[str], set[str]] | None = getattr(scheduler, "pdserve_pulls", None)
    if pulls is None:
        pulls = scheduler.pdserve_pulls = (set(), set())
    return pulls


PATCH = Patch(
    name=_NAME,
    behaviour="abandoned transfers",
    summary=(
        "A decode request whose KV cannot come (client gone, prefill dead or without an answer) holds its blocks for "
        "the abort timeout and 60 s, before vllm 0.30 for ever. Its pull is withdrawn or failed at once; its blocks "
        "are released when no prefill worker can write them any more, not before. A rejected request is no pull that "
        "waits at prefill and holds a socket: its transfer is withdrawn. Pulls beyond what the sockets allow wait."
    ),
    issue="https://github.com/vllm-project/vllm/issues/35943",
    targets=(
        PatchTarget(f"{_SCHEDULER}.build_connector_meta", body=True),
        PatchTarget(f"{_SCHEDULER}.request_finished", body=True),
        PatchTarget(f"{_WORKER}.start_load_kv", body=True),
        PatchTarget(f"{_WORKER}._start_load_kv", body=True),
        PatchTarget(f"{_WORKER}.handle_new_engine_id", body=True),
        PatchTarget(f"{_WORKER}.receive_kv", body=True),
        PatchTarget(f"{_WORKER}.receive_kv_from_single_worker", body=True),
        PatchTarget(f"{_WORKER}.process_pulling_result", body=True),
        PatchTarget(f"{_WORKER}._handle_failed_recv", body=True, only=">=0.30"),
        PatchTarget(
            "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.get_block_ids_with_load_errors",
            only="<0.30",
        ),
        PatchTarget("vllm.utils.network_utils.make_zmq_socket"),
    ),
    runs_in=("engine-core", "worker"),
    connectors=frozenset({"MooncakeConnector"}),
    required=True,
    serves_without=(
        "a decode request whose client or prefill is gone holds its blocks for timeouts.transfer_abort_seconds, and "
        "on vllm before 0.30 for ever"
    ),
    effects={
        "pulls-withdrawn": "pulls of ended requests that were withdrawn from prefill",
        "withdrawals-refused": "withdrawals that a prefill without the patch did not understand",
        "pulls-failed": "pulls that failed, so that their requests stopped waiting",
        "peers-lost": "times that a prefill worker was gone while it was pulled from",
        "transfers-released": "transfers without a pull that prefill was made to free",
        sockets.OUT_OF_SOCKETS: sockets.HELP,
    },
    remove_when="upstream withdraws the pulls of aborted requests and notices that a prefill is gone",
    apply=apply,
)
