"""A KV connector of vLLM's scheduler role whose answers a test writes, and which keeps book of what it was told.

What it answers about a request is in the request's own kv_transfer_params, under the mock's name (extra config `name`,
"mock" by default), so that several of them can stand under a MultiConnector:

    {"mock": {"matched": 96, "load_async": True, "defers": 1, "delay_free": True}}

`matched` counts tokens of the prompt that it holds, from its begin; `cap` limits those of one load. `defers`: polls
answered "not yet" before. `offers_again`: a load that has failed changes none of its answers, as with a peer that still
has the KV.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


@dataclass
class Load:
    """An asynchronous load that was started; its blocks belong to the transfer until it has ended."""

    request_id: str
    blocks: tuple[tuple[int, ...], ...]
    """Ids of each group's blocks of the request, at the time of the start."""
    tokens: int
    attempt: int
    """Of this request: 1, 2, ..."""


@dataclass
class Book:
    """What a mock was told, and what it still holds."""

    polls: Counter[str] = field(default_factory=Counter)
    loads: list[Load] = field(default_factory=list)
    """Every asynchronous load that was started, in order."""
    allocations: list[tuple[str, int]] = field(default_factory=list)
    """(request id, external tokens) of every update_state_after_alloc."""
    locks: set[str] = field(default_factory=set)
    """Requests for which a lookup has locked entries: from a hit until its load was given or refused, or the end."""
    finished: list[str] = field(default_factory=list)
    delayed: list[str] = field(default_factory=list)
    """Requests whose blocks it asked to keep until it reports them in finished_sending."""
    outputs: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    """(finished_recving, finished_sending) of every update_connector_output."""
    overdue: set[str] = field(default_factory=set)
    """Added to finished_sending by its next update_connector_output, as MoRIIO does with sends that took too long."""
    started: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    """Requests for which it answers 0 from now on, as LMCache does after a failed load; see `offers_again`."""


class MockMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Nothing: no worker reads it."""


class MockConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module's text. `book` is the test's window."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        assert role == KVConnectorRole.SCHEDULER
        self.name: str = vllm_config.kv_transfer_config.get_from_extra_config("name", "mock")
        self.book = Book()

    def script(self, request: Any) -> dict[str, Any]:
        """What the test wrote for this request and this mock."""
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
        book.allocations.append((name, num_external_tokens))
        book.locks.discard(name)
        if num_external_tokens > 0 and self.script(request).get("load_async", True):
            book.started[name] += 1
            groups = tuple(tuple(group) for group in blocks.get_block_ids())
            book.loads.append(Load(name, groups, num_external_tokens, book.started[name]))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return MockMetadata()

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

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise AssertionError("a worker's method")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise AssertionError("a worker's method")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise AssertionError("a worker's method")

    def wait_for_save(self) -> None:
        raise AssertionError("a worker's method")
