"""NIXL's transfers on the real Scheduler and both real halves of NixlConnector, on all versions.

KV that a prefill has kept for a client that was leaving: NIXL's lease holds it, unless the patch ends that; with the
real OutputProcessor and uvicorn's own protocol. A receive that has failed: the request is computed anew or fails, with
several KV groups as with one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from pdserve.patches.nixl import ABANDONED_KV, FAILED, FAILED_GROUPS
from pdserve.patches.scheduler import failed_group
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, count, on, verdict

if IN_RELEASE:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.engine.parallel_sampling import ParentRequest

    from tests.upstream.nixl_lab import BLOCK_SIZE, DECODE, NIXL, PULL, Engine
    from tests.upstream.scheduler_lab import RequestStatus, multi


STEPS = 3
"""More than the end of a lease takes: it goes out with a step, and the workers' reports come with that."""
PARAMS = {"do_remote_prefill": True, "remote_request_id": "a"}


def kept(prefill: Any) -> list[str]:
    """Requests that hold blocks after the steps that an end takes."""
    for _ in range(STEPS):
        prefill.step()
    return sorted(prefill.lab.scheduler.requests)


def prefilled(name: str = "a", **engine: Any) -> Any:
    prefill = Engine(**engine)
    for each in name:
        prefill.prefill(each)
    return prefill


def aborted(prefill: Any) -> Any:
    prefill.lab.abort("a")
    return kept(prefill), prefill.all_free


def before_the_workers_know_of_the_lease() -> Any:
    return aborted(prefilled())


def by_two_workers() -> Any:
    prefill = prefilled(workers=2)
    prefill.step()
    return aborted(prefill)


def under_multiconnector() -> Any:
    files = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    files |= {"kv_connector_extra_config": {"shared_storage_path": "/nonexistent"}}  # type: ignore[dict-item]
    prefill = prefilled(connector=multi(NIXL, files))
    prefill.step()
    return aborted(prefill)


def among_others() -> Any:
    """With leases before and behind it; then a decode pulls one of those as ever."""
    prefill = prefilled("abcd")
    prefill.step()
    prefill.lab.abort("c")
    left = kept(prefill)
    prefill.pulled("a")
    return left, kept(prefill)


def again_and_again() -> Any:
    """EngineCore takes in each abort twice: from its queue of aborts, and in the order of requests. A lease ends once:
    vLLM counts that as an expired request."""
    prefill = prefilled()
    prefill.lab.abort("a")
    prefill.lab.abort("a")
    prefill.step()
    prefill.lab.abort("a")
    return kept(prefill), prefill.expired()


def of_everything() -> Any:
    """The engine pauses: nobody has left."""
    prefill = prefilled()
    prefill.lab.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    return kept(prefill)


def of_a_request_that_is_computed() -> Any:
    prefill = Engine()
    prefill.lab.add("a", 600, {"do_remote_decode": True}, max_tokens=1)
    prefill.step()
    prefill.lab.abort("a")
    return kept(prefill), prefill.all_free, prefill.expired()


HELD: Any = (["a"], False)
FREE: Any = ([], True)
CASES: tuple[tuple[Callable[[], Any], Any, Any, int], ...] = (
    (before_the_workers_know_of_the_lease, HELD, FREE, 1),
    (by_two_workers, HELD, FREE, 1),
    (under_multiconnector, HELD, FREE, 1),
    (among_others, (["a", "b", "c", "d"], ["b", "c", "d"]), (["a", "b", "d"], ["b", "d"]), 1),
    (again_and_again, (["a"], 0), ([], 1), 1),
    (of_everything, ["a"], ["a"], 0),
    (of_a_request_that_is_computed, ([], True, 0), ([], True, 0), 0),
)
"""What is seen without the patch and with it, and how many leases it ends."""


def look() -> dict[str, Any]:
    results = {}
    for case, *_ in CASES:
        before = count(ABANDONED_KV.name, "leases-ended")
        results[case.__name__] = (case(), count(ABANDONED_KV.name, "leases-ended") - before)
    return results


@on(*ALL_VLLM_VERSIONS)
def test_an_abort_of_a_finished_request_ends_its_lease_alone() -> None:
    assert verdict(ABANDONED_KV) == "apply"
    assert look() == {case.__name__: (without, 0) for case, without, *_ in CASES}
    ABANDONED_KV.apply()
    ABANDONED_KV.apply()
    assert look() == {case.__name__: (after, ended) for case, _, after, ended in CASES}


class Server:
    """The part of the API server that decides whether EngineCore hears of an abort."""

    def __init__(self) -> None:
        self.outputs = OutputProcessor(None, log_stats=False)

    def add(self, name: str, *, children: int = 0) -> Any:
        """Return what a handler reads the request's output from. `children`: of parallel sampling."""
        sampling = SamplingParams(
            n=max(1, children), max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        queue = RequestOutputCollector(sampling.output_kind, name)
        request = _request(name, sampling)
        if not children:
            self.outputs.add_request(request, None, None, 0, queue)
            return queue
        parent = ParentRequest(request)
        for index in range(children):
            child, child_sampling = parent.get_child_info(index)
            self.outputs.add_request(_request(child, child_sampling, name), None, parent, index, queue)
        return queue

    def process(self, *names: str) -> None:
        """EngineCore has finished these."""
        final = [EngineCoreOutput(n, [5], finish_reason=FinishReason.LENGTH, kv_transfer_params=PARAMS) for n in names]
        self.outputs.process_outputs(final)

    def abort(self, name: str) -> list[str]:
        return sorted(self.outputs.abort_requests([name], internal=True))


def _request(name: str, sampling: Any, external: str = "") -> Any:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2],
        sampling_params=sampling,
        arrival_time=0.0,
        external_req_id=f"outside-{external or name}",
        **dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")),
    )


def aborts_that_are_sent() -> dict[str, list[str]]:
    """By when a client leaves."""
    server = Server()
    for name in ("computed", "read"):
        server.add(name)
    unread, queue = server.add("unread"), server.add("taken")
    server.add("parent", children=3)
    server.process("read", "unread", "taken", "1_parent")
    assert queue.get_nowait() is not None
    sent = {
        "computed": server.abort("computed"),
        "nobody reads it any more": server.abort("read"),
        "not taken yet": server.abort("unread"),
        "not taken yet, again": server.abort("unread"),
        "taken": server.abort("taken"),
        "some children finished": server.abort("parent"),
    }
    del unread
    return {when: names for when, names in sent.items() if names}


@on(*ALL_VLLM_VERSIONS)
def test_upstream_sends_an_abort_only_while_it_has_not_seen_the_end() -> None:
    """So whoever is named in an abort has given nobody the parameters by which a decode could pull its KV. With the
    patch one is also sent for an end that no request takes."""
    unpatched = {
        "computed": ["computed"],
        "some children finished": ["0_parent", "2_parent"],
    }
    assert aborts_that_are_sent() == unpatched
    ABANDONED_KV.apply()
    assert aborts_that_are_sent() == unpatched | {"not taken yet": ["unread"]}


async def aborts_of(answer: str, *, left: bool) -> list[str]:
    """The client of uvicorn's own half of a request has left before it is answered, or is still there."""
    aborted: list[str] = []

    async def abort_requests_async(names: list[str]) -> None:
        aborted.extend(names)

    core = SimpleNamespace(abort_requests_async=abort_requests_async)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))
    cycle = Mock(disconnected=left, response_started=True, response_complete=False, chunked_encoding=False)
    cycle.scope, cycle.expected_content_length = {"app": app, "method": "POST"}, len(answer)
    cycle.flow.write_paused, cycle.transport.is_closing.return_value = False, False
    await RequestResponseCycle.send(cycle, {"type": "http.response.body", "body": answer.encode()})
    assert cycle.transport.write.called != left
    return aborted


@on(*ALL_VLLM_VERSIONS)
def test_nor_is_an_answer_kept_for_whom_uvicorn_has_no_connection_any_more() -> None:
    ABANDONED_KV.apply()

    def aborts(params: Any, *, left: bool = True, before: str = "") -> list[str]:
        body = json.dumps({"id": "cmpl", "kv_transfer_params": params}, separators=(",", ":"))  # as Starlette does it
        return asyncio.run(aborts_of(before + body, left=left))

    assert (aborts(PARAMS), aborts(PARAMS, left=False)) == (["a"], [])
    assert aborts(None) == aborts(PARAMS | {"do_remote_prefill": False}) == aborts(PARAMS, before="data: ") == []


NONSENSE = (False, [4, 12], "length", True)
"""Four tokens, of a prompt whose KV neither came nor was computed."""
POLICIES = {"recompute": (True, [4, 12], "length", True), "fail": (False, [0, 12], "error", True)}
WAYS = ("the handshake", "the transfer")


@on(*ALL_VLLM_VERSIONS)
def test_with_several_groups_nonsense_is_answered_before_0_30_and_not_with_the_patch(version: str) -> None:
    for policy, end in POLICIES.items():
        for what in WAYS:
            assert receive(what, policy, groups=1) == end, (what, policy)
            assert receive(what, policy) == (NONSENSE if version < "0.30" else end), (what, policy)
    if version < "0.30":
        assert verdict(FAILED_GROUPS) == "apply"
        FAILED_GROUPS.apply()
        FAILED_GROUPS.apply()
    else:
        assert verdict(FAILED_GROUPS) == "not-needed"
    for policy, end in POLICIES.items():
        for what in WAYS:
            assert receive(what, policy) == receive(what, policy, groups=1) == end, (what, policy)
        assert receive("the handshake", policy, workers=2) == end, policy
    if version < "0.30":
        # Of each policy two receives by one worker; and of two workers the one that fails at once, then the other.
        assert count(FAILED_GROUPS.name, FAILED) == 2 * (2 + 2)
        assert count(FAILED_GROUPS.name, failed_group.RECOMPUTATIONS) >= 2 * (2 + 1)


def receive(what: str, policy: str, *, groups: int = 2, workers: int = 1) -> Any:
    """One request whose receive fails in the first worker, beside one that needs none: whether it is computed anew,
    tokens of both, how it has ended, and whether all blocks are free."""
    prompt = 4 * BLOCK_SIZE
    decode = Engine(
        DECODE,
        workers=workers,
        window=2 * BLOCK_SIZE if groups == 2 else None,
        max_num_batched_tokens=2 * prompt,
        load_failure_policy=policy,
    )
    decode.lab.add("other", 40, max_tokens=12)
    for index, worker in enumerate(decode.workers):
        if index == 0 and what == "the handshake":
            worker._nixl_handshake = Mock(side_effect=ConnectionError("no prefill listens there"))
        else:
            worker._remote_agents[PULL["remote_engine_id"]] = {}
            worker._read_blocks_for_req = lambda name, _, worker=worker: worker._recving_transfers[name].append(7)
            worker.nixl_wrapper.check_xfer_state = lambda _, index=index: "PROC" if index else "ERR"
    decode.lab.add("a", prompt, PULL | {"remote_request_id": "a"}, max_tokens=4)
    for step in range(40):
        if step == 2:  # the others' transfers end, with an error as well, so that no KV has to be looked at
            for worker in decode.workers:
                worker.nixl_wrapper.check_xfer_state = lambda _: "ERR"
        decode.step()
    tokens = [len(decode.lab.outputs.get(name, [])) for name in ("a", "other")]
    return decode.scheduled.get("a", 0) >= prompt, tokens, decode.lab.finish_reasons.get("a"), decode.all_free
