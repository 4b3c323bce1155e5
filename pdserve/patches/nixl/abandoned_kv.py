"""Patch nixl-abandoned-kv: KV of a prefill whose client was leaving does not stay for NIXL's whole lease.

EngineCore has finished the request and reported it, but the API server has not looked at that yet when its client
leaves: it forgets the request, drops the answer with the transfer parameters in it and sends an abort, which the
scheduler ignores because the request is finished (vllm#25067, for fear that a decode uses the KV). No decode can:
`OutputProcessor.abort_requests` names only requests of which it has not processed the last output, by EngineCore's own
ids, children of parallel sampling one by one; so in vllm 0.26 to 0.33, and so does the Rust front end. Answers that are
lost after that are handled by lost_answers.py, which sends an abort for them.

The lease is ended the way it ends by itself: the connector's metadata carries the request once more, with a time that
has passed, and each worker gives it back. Until then it is the worker's, whatever else holds it (MultiConnector counts
its children). Prefill context parallelism is left alone: some ranks report a request as often as the metadata names
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pdserve.patches import effects
from pdserve.patches.nixl import lost_answers
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.wrap import wrap

_NAME = "nixl-abandoned-kv"
_ENDED = "pdserve_lease_ended"
"""Attribute of a request. EngineCore takes in each abort twice: by a queue of aborts, and in the order of requests."""
_LONG_AGO = 0.0
"""Of perf_counter, on every machine."""


def apply() -> None:
    """Wraps a method of Scheduler for the EngineCore, before vllm 0.31 one of NIXL's worker, and those of
    lost_answers in the API server."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "finish_requests", patch=_NAME, around=_ending_leases)
    if not hasattr(NixlConnectorWorker, "_reap_expired_send_leases"):
        # It looks for ended leases until the first that has not ended.
        wrap(NixlConnectorWorker, "start_load_kv", patch=_NAME, around=_ended_first)
    lost_answers.apply(_NAME)


def _ending_leases(original: Callable[..., Any]) -> Callable[..., Any]:
    def finish_requests(self: Any, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        # None means all: the engine pauses or ends, and answers may be anywhere.
        if request_ids is not None and finished_status.name == "FINISHED_ABORTED":
            request_ids = (request_ids,) if isinstance(request_ids, str) else tuple(request_ids)
            _end_leases(self, request_ids)
        return original(self, request_ids, finished_status)

    return finish_requests


def _end_leases(scheduler: Any, aborted: Iterable[str]) -> None:
    for name in aborted:
        request = scheduler.requests.get(name)
        if request is None or not _kept(request) or getattr(request, _ENDED, False):
            continue
        for nixl in _pulled(scheduler.connector):
            nixl._reqs_need_send[name] = _LONG_AGO
            setattr(request, _ENDED, True)
            effects.count(_NAME, "leases-ended")


def _kept(request: Any) -> bool:
    """What NIXL's request_finished keeps, if it was asked to."""
    if request.status.name not in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"):
        return False
    return bool(request.kv_transfer_params) and bool(request.kv_transfer_params.get("do_remote_decode"))


def _pulled(connector: Any) -> Iterator[Any]:
    """Scheduler halves of NixlConnector from which decodes pull: the connector's, or those of its children."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler

    for child in getattr(connector, "_connectors", ()):
        yield from _pulled(child)
    half = getattr(connector, "connector_scheduler", None)
    if isinstance(half, NixlConnectorScheduler):
        parallel = half.vllm_config.parallel_config
        if getattr(parallel, "prefill_context_parallel_size", 1) == 1:
            yield half


def _ended_first(original: Callable[..., None]) -> Callable[..., None]:
    def start_load_kv(self: Any, metadata: Any) -> None:
        original(self, metadata)
        if _LONG_AGO in metadata.reqs_to_send.values():
            self._reqs_to_send = dict(sorted(self._reqs_to_send.items(), key=lambda lease: lease[1]))

    return start_load_kv


_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl."
_ENGINE = "vllm.v1.engine."

PATCH = Patch(
    name=_NAME,
    behaviour="abandoned transfers",
    summary=(
        "A client that leaves while prefill's answer is on its way through vLLM leaves KV that no decode can fetch: "
        "the scheduler ignores an abort of a finished request, and NIXL keeps the blocks for its lease (30 s). Such an "
        "abort ends the lease at once, in every worker; vLLM counts that as an expired request."
    ),
    issue="https://github.com/vllm-project/vllm/pull/29906",
    targets=(
        # body: it leaves finished requests alone.
        PatchTarget("vllm.v1.core.sched.scheduler.Scheduler.finish_requests", body=True),
        PatchTarget(f"{_ENGINE}output_processor.OutputProcessor._finish_request"),
        # body: an abort is sent for those requests only whose end was not processed.
        PatchTarget(f"{_ENGINE}output_processor.OutputProcessor.abort_requests", body=True),
        PatchTarget(f"{_ENGINE}async_llm.AsyncLLM.abort", body=True),
        # body: what is kept, and that _reqs_need_send goes to the workers as it is.
        PatchTarget(f"{_NIXL}pull_scheduler.NixlPullConnectorScheduler.request_finished", body=True),
        PatchTarget(f"{_NIXL}base_scheduler.NixlBaseConnectorScheduler.build_connector_meta", body=True),
        PatchTarget(f"{_NIXL}pull_worker.NixlPullConnectorWorker.start_load_kv", body=True),
        PatchTarget("uvicorn.protocols.http.httptools_impl.RequestResponseCycle.send"),
    ),
    runs_in=("api-server", "engine-core", "worker"),
    connectors=frozenset({"NixlConnector"}),
    required=False,
    effects={
        "leases-ended": "leases that were ended because the client left before prefill's answer reached it",
        lost_answers.UNREAD: "answers of prefill whose handler was cancelled before it had taken them",
        lost_answers.UNSENT: "answers of prefill for which there was no connection any more",
    },
    remove_when="vLLM's scheduler lets the connector know of an abort of a request that has finished",
    apply=apply,
)
