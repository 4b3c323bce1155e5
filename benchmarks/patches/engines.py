"""A prefill and a decode engine under a steady load: the real Scheduler and connectors, no workers and no model.

Each step takes in and ends as many requests as the one before, so that any step is like any other. What is timed is
Scheduler.add_request, schedule and update_from_output; the requests, and the workers' answers, are made in between.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lmcache.integration.vllm import lmcache_mp_connector
from vllm.v1.outputs import ModelRunnerOutput

from tests.upstream.scheduler_lab import Lab, connector_report, multi

RUNNING, PARKED, PENDING = 256, 128, 200
BLOCKS = 16_384
CHUNK = 64
"""Tokens of one of LMCache's chunks."""
PROMPT, PIECE = 512, 16
"""Of a prefill, and what each step computes of it: a request is there for 32 steps, so eight come and go in each."""
TOKENS = 256
"""Of an answer: in each step one request comes and one goes."""
OURS_MULTI, OURS_LMCACHE = "pdserve.connectors.multi", "pdserve.connectors.lmcache_mp"
TIMEOUT = {"load_timeout_seconds": 3600.0}


@dataclass(frozen=True)
class Scenario:
    """One kind of step."""

    name: str
    text: str
    make: Callable[[Collection[str]], Engine]
    """Given the names of the patches that are applied."""


class Server:
    """Stands in for what asks an LMCache server: it has nothing, and does not answer about requests named "pending".

    As cheap as can be, so that what the patches add is compared with less than a real step takes.
    """

    lmcache_tokens_per_chunk = CHUNK
    tp_size = world_size = 1
    is_healthy = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def num_blocks_per_chunk(self) -> int:
        return CHUNK // self._block_size

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        token_ids: list[int],
        cache_salt: str = "",
        request_configs: dict[str, Any] | None = None,
        reserve_last_token: bool = False,
    ) -> None: ...

    def check_lookup_result(self, request_id: str) -> int | None:
        return None if request_id.startswith("pending") else 0

    def cleanup_lookup_result(self, request_id: str) -> None: ...

    def end_session(self, request_id: str) -> None: ...

    def free_lookup_locks(
        self,
        token_ids: list[int],
        start: int,
        end: int,
        request_id: str,
        cache_salt: str = "",
        request_configs: dict[str, Any] | None = None,
    ) -> None: ...

    def report_block_allocations(self, records: object) -> None: ...

    def shutdown(self) -> None: ...


class Engine(ABC):
    """Ready to step: the load is already what it will be."""

    def __init__(self, connector: dict[str, Any], scheduler: dict[str, Any] | None = None) -> None:
        self.lab = Lab(
            num_blocks=BLOCKS,
            max_num_batched_tokens=8192,
            max_num_seqs=2 * RUNNING,
            connector=connector,
            scheduler=scheduler,
        )
        self.steps = 0
        self._received: set[str] = set()
        self._sent: set[str] = set()

    @abstractmethod
    def arrivals(self) -> list[Any]:
        """Requests of the next step."""

    def step(self, clock: Callable[[], int] = time.thread_time_ns) -> int:
        """One step; how much time of the CPU the scheduler took, in ns."""
        scheduler, arrivals = self.lab.scheduler, self.arrivals()
        began = clock()
        for request in arrivals:
            scheduler.add_request(request)
        output = scheduler.schedule()
        taken = clock() - began
        names = list(output.num_scheduled_tokens)
        requests = [scheduler.requests[name] for name in names]
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if each.num_computed_tokens >= each.num_tokens else [] for each in requests],
            kv_connector_output=connector_report(
                finished_recving=self._received or None,
                finished_sending=self._sent or None,
                invalid_block_ids=set(),
                failed_recving=set(),
            ),
        )
        self._received = {request.request_id for request in arrivals if request.status.name == "WAITING_FOR_REMOTE_KVS"}
        began = clock()
        scheduler.update_from_output(output, answer)
        taken += clock() - began
        self._sent = {each.request_id for each in requests if each.is_finished()} & scheduler.requests.keys()
        self.steps += 1
        return taken

    @property
    def running(self) -> int:
        return len(self.lab.scheduler.running)


class Prefill(Engine):
    """LMCache and Mooncake, as a prefill engine of a recipe with a cache."""

    def __init__(self, applied: Collection[str], pending: int = 0) -> None:
        bounded = bool({"lmcache-load-cap", "lmcache-min-load"} & set(applied))
        lmcache: dict[str, Any] = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": OURS_LMCACHE if bounded else lmcache_mp_connector.__name__,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                **({"pdserve.max_tokens_per_load": 4096} if "lmcache-load-cap" in applied else {}),
                **({"pdserve.min_load_tokens": CHUNK} if "lmcache-min-load" in applied else {}),
            },
        }
        config = multi(lmcache, {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}, **TIMEOUT)
        if "multiconnector-selection" in applied:
            config["kv_connector_module_path"] = OURS_MULTI
        lmcache_mp_connector.LMCacheMPSchedulerAdapter = lambda *_, **arguments: Server(
            arguments.get("vllm_block_size", 16)
        )
        super().__init__(config, {"long_prefill_token_threshold": PIECE})
        for number in range(pending):
            self.lab.scheduler.add_request(self._request(f"pending-{number}"))
        # As if they had come one step after the other: the first of them end with the first step.
        for number in range(RUNNING):
            pieces = number * PROMPT // PIECE // RUNNING + 1
            self.lab.scheduler.add_request(self._request(f"first-{number}", pieces * PIECE))
        for _ in range(4):
            self.step()
        assert abs(self.running - RUNNING) <= 2 * RUNNING * PIECE // PROMPT, self.running

    def arrivals(self) -> list[Any]:
        return [self._request(f"{self.steps}-{number}") for number in range(RUNNING * PIECE // PROMPT)]

    def _request(self, name: str, tokens: int = PROMPT) -> Any:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"t-{name}"}
        return self.lab.request(name, tokens, params, max_tokens=1)


class Decode(Engine):
    """Mooncake."""

    def __init__(self, applied: Collection[str], parked: int = 0) -> None:
        transfer = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": TIMEOUT}
        super().__init__(transfer)
        for number in range(parked):
            self.lab.scheduler.add_request(self._request(f"parked-{number}", TOKENS))
        for number in range(RUNNING):
            self.lab.scheduler.add_request(self._request(f"first-{number}", number + 8))
        self._received = {f"first-{number}" for number in range(RUNNING)}
        for _ in range(12):
            self.step()
        assert abs(self.running - RUNNING) < RUNNING // 32, self.running

    def arrivals(self) -> list[Any]:
        return [self._request(f"{self.steps}", TOKENS)]

    def _request(self, name: str, max_tokens: int) -> Any:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": f"t-{name}",
            "remote_engine_id": "prefill",
            "remote_bootstrap_addr": "http://127.0.0.1:8998",
        }
        return self.lab.request(name, 128, params, max_tokens=max_tokens)


SCENARIOS = (
    Scenario("prefill", "256 prompts in pieces of 16 tokens; LMCache and Mooncake", Prefill),
    Scenario(
        "prefill-pending", "the same, and 200 requests whose lookup is not answered", lambda on: Prefill(on, PENDING)
    ),
    Scenario("decode", "256 answers, one token each; Mooncake", Decode),
    Scenario("decode-parked", "the same, and 128 requests whose KV is on its way", lambda on: Decode(on, PARKED)),
)
