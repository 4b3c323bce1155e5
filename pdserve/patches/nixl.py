"""Patches of NixlConnector: abandoned KV, and failed transfers of models with several KV groups.

nixl-abandoned-kv: KV of a prefill whose client was leaving does not stay for NIXL's whole lease.

EngineCore has finished the request and reported it, but the API server has not looked at that yet when its client
leaves: it forgets the request, drops the answer with the transfer parameters in it and sends an abort, which the
scheduler ignores because the request is finished (vllm#25067, for fear that a decode uses the KV). No decode can:
`OutputProcessor.abort_requests` names only requests of which it has not processed the last output, by EngineCore's own
ids, children of parallel sampling one by one; so in vllm 0.26 to 0.33, and so does the Rust front end. Answers that are
lost after that are handled by `_apply_lost_answers`, which sends an abort for them.

The lease is ended the way it ends by itself: the connector's metadata carries the request once more, with a time that
has passed, and each worker gives it back. Until then it is the worker's, whatever else holds it (MultiConnector counts
its children). Prefill context parallelism is left alone: some ranks report a request as often as the metadata names
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap
from pdserve.patches.scheduler import failed_group

UNREAD, UNSENT = "answers-unread", "answers-unsent"
"""What it counts."""
_QUEUES = "pdserve_unread"
"""Attribute of an OutputProcessor: request id -> its queue, while the queue may still be read."""
_PARAMETERS = b'"kv_transfer_params":{'


def _apply_lost_answers(patch: str) -> None:
    """Wraps two methods of OutputProcessor, and one of uvicorn's requests."""
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from vllm.v1.engine.output_processor import OutputProcessor

    wrap(OutputProcessor, "_finish_request", patch=patch, around=_remember_queues)
    wrap(OutputProcessor, "abort_requests", patch=patch, around=lambda original: _abort_unread(original, patch))
    wrap(RequestResponseCycle, "send", patch=patch, around=lambda original: _abort_unsent(original, patch))


def _remember_queues(original: Callable[..., None]) -> Callable[..., None]:
    def finish_request(self: Any, state: Any) -> None:
        original(self, state)
        if state.queue is not None and state.parent_req is None:
            self.__dict__.setdefault(_QUEUES, WeakValueDictionary())[state.request_id] = state.queue

    return finish_request


def _abort_unread(original: Callable[..., list[str]], patch: str) -> Callable[..., list[str]]:
    def abort_requests(self: Any, request_ids: Iterable[str], internal: bool) -> list[str]:
        names = tuple(request_ids)
        aborted = original(self, names, internal)
        if internal:
            # By the task that would have read it, and that ends with this.
            for name in names:
                queue = getattr(self, _QUEUES, {}).pop(name, None)
                output = getattr(queue, "output", None)
                if _has_parameters(output):
                    aborted.append(name)
                    effects.count(patch, UNREAD)
        return aborted

    return abort_requests


def _has_parameters(output: Any) -> bool:
    return bool(getattr(output, "finished", False)) and bool(getattr(output, "kv_transfer_params", None))


def _abort_unsent(original: Callable[..., Any], patch: str) -> Callable[..., Any]:
    async def send(self: Any, message: Any) -> None:
        body = message.get("body", b"")
        lost = _PARAMETERS in body and (self.disconnected or self.transport.is_closing())
        await original(self, message)
        if lost and (name := _kept_under(body)):
            effects.count(patch, UNSENT)
            await self.scope["app"].state.engine_client.engine_core.abort_requests_async([name])

    return send


def _kept_under(body: bytes) -> str:
    """Return EngineCore's name of the request whose KV a decode would pull; empty: this is no answer of prefill."""
    try:
        parameters = json.loads(body).get("kv_transfer_params") or {}
    except ValueError:
        # A piece of a stream: of an answer that no decode can use, because it is not complete.
        return ""
    return str(parameters.get("remote_request_id") or "") if parameters.get("do_remote_prefill") else ""


_ABANDONED = "nixl-abandoned-kv"
_ENDED = "pdserve_lease_ended"
"""Attribute of a request. EngineCore takes in each abort twice: by a queue of aborts, and in the order of requests."""
_LONG_AGO = 0.0
"""Of perf_counter, on every machine."""


def _apply_abandoned_kv() -> None:
    """Wraps a method of Scheduler for the EngineCore, before vllm 0.31 one of NIXL's worker, and those of
    lost_answers in the API server."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "finish_requests", patch=_ABANDONED, around=_ending_leases)
    if not hasattr(NixlConnectorWorker, "_reap_expired_send_leases"):
        # It looks for ended leases until the first that has not ended.
        wrap(NixlConnectorWorker, "start_load_kv", patch=_ABANDONED, around=_ended_first)
    _apply_lost_answers(_ABANDONED)


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
            effects.count(_ABANDONED, "leases-ended")


def _kept(request: Any) -> bool:
    """Tell whether NIXL's request_finished keeps the KV of a request."""
    if request.status.name not in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"):
        return False
    return bool(request.kv_transfer_params) and bool(request.kv_transfer_params.get("do_remote_decode"))


def _pulled(connector: Any) -> Iterator[Any]:
    """Yield the scheduler halves of NixlConnector from which decodes pull: the connector's, or those of its
    children."""
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

ABANDONED_KV = Patch(
    name=_ABANDONED,
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
        UNREAD: "answers of prefill whose handler was cancelled before it had taken them",
        UNSENT: "answers of prefill for which there was no connection any more",
    },
    remove_when="vLLM's scheduler lets the connector know of an abort of a request that has finished",
    apply=_apply_abandoned_kv,
)


_GROUPS = "nixl-failed-groups"
FAILED = "failed-receives"
"""What it counts, beside failed_group's."""


def _apply_failed_groups() -> None:
    """Wraps a method of NIXL's worker, and failed_group's of the Scheduler; matters in the workers and EngineCore."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
    from vllm.v1.core.sched.scheduler import Scheduler

    owner = next(cls for cls in NixlConnectorWorker.__mro__ if "_handle_failed_transfer" in vars(cls))
    wrap(owner, "_handle_failed_transfer", patch=_GROUPS, around=_naming_the_blocks)
    wrap(
        Scheduler,
        "_update_requests_with_invalid_blocks",
        patch=_GROUPS,
        around=lambda original: failed_group.whole_requests(original, _GROUPS),
    )


def _naming_the_blocks(original: Callable[..., None]) -> Callable[..., None]:
    def handle_failed_transfer(self: Any, req_id: str, handle: int | None) -> None:
        receive = self._recving_metadata.get(req_id)
        if receive is not None and self._is_hma_required:
            # Before upstream queues the request as failed: whoever takes that up finds the blocks too.
            self._invalid_block_ids.put({block for group in receive.local_block_ids for block in group})
            effects.count(_GROUPS, FAILED)
        original(self, req_id, handle)

    return handle_failed_transfer


FAILED_GROUPS = Patch(
    name=_GROUPS,
    behaviour="failed and late loads",
    summary=(
        "A NIXL transfer that fails for a model with several KV groups (hybrid models) is reported as finished, and "
        "nothing else: decode goes on from blocks that were never written, and the client gets 200 and nonsense. Its "
        "blocks are reported, so that the request is computed anew, or fails, as kv_load_failure_policy says."
    ),
    issue="https://github.com/vllm-project/vllm/issues/52234",
    vllm=">=0.26,<0.30",
    targets=(
        PatchTarget(f"{_NIXL}base_worker.NixlBaseConnectorWorker._handle_failed_transfer", body=True, only="<0.30"),
        *failed_group.TARGETS,
    ),
    runs_in=("engine-core", "worker"),
    connectors=frozenset({"NixlConnector"}),
    required=True,
    serves_without=(
        "a failed transfer of a model with several KV groups is answered with 200 and nonsense; models with one group "
        "are not concerned"
    ),
    effects={
        FAILED: "transfers of hybrid models that failed, whose blocks were reported",
        failed_group.RECOMPUTATIONS: "requests of hybrid models that are computed anew, or failed, after such a report",
    },
    remove_when="vllm 0.30 is the oldest supported version: a failed transfer is reported by its request there",
    apply=_apply_failed_groups,
)
