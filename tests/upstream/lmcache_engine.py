"""An engine around the real Scheduler and the real scheduler role of LMCacheMPConnector: blocks have contents here.

Every token's place in a block holds the name of the prefix that ends there, as KV does. A step checks that what it
attends to is there, a store that what it saves is computed, and a load writes what the chunks have, or fails.

A ledger stands in for the server, and keeps strict book of chunks and of the read locks of each: a lookup takes one on
every chunk of its hit; only a retrieve or a release gives it back, and giving back what is not locked is an error. The
locks are anonymous there too, so one release too many would take away another reader's.
"""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pdserve.patches.scheduler.load_timeout import ATTRIBUTE
from tests.upstream.scheduler_lab import Lab, MockConnector

BLOCK, CHUNK = 16, 64
OURS, THEIRS = "pdserve.connectors.lmcache_mp", "lmcache.integration.vllm.lmcache_mp_connector"
"""Where vLLM finds a class of the connector."""
CAP, LEAST = "pdserve.max_tokens_per_load", "pdserve.min_load_tokens"


def leaf(module: str, **extra: Any) -> dict[str, Any]:
    """A kv-transfer-config of LMCache; also a child's entry under a MultiConnector."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class Ledger:
    """Chunks, named by all tokens up to their end, and their read locks."""

    def __init__(self) -> None:
        self.chunks: set[int] = set()
        self.locks: Counter[int] = Counter()
        self.lookups = 0
        self.sessions_ended = 0

    @property
    def locked(self) -> int:
        """Read locks that nobody has given back."""
        return sum(self.locks.values())

    def store(self, tokens: Sequence[int], start: int, end: int) -> None:
        self.chunks.update(_chunk_names(tokens, start, end))

    def lookup(self, tokens: Sequence[int]) -> int:
        """Tokens found: whole chunks from the begin on. Locks them."""
        self.lookups += 1
        stored_tokens = 0
        for name in _chunk_names(tokens, 0, len(tokens) // CHUNK * CHUNK):
            if name not in self.chunks:
                break
            self.locks[name] += 1
            stored_tokens += CHUNK
        return stored_tokens

    def release(self, tokens: Sequence[int], start: int, end: int) -> None:
        """As FREE_LOOKUP_LOCKS: a chunk that `end` cuts keeps its lock, one that `start` cuts loses it."""
        self._drop(_chunk_names(tokens, start // CHUNK * CHUNK, end // CHUNK * CHUNK))

    def retrieve(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Reads chunks; they must exist and be locked, and are locked by one less afterwards."""
        assert start % CHUNK == end % CHUNK == 0, (start, end)
        names = list(_chunk_names(tokens, start, end))
        assert set(names) <= self.chunks, "retrieves what is not there"
        self._drop(names)

    def _drop(self, names: Iterable[int]) -> None:
        for name in names:
            assert self.locks[name] > 0, "gives back a lock that nobody holds"
            self.locks[name] -= 1


class LedgerAdapter:
    """What the connector's scheduler role needs of LMCache's adapter.

    `slow`: a lookup, whose locks are taken at once, is answered at the poll after so many others. `strict`: what it has
    locked can be given back only once it is answered, and while its session lives.
    """

    ledger: ClassVar[Ledger] = Ledger()
    slow: ClassVar[int] = 0
    strict: ClassVar[bool] = False
    polls: ClassVar[Counter[str]] = Counter()

    def __init__(self, block_size: int) -> None:
        self.lmcache_tokens_per_chunk = CHUNK
        self.tp_size = self.world_size = 1
        self.is_healthy = True
        self._block_size = block_size
        self.asked: dict[str, tuple[int, int]] = {}
        """Request -> tokens of its hit, and polls that are left until it is answered."""
        self._answers: dict[str, int] = {}
        self._ended: set[str] = set()

    def num_blocks_per_chunk(self) -> int:
        return CHUNK // self._block_size

    def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int], **_: Any) -> None:
        if request_id not in self.asked:
            self.asked[request_id] = (self.ledger.lookup(token_ids), self.slow)

    def check_lookup_result(self, request_id: str) -> int | None:
        self.polls[request_id] += 1
        if request_id not in self.asked:
            return self._answers.get(request_id, 0)
        if request_id not in self._answers:
            stored_tokens, polls_left = self.asked[request_id]
            if polls_left:
                self.asked[request_id] = (stored_tokens, polls_left - 1)
                return None
            self._answers[request_id] = stored_tokens
        return self._answers[request_id]

    def cleanup_lookup_result(self, request_id: str) -> None:
        self.asked.pop(request_id, None)
        self._answers.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        self.ledger.sessions_ended += 1
        self._ended.add(request_id)

    def report_block_allocations(self, records: object) -> None: ...

    def shutdown(self) -> None: ...

    def free_lookup_locks(
        self, token_ids: list[int], start: int, end: int, request_id: str, *_: Any, **__: Any
    ) -> None:
        if self.strict:
            assert request_id not in self._ended, "the session is over: the server has forgotten what was locked"
            assert request_id in self._answers or request_id not in self.asked, "the lookup is still running"
        self.ledger.release(token_ids, start, end)


class Engine:
    """`connector`: LMCache's alone, or with others under a MultiConnector; what a mock there loads has contents, too.

    A step takes a second. `fails`: whether a retrieve of that request fails: its worker names all blocks of it, as
    LMCache's does. `hanging`: names of which a retrieve writes nothing and does not end until `end`.
    """

    def __init__(
        self,
        connector: Mapping[str, Any],
        *,
        num_blocks: int = 400,
        batch: int = 512,
    ) -> None:
        _install()
        LedgerAdapter.ledger = self.ledger = Ledger()
        LedgerAdapter.polls.clear()
        self.lab = Lab(num_blocks=num_blocks, max_num_batched_tokens=batch, connector=connector)
        self.steps = 0
        if (timeout := getattr(self.lab.scheduler, ATTRIBUTE, None)) is not None:
            timeout.clock = lambda: float(self.steps)
        self._children = getattr(self.lab.connector, "_connectors", None)
        children = self._children or [self.lab.connector]
        [self._number] = [at for at, each in enumerate(children) if hasattr(each, "request_trackers")]
        self.connector = children[self._number]
        self.mock: Any = next((each for each in children if isinstance(each, MockConnector)), None)
        self.fails: Callable[[str], bool] = lambda _: False
        self.hanging: set[str] = set()
        self.under_way: dict[str, tuple[Any, list[int], list[int]]] = {}
        self.free_at_start = self.lab.free_blocks
        self.places: dict[tuple[int, int], int] = {}
        """(block, place in it) -> name of the prefix."""
        self.loads: list[tuple[str, int, int]] = []
        """(request, first token, end) of every retrieve, without what it skips."""
        self.stored = 0
        """Tokens in store operations."""
        self.computed = 0
        self.arriving: set[str] = set()
        self._saving: set[str] = set()
        self._broken: set[int] = set()
        self._ended: set[str] = set()
        self._loads_of_mock = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 2) -> Any:
        return self.lab.add(name, prompt, max_tokens=max_tokens)

    def abort(self, name: str) -> None:
        known = self.lab.get(name) is not None
        self.lab.abort(name)
        if known and self.lab.get(name) is not None:
            self._saving.add(name)

    def end(self, name: str) -> None:
        """A hanging transfer writes now, and is reported with the next step; whoever has the blocks by then."""
        self._finish_load(name, *self.under_way.pop(name))
        self.arriving.discard(name)
        self._ended.add(name)

    def step(self) -> None:
        arrived, saved, broken, late = self.arriving, self._saving, self._broken, self._ended
        self.arriving, self._saving, self._broken, self._ended = set(), set(), set(), set()
        running = set(self.lab.scheduler.requests)
        output = self.lab.schedule()
        metadata = output.kv_connector_metadata
        if self._children:
            metadata = metadata.metadata[self._number]
        if self.mock is not None:
            self._load_from_mock()
        self._work(metadata, "RETRIEVE")
        for name, tokens in output.num_scheduled_tokens.items():
            self._compute(name, tokens, computed_before(output, name))
        self._work(metadata, "STORE")
        # A load whose request was aborted is reported all the same. Never both in one step: the Scheduler asserts then
        # (vllm#43226), whatever the connector.
        live = {name for name in arrived if self.lab.get(name) is not None}
        self.lab.update(
            output,
            finished_recving=live | late,
            finished_sending={name for name in saved - live if self.lab.get(name) is not None},
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

    def _load_from_mock(self) -> None:
        for load in self.mock.book.loads[self._loads_of_mock :]:
            request = self.lab.get(load.request_id)
            end = min(self.mock.script(request)["matched"], request.num_tokens)
            names = _prefix_names(list(request.all_token_ids)[:end])
            self._write(list(load.blocks[0]), names, end - load.tokens, end)
            self.arriving.add(load.request_id)
        self._loads_of_mock = len(self.mock.book.loads)

    def _compute(self, name: str, tokens: int, before: int) -> None:
        names = _prefix_names(list(self.lab.get(name).all_token_ids)[: before + tokens])
        blocks = self.lab.blocks(name)
        for position in range(before):
            there = self.places.get((blocks[position // BLOCK], position % BLOCK))
            assert there == names[position], f"{name} attends at {position} to what is not its own"
        self._write(blocks, names, before, len(names))
        self.computed += tokens

    def _work(self, metadata: Any, direction: str) -> None:
        for request in metadata.requests:
            if request.direction != direction:
                continue
            op = request.op
            blocks = list(op.block_ids[0])
            assert len(blocks) * BLOCK == op.end - op.start, f"{len(blocks)} blocks for tokens {op.start} to {op.end}"
            names = _prefix_names(list(op.token_ids)[: op.end])
            if direction == "STORE":
                self._store(op, blocks, names)
            elif request.request_id in self.hanging:
                assert request.request_id not in self.under_way, "a second load of the same id"
                self.under_way[request.request_id] = (op, blocks, names)
            else:
                self._finish_load(request.request_id, op, blocks, names)

    def _finish_load(self, name: str, op: Any, blocks: list[int], names: list[int]) -> None:
        self.ledger.retrieve(op.token_ids, op.start, op.end)
        self.arriving.add(name)
        first = op.start + op.skip_first_n_tokens
        failed = self.fails(name)
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


def computed_before(output: Any, name: str) -> int:
    """Of a request's tokens those that are computed before this step."""
    for new in output.scheduled_new_reqs:
        if new.req_id == name:
            return int(new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    return int(cached.num_computed_tokens[list(cached.req_ids).index(name)])


def _install() -> None:
    """Makes upstream's connector use the stand-in."""
    module: Any = importlib.import_module(THEIRS)

    def adapter(*_: object, **arguments: Any) -> LedgerAdapter:
        return LedgerAdapter(arguments.get("vllm_block_size", 16))

    module.LMCacheMPSchedulerAdapter = adapter


def _chunk_names(tokens: Sequence[int], start: int, end: int) -> Iterable[int]:
    return [hash(tuple(tokens[: begin + CHUNK])) for begin in range(start, end, CHUNK)]


def _prefix_names(tokens: list[int]) -> list[int]:
    names, last = [], 0
    for token in tokens:
        last = hash((last, token))
        names.append(last)
    return names


class Workload:
    """Random requests with common prefixes on too few blocks: with aborts, preemptions, evictions, and lookups that
    take their time.

    `bounded`: with a cap and a minimum. `failing`: the share of loads that fail; `hanging`: of requests whose loads
    hang and end at any time. `batches`: tokens of a step, one is drawn; what is no multiple of a block leaves blocks
    computed in part.
    """

    def __init__(
        self,
        seed: int,
        module: str = OURS,
        *,
        bounded: bool = True,
        failing: float = 0,
        hanging: float = 0,
        batches: Sequence[int] = (64, 256),
        **extra: Any,
    ) -> None:
        self.dice = random.Random(seed)
        cap = self.dice.choice([64, 128, 256, 512])
        least = self.dice.choice([0, 0, 64, 128])
        extra |= {CAP: cap, LEAST: min(cap, least)} if bounded else {}
        LedgerAdapter.slow = self.dice.choice([0, 0, 1, 3])
        num_blocks = self.dice.randint(48, 90)
        self.engine = Engine(leaf(module, **extra), num_blocks=num_blocks, batch=self.dice.choice(batches))
        if failing:
            self.engine.fails = lambda _: self.dice.random() < failing
        self.engine.hanging = {f"r{number}" for number in range(10) if self.dice.random() < hanging}
        self.stems = [[self.dice.randrange(1000) for _ in range(640)] for _ in range(2)]
        for stem in self.stems:
            self.engine.ledger.store(stem, 0, self.dice.randrange(0, 641, CHUNK))
        self.preempted = 0

    def run(self) -> str:
        """ "done" or "deadlock"; whatever is wrong is an AssertionError."""
        for name in (f"r{number}" for number in range(10)):
            stem = self.dice.choice(self.stems)[: self.dice.randrange(0, 640)]
            tail = [self.dice.randrange(1000) for _ in range(self.dice.randrange(1, 60))]
            self.engine.add(name, stem + tail, max_tokens=self.dice.choice([1, 4, 40]))
            for _ in range(self.dice.choice([0, 1, 4])):
                self.step()
            if self.dice.random() < 0.15:
                self.engine.abort(f"r{self.dice.randrange(10)}")
        for name in sorted(self.engine.under_way):
            self.engine.end(name)
        self.engine.hanging.clear()
        verdict = "done" if self._drain() else "deadlock"
        for name in list(self.engine.lab.scheduler.requests):
            self.engine.abort(name)
        assert self._drain(), "aborted requests stay"
        for _ in range(5):
            self.step()
        assert self.engine.ledger.locked == 0, f"{self.engine.ledger.locked} locks left"
        assert not self.engine.connector.request_trackers
        assert self.engine.lab.free_blocks == self.engine.free_at_start, "blocks are lost"
        return verdict

    def step(self) -> None:
        running = {name: request.status.name for name, request in self.engine.lab.scheduler.requests.items()}
        self.engine.step()
        self.preempted += sum(
            before == "RUNNING" and self.engine.lab.status(name) == "PREEMPTED" for name, before in running.items()
        )
        if self.engine.under_way and self.dice.random() < 0.1:
            self.engine.end(self.dice.choice(sorted(self.engine.under_way)))
        if self.dice.random() < 0.1:
            free = sorted(name for name in self.engine.ledger.chunks if not self.engine.ledger.locks[name])
            self.engine.ledger.chunks -= set(self.dice.sample(free, len(free) // 4))

    def _drain(self) -> bool:
        idle = 0
        before: tuple[int, ...] = ()
        while self.engine.lab.scheduler.requests and idle < 60:
            self.step()
            now = (self.engine.computed, len(self.engine.loads), len(self.engine.lab.scheduler.requests))
            idle, before = idle + 1 if before == now else 0, now
        return not self.engine.lab.scheduler.requests


def workloads(number: int, module: str = OURS, **how: Any) -> dict[str, Any]:
    """Return what becomes of each; keywords of Workload."""
    verdicts: Counter[str] = Counter()
    loads = preempted = 0
    wrong: list[str] = []
    for seed in range(number):
        workload = Workload(seed, module, **how)
        try:
            verdicts[workload.run()] += 1
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}")
        loads += len(workload.engine.loads)
        preempted += workload.preempted
    LedgerAdapter.slow = 0
    return {"verdicts": verdicts, "loads": loads, "preempted": preempted, "wrong": wrong}
