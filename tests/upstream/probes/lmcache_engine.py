"""An engine around the real Scheduler and the real scheduler role of LMCacheMPConnector: blocks have contents here.

Every token's place in a block holds the name of the prefix that ends there, as KV does. A step checks that what it
attends to is there, a store that what it saves is computed, and a load writes what the chunks have, or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.upstream.probes.lmcache_ledger import Ledger, LedgerAdapter, install
from tests.upstream.scheduler_lab import Lab
from tests.upstream.scheduler_lab import multi as multi_config

BLOCK = 16
OURS = "pdserve.connectors.lmcache_mp"


class Engine:
    """`module`: where vLLM finds the connector's class. `extra`: its extra config. `multi`: it is the only child of
    our MultiConnector, which looks after lookups too."""

    fails: Callable[[str], bool] | None = None
    """Whether a retrieve of this request fails: its worker names all blocks of it, as LMCache's does."""
    _broken: frozenset[int] = frozenset()

    def __init__(
        self,
        module: str,
        extra: dict[str, Any],
        *,
        num_blocks: int,
        batch: int = 512,
        multi: bool = False,
        scheduler: Mapping[str, Any] | None = None,
    ) -> None:
        LedgerAdapter.ledger = self.ledger = Ledger()
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        if multi:
            connector = {**multi_config(connector), "kv_connector_module_path": "pdserve.connectors.multi"}
        self.lab = Lab(num_blocks=num_blocks, max_num_batched_tokens=batch, connector=connector, scheduler=scheduler)
        self.connector = self.lab.connector._connectors[0] if multi else self.lab.connector
        self.places: dict[tuple[int, int], int] = {}
        """(block, place in it) -> name of the prefix."""
        self.loads: list[tuple[str, int, int]] = []
        """(request, first token, end) of every retrieve, without what it skips."""
        self.stored = 0
        """Tokens in store operations."""
        self.computed = 0
        self.steps = 0
        self._arriving: set[str] = set()
        self._saving: set[str] = set()

    def add(self, name: str, prompt: list[int], max_tokens: int = 2) -> Any:
        return self.lab.add(name, prompt, max_tokens=max_tokens)

    def abort(self, name: str) -> None:
        known = self.lab.get(name) is not None
        self.lab.abort(name)
        if known and self.lab.get(name) is not None:
            self._saving.add(name)

    def step(self) -> None:
        arrived, saved, broken = self._arriving, self._saving, self._broken
        self._arriving, self._saving, self._broken = set(), set(), frozenset()
        running = set(self.lab.scheduler.requests)
        output = self.lab.schedule()
        metadata = self._of_lmcache(output.kv_connector_metadata)
        self._work(metadata, "RETRIEVE")
        for name, tokens in output.num_scheduled_tokens.items():
            self._compute(name, tokens, self._before(output, name))
        self._work(metadata, "STORE")
        # A load whose request was aborted is reported all the same. Never both in one step: the Scheduler asserts
        # then (vllm#43226), whatever the connector.
        arrived = {name for name in arrived if self.lab.get(name) is not None}
        self.lab.update(
            output,
            finished_recving=arrived,
            finished_sending={name for name in saved - arrived if self.lab.get(name) is not None},
            invalid_block_ids=broken,
        )
        ended = {name for name in running if self.lab.get(name) is not None and self.lab.get(name).is_finished()}
        self._saving |= ended - saved
        self.steps += 1

    def run(self, limit: int = 400) -> bool:
        """Steps until nothing is left, and a few more, as for another request; False: it does not get there."""
        for _ in range(limit):
            if not self.lab.scheduler.requests:
                for _ in range(5):
                    self.step()
                return True
            self.step()
        return False

    def _of_lmcache(self, metadata: Any) -> Any:
        """LMCache's own part of what the scheduler sends to the workers."""
        return metadata.metadata[0] if hasattr(metadata, "metadata") else metadata

    def _before(self, output: Any, name: str) -> int:
        for new in output.scheduled_new_reqs:
            if new.req_id == name:
                return int(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        return int(cached.num_computed_tokens[list(cached.req_ids).index(name)])

    def _compute(self, name: str, count: int, before: int) -> None:
        request = self.lab.get(name)
        names = _prefix_names(list(request.all_token_ids)[: before + count])
        blocks = self.lab.blocks(name)
        for position in range(before):
            there = self.places.get((blocks[position // BLOCK], position % BLOCK))
            assert there == names[position], f"{name} attends at {position} to what is not its own"
        self._write(blocks, names, before, len(names))
        self.computed += count

    def _work(self, metadata: Any, direction: str) -> None:
        for request in metadata.requests:
            if request.direction != direction:
                continue
            op = request.op
            nested = op.block_ids and isinstance(op.block_ids[0], list)
            blocks = list(op.block_ids[0] if nested else op.block_ids)
            assert len(blocks) * BLOCK == op.end - op.start, f"{len(blocks)} blocks for tokens {op.start} to {op.end}"
            names = _prefix_names(list(op.token_ids)[: op.end])
            if direction == "RETRIEVE":
                self._retrieve(request.request_id, op, blocks, names)
            else:
                self._store(op, blocks, names)

    def _retrieve(self, name: str, op: Any, blocks: list[int], names: list[int]) -> None:
        self.ledger.retrieve(op.token_ids, op.start, op.end)
        self._arriving.add(name)
        first = op.start + op.skip_first_n_tokens
        failed = self.fails is not None and self.fails(name)
        for position in range(first, op.end):
            index = position - op.start
            self.places[blocks[index // BLOCK], index % BLOCK] = 0 if failed else names[position]
        if failed:
            self._broken |= set(blocks)
        else:
            self.loads.append((name, first, op.end))

    def _store(self, op: Any, blocks: list[int], names: list[int]) -> None:
        for index in range(op.end - op.start):
            there = self.places.get((blocks[index // BLOCK], index % BLOCK))
            assert there == names[op.start + index], f"stores at {op.start + index} what is not computed"
        self.ledger.store(op.token_ids, op.start, op.end)
        self.stored += op.end - op.start

    def _write(self, blocks: Sequence[int], names: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            self.places[blocks[position // BLOCK], position % BLOCK] = names[position]


def upstream_module() -> str:
    """Where upstream's own class is, with the ledger behind it."""
    return install()


def _prefix_names(tokens: list[int]) -> list[int]:
    names, last = [], 0
    for token in tokens:
        last = hash((last, token))
        names.append(last)
    return names
