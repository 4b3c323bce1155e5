"""The real Scheduler of whatever vLLM is first on the path, without workers, weights or a GPU.

lab = Lab(num_blocks=20)
lab.add("a", 64, {"mock": {"matched": 48}})
lab.step()                              # the load is started
lab.step(finished_recving={"a"})

A KV connector of vLLM's scheduler role whose answers a test writes, and which keeps book of what it was told.

What it answers about a request is in the request's own kv_transfer_params, under the mock's name (extra config `name`,
"mock" by default), so that several of them can stand under a MultiConnector:

    {"mock": {"matched": 96, "load_async": True, "defers": 1, "delay_free": True}}

`matched` counts tokens of the prompt that it holds, from its begin; `cap` limits those of one load. `defers`: polls
answered "not yet" before. `offers_again`: a load that has failed changes none of its answers, as with a peer that still
has the KV.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.upstream.engine_config import engine_config, kv_cache_config

__all__ = ["MOCK", "KVConnectorOutput", "Lab", "RequestStatus", "Scheduler", "connector_report", "mock", "multi"]

MOCK = "MockConnector"
EOS = 2


KVConnectorFactory.register_connector(MOCK, __name__, MOCK)


def mock(name: str = "mock", **extra: Any) -> dict[str, Any]:
    """A kv-transfer-config of one mock; also a child's entry under a MultiConnector."""
    return {"kv_connector": MOCK, "kv_role": "kv_both", "kv_connector_extra_config": {"name": name, **extra}}


def multi(*children: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """A kv-transfer-config of a MultiConnector; give `kv_connector_module_path` by updating the answer."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [dict(child) for child in children], **extra},
    }


class Lab:
    """A Scheduler with its connector, and an engine's steps.

    `connector`: a kv-transfer-config (any connector that has a scheduler role); one mock by default. `sliding_window`:
    adds a second KV group of that window, in tokens. `recurrent_state`: adds one of recurrent state.
    `async_scheduling`: the AsyncScheduler (steps are not overlapped unless the caller
    overlaps `schedule` and `update`). `scheduler`: fields of SchedulerConfig.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 16,
        connector: Mapping[str, Any] | None = None,
        load_failure_policy: str = "recompute",
        sliding_window: int | None = None,
        recurrent_state: bool = False,
        async_scheduling: bool = False,
        prefix_caching: bool = True,
        scheduler: Mapping[str, Any] | None = None,
    ) -> None:
        init_none_hash(sha256)
        self.block_size = block_size
        self.config = engine_config(
            block_size=block_size,
            transfer={"kv_load_failure_policy": load_failure_policy, **(connector or mock())},
            prefix_caching=prefix_caching,
            scheduler={
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "async_scheduling": async_scheduling,
                **(scheduler or {}),
            },
        )
        self.config.cache_config.num_gpu_blocks = num_blocks
        # A CPU's platform turns it off; what is looked at here is a device's scheduler.
        self.config.scheduler_config.async_scheduling = async_scheduling
        if recurrent_state:
            self.config.cache_config.mamba_cache_mode = "align"
            self.config.cache_config.mamba_block_size = block_size
        self.scheduler: Any = (AsyncScheduler if async_scheduling else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=kv_cache_config(num_blocks, block_size, sliding_window, recurrent_state=recurrent_state),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            log_stats=True,
        )
        self.outputs: dict[str, list[int]] = {}
        """Tokens that came out, of each request, finished ones too."""
        self.finish_reasons: dict[str, str] = {}
        self._tokens = itertools.count(1000)

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def book(self) -> Book:
        """Of the only mock."""
        (book,) = self.books
        return book

    @property
    def books(self) -> list[Book]:
        """Of all mocks."""
        connectors = getattr(self.connector, "_connectors", [self.connector])
        return [each.book for each in connectors if isinstance(each, MockConnector)]

    @property
    def kept_by_the_connector(self) -> dict[str, int]:
        """How much a MultiConnector keeps of requests, by what keeps it; nothing of others."""
        connector = self.connector
        kept = {
            "choices": getattr(connector, "_requests_to_connector", {}),
            "answers": getattr(connector, "_answers", {}),
            "waits": getattr(connector, "_waiting_since", {}),
            "unanswered": getattr(connector, "_unanswered", {}),
            "loads": connector._counts._loading if hasattr(connector, "_counts") else {},
        }
        return {name: len(value) for name, value in kept.items() if value}

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def busy(self) -> bool:
        """Tell whether any request is not finished."""
        return bool(self.scheduler.has_unfinished_requests())

    def request(
        self,
        request_id: str,
        tokens: int | list[int],
        kv_transfer_params: dict[str, Any] | None = None,
        *,
        max_tokens: int = 4,
        **sampling: Any,
    ) -> Any:
        """A Request that is not added yet. `tokens`: the prompt's, or how many of its own to make up."""
        prompt = [next(self._tokens) for _ in range(tokens)] if isinstance(tokens, int) else tokens
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        parameters.update_from_generation_config({}, EOS)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=parameters,
            pooling_params=None,
            mm_features=None,
            block_hasher=get_request_block_hasher(self.block_size, sha256),
        )
        request.kv_transfer_params = kv_transfer_params
        return request

    def add(self, *asked: Any, **sampling: Any) -> Any:
        """Add a request to the scheduler: what `request` takes."""
        request = self.request(*asked, **sampling)
        self.scheduler.add_request(request)
        return request

    def get(self, request_id: str) -> Any:
        """The scheduler's request, or None when it is gone."""
        return self.scheduler.requests.get(request_id)

    def status(self, request_id: str) -> str:
        """Name of its RequestStatus; GONE."""
        request = self.get(request_id)
        return "GONE" if request is None else str(request.status.name)

    def blocks(self, request_id: str, group: int = 0) -> list[int]:
        """Ids of the blocks that a request holds."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[group])

    def abort(self, *request_ids: str) -> None:
        """As a client that goes away."""
        self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        """One schedule(). Its output goes to `update`."""
        output = self.scheduler.schedule()
        # What the model would sample from: decided now, because an overlapping step moves num_computed_tokens on.
        output.lab_samples = {
            name
            for name in output.num_scheduled_tokens
            if (request := self.get(name)).num_computed_tokens >= request.num_tokens
        }
        return output

    def update(
        self,
        output: Any,
        *,
        finished_recving: Iterable[str] = (),
        finished_sending: Iterable[str] = (),
        invalid_block_ids: Iterable[int] = (),
        failed_recving: Iterable[str] = (),
        token: int = 7,
        **connector_output: Any,
    ) -> Any:
        """Return what the workers answer to a scheduled step. `failed_recving` exists from vLLM 0.30 on."""
        report = connector_report(
            finished_recving=set(finished_recving) or None,
            finished_sending=set(finished_sending) or None,
            invalid_block_ids=set(invalid_block_ids),
            failed_recving=set(failed_recving),
            **connector_output,
        )
        names = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[token] if name in output.lab_samples else [] for name in names],
            kv_connector_output=report,
        )
        produced = self.scheduler.update_from_output(output, answer)
        for outputs in produced.values():
            for request_output in outputs.outputs:
                self.outputs.setdefault(request_output.request_id, []).extend(request_output.new_token_ids)
                if request_output.finish_reason is not None:
                    self.finish_reasons[request_output.request_id] = str(request_output.finish_reason)
        return produced

    def step(self, **report: Any) -> Any:
        """One step of the engine: schedule, and the workers' answer (keywords of `update`). The SchedulerOutput."""
        output = self.schedule()
        self.update(output, **report)
        return output

    def loading(self) -> set[str]:
        """Ids of the requests that wait for their KV, arrived or not."""
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return {name for name, request in self.scheduler.requests.items() if request.status == waiting}

    def run(self, steps: int = 200) -> int:
        """Steps until nothing is unfinished, each load arriving a step after it began. How many it took.

        Raises AssertionError when `steps` do not suffice.
        """
        for taken in range(steps):
            if not self.busy:
                return taken
            self.step(finished_recving=self.loading() - self.scheduler.finished_recving_kv_req_ids)
        raise AssertionError(f"still unfinished after {steps} steps: {sorted(self.scheduler.requests)}")


def connector_report(**values: Any) -> Any:
    """A KVConnectorOutput with those of the fields that this version has; a value that it lacks must be empty."""
    known = {each.name for each in fields(KVConnectorOutput)}
    lacking = {name for name, value in values.items() if name not in known and value}
    if lacking:
        raise ValueError(f"this vLLM's KVConnectorOutput has no {', '.join(sorted(lacking))}")
    return KVConnectorOutput(**{name: value for name, value in values.items() if name in known})


@contextmanager
def group_of_one(module: ModuleType, **stand_ins: Any) -> Iterator[None]:
    """A worker half of a connector can be made: the tensor-parallel group that its module asks has one rank.
    `stand_ins`: for what else of the module there may be."""
    stand_ins |= {
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_pp_group": lambda: SimpleNamespace(rank_in_group=0),
    }
    there = {name: value for name, value in stand_ins.items() if hasattr(module, name)}
    with patch.multiple(module, **there):
        yield


def worker_report(worker: Any, output: Any, started: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Return what a worker half answers to a scheduled step, as keywords of `Lab.update`. `started`: is called when it
    has taken the step in."""
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
    worker.start_load_kv(SimpleNamespace(attn_metadata=None))
    started()
    failed: set[str] = set()
    if hasattr(worker, "get_transfer_results"):
        results = worker.get_transfer_results(output.finished_req_ids)
        sent, received, failed = results.finished_sending, results.finished_recving, results.failed_recving
    else:
        sent, received = worker.get_finished(output.finished_req_ids)
    invalid = worker.get_block_ids_with_load_errors()
    worker.clear_connector_metadata()
    ends = {"finished_sending": sent, "finished_recving": received, "failed_recving": failed}
    return {"invalid_block_ids": invalid, **{name: set(ended or ()) for name, ended in ends.items()}}


@dataclass
class Load:
    """An asynchronous load that was started; its blocks belong to the transfer until it has ended."""

    request_id: str
    blocks: tuple[tuple[int, ...], ...]
    """Ids of each group's blocks of the request, at the time of the start."""
    tokens: int


@dataclass
class Book:
    """What a mock was told, and what it still holds."""

    polls: Counter[str] = field(default_factory=Counter)
    loads: list[Load] = field(default_factory=list)
    """Every asynchronous load that was started, in order."""
    locks: set[str] = field(default_factory=set)
    """Requests for which a lookup has locked entries: from a hit until its load was given or refused, or the end."""
    finished: list[str] = field(default_factory=list)
    delayed: list[str] = field(default_factory=list)
    """Requests whose blocks it asked to keep until it reports them in finished_sending."""
    outputs: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    """(finished_recving, finished_sending) of every update_connector_output."""
    overdue: set[str] = field(default_factory=set)
    """Added to finished_sending by its next update_connector_output, as MoRIIO does with sends that took too long."""
    failed: set[str] = field(default_factory=set)
    """Requests for which it answers 0 from now on, as LMCache does after a failed load; see `offers_again`."""


class MockConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module's text. `book` is the test's window."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        assert role == KVConnectorRole.SCHEDULER
        self.name: str = vllm_config.kv_transfer_config.get_from_extra_config("name", "mock")
        self.book = Book()

    def script(self, request: Any) -> dict[str, Any]:
        """Return what the test wrote for this request and this mock."""
        return dict((request.kv_transfer_params or {}).get(self.name, {}))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        book, script = self.book, self.script(request)
        book.polls[request.request_id] += 1
        if book.polls[request.request_id] <= script.get("defers", 0):
            return None, False
        if request.request_id in book.failed and not script.get("offers_again"):
            return 0, False
        load_async = bool(script.get("load_async", True))
        # A load that the step waits for has to leave a token to compute.
        held = min(script.get("matched", 0), request.num_tokens - (0 if load_async else 1))
        external = held - num_computed_tokens
        external = min(external, script.get("cap") or external)
        if external <= 0:
            return 0, False
        book.locks.add(request.request_id)
        return external, load_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        book, name = self.book, request.request_id
        book.locks.discard(name)
        if num_external_tokens > 0 and self.script(request).get("load_async", True):
            groups = tuple(tuple(group) for group in blocks.get_block_ids())
            book.loads.append(Load(name, groups, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        received, sent = connector_output.finished_recving, connector_output.finished_sending
        self.book.outputs.append((frozenset(received or ()), frozenset(sent or ())))
        if self.book.overdue:
            connector_output.finished_sending = {*(sent or ()), *self.book.overdue}
            self.book.overdue.clear()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        book, name = self.book, request.request_id
        book.finished.append(name)
        book.locks.discard(name)
        delay = bool(self.script(request).get("delay_free", False))
        if delay:
            book.delayed.append(name)
        return delay, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def _of_a_worker(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a worker's method")

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _of_a_worker
