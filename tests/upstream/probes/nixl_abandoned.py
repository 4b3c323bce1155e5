"""Aborts of requests whose KV NIXL keeps: what upstream does, and what the patch makes of it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from tests.upstream.nixl_lab import NIXL, Prefill  # isort: skip  # takes the CPU for the platform

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from pdserve.patches import effects
from pdserve.patches.nixl import abandoned_kv
from pdserve.patches.verdict import judge
from tests.upstream.probes.multiconnector_metrics import versions_here
from tests.upstream.scheduler_lab import Lab, RequestStatus, multi

STEPS = 3
"""More than the end of a lease takes: it goes out with a step, and the workers' reports come with that."""
PARAMS = {"do_remote_prefill": True, "remote_request_id": "a"}


def kept(prefill: Prefill) -> list[str]:
    """Requests that hold blocks after the steps that an end takes."""
    for _ in range(STEPS):
        prefill.step()
    return sorted(prefill.lab.scheduler.requests)


def before_the_workers_know_of_the_lease() -> Any:
    prefill = Prefill()
    prefill.prefill("a")
    prefill.lab.abort("a")
    return kept(prefill), prefill.lab.free_blocks == prefill.empty


def by_two_workers() -> Any:
    prefill = Prefill(workers=2)
    prefill.prefill("a")
    prefill.step()
    prefill.lab.abort("a")
    return kept(prefill), prefill.lab.free_blocks == prefill.empty


def under_multiconnector() -> Any:
    files = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    prefill = Prefill(multi(NIXL, files | {"kv_connector_extra_config": {"shared_storage_path": "/nonexistent"}}))
    prefill.prefill("a")
    prefill.step()
    prefill.lab.abort("a")
    return kept(prefill), prefill.lab.free_blocks == prefill.empty


def among_others() -> Any:
    """With leases before and behind it; then a decode pulls one of those as ever."""
    prefill = Prefill()
    for name in "abcd":
        prefill.prefill(name)
    prefill.step()
    prefill.lab.abort("c")
    left = kept(prefill)
    prefill.pulled("a")
    return left, kept(prefill)


def again_and_again() -> Any:
    """EngineCore takes in each abort twice: from its queue of aborts, and in the order of requests."""
    prefill = Prefill()
    prefill.prefill("a")
    prefill.lab.abort("a")
    prefill.lab.abort("a")
    prefill.step()
    prefill.lab.abort("a")
    return kept(prefill), prefill.expired()


def of_everything() -> Any:
    """The engine pauses: nobody has left."""
    prefill = Prefill()
    prefill.prefill("a")
    prefill.lab.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    return kept(prefill)


def of_a_request_that_is_computed() -> Any:
    prefill = Prefill()
    prefill.lab.add("a", 600, {"do_remote_decode": True}, max_tokens=1)
    prefill.step()
    prefill.lab.abort("a")
    return kept(prefill), prefill.lab.free_blocks == prefill.empty, prefill.expired()


def of_mooncake() -> Any:
    """A decode may be pulling it: Mooncake's prefill is asked before it has finished."""
    lab = Lab(connector={"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"})
    lab.add("a", 32, {"do_remote_decode": True, "transfer_id": "xfer"}, max_tokens=1)
    lab.step()
    lab.abort("a")
    for _ in range(STEPS):
        lab.step()
    return lab.status("a")


LOOKS = (
    before_the_workers_know_of_the_lease,
    by_two_workers,
    under_multiconnector,
    among_others,
    again_and_again,
    of_everything,
    of_a_request_that_is_computed,
    of_mooncake,
)


def look() -> dict[str, Any]:
    """What each saw, and how many leases it has seen ended by us."""
    results = {}
    for case in LOOKS:
        before = _ended()
        results[case.__name__] = {"saw": case(), "ended": _ended() - before}
    return results


def _ended() -> float:
    return effects.totals().get((abandoned_kv.PATCH.name, "leases-ended"), 0)


class Server:
    """The part of the API server that decides whether EngineCore hears of an abort."""

    def __init__(self) -> None:
        self.outputs = OutputProcessor(None, log_stats=False)

    def add(self, name: str, *, children: int = 0) -> Any:
        """What a handler reads the request's output from. `children`: of parallel sampling."""
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

    def abort(self, name: str, *, internal: bool = True) -> list[str]:
        return sorted(self.outputs.abort_requests([name], internal))


def _request(name: str, sampling: Any, external: str = "") -> Any:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=f"outside-{external or name}",
    )


def aborts_that_are_sent() -> dict[str, list[str]]:
    """By when a client leaves."""
    server = Server()
    for name in ("computed", "by its outer name", "read"):
        server.add(name)
    unread, queue = server.add("unread"), server.add("taken")
    server.add("parent", children=3)
    server.process("read", "unread", "taken", "1_parent")
    assert queue.get_nowait() is not None
    sent = {
        "computed": server.abort("computed"),
        "by its outer name": server.abort("outside-by its outer name", internal=False),
        "nobody reads it any more": server.abort("read"),
        "not taken yet": server.abort("unread"),
        "not taken yet, again": server.abort("unread"),
        "taken": server.abort("taken"),
        "some children finished": server.abort("parent"),
        "never heard of": server.abort("nobody"),
    }
    del unread
    return sent


class Application:
    """An answer that is sent when the client has left, or at once. `state` is where vLLM has its engine client."""

    def __init__(self, answer: str, *, waits: bool) -> None:
        self._answer = answer.encode()
        self._waits = waits
        self.aborted: list[str] = []
        self.answered = asyncio.Event()
        self.state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=self))

    async def abort_requests_async(self, names: list[str]) -> None:
        self.aborted += names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = self
        while self._waits and (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self._answer})
        self.answered.set()


async def aborts_of(answer: str, *, leaves: bool) -> list[str]:
    """By uvicorn's own protocol. The client leaves before it is answered, or is still there."""
    application = Application(answer, waits=leaves)
    config = uvicorn.Config(application, http="httptools", lifespan="off", log_level="error")
    config.load()
    serve = asyncio.get_running_loop().create_server(
        lambda: HttpToolsProtocol(config, ServerState(), {}), "127.0.0.1", 0
    )
    async with await serve as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        if not leaves:
            await reader.read()
        writer.close()
        await application.answered.wait()
    return application.aborted


async def aborts_of_answers() -> dict[str, list[str]]:
    answer = _dumped({"id": "cmpl", "kv_transfer_params": PARAMS})
    return {
        "the client has left": await aborts_of(answer, leaves=True),
        "the client is there": await aborts_of(answer, leaves=False),
        "nothing is kept": await aborts_of(_dumped({"kv_transfer_params": None}), leaves=True),
        "kept by a decode": await aborts_of(_dumped({"kv_transfer_params": {"do_remote_prefill": False}}), leaves=True),
        "an event of a stream": await aborts_of(f"data: {answer}", leaves=True),
    }


def _dumped(answer: dict[str, Any]) -> str:
    """As Starlette does it."""
    return json.dumps(answer, separators=(",", ":"))


def main() -> None:
    results: dict[str, Any] = {
        "verdict": judge(abandoned_kv.PATCH, versions_here()).outcome,
        "unpatched": look(),
        "sent": {"unpatched": aborts_that_are_sent()},
    }
    abandoned_kv.apply()
    abandoned_kv.apply()
    results["patched"] = look()
    results["sent"]["patched"] = aborts_that_are_sent()
    results["answers"] = asyncio.run(aborts_of_answers())
    print(json.dumps(results))


if __name__ == "__main__":
    main()
