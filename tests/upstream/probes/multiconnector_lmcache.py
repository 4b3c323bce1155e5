"""MultiConnector over a mock and the real scheduler role of LMCacheMPConnector, with a book of LMCache's locks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

from pdserve.connectors.selection_lookups import LookupKeeper
from tests.upstream.probes import lmcache_engine
from tests.upstream.probes.lmcache_ledger import Ledger, LedgerAdapter
from tests.upstream.scheduler_lab import Lab, mock, multi

PROMPT = list(range(1000, 1512))
LMCACHE = 1


class Sessions(LedgerAdapter):
    """As the server: what a lookup has locked can be given back once it is answered, and while its session lives."""

    ended: ClassVar[set[str]] = set()

    def end_session(self, request_id: str) -> None:
        super().end_session(request_id)
        self.ended.add(request_id)

    def free_lookup_locks(
        self,
        token_ids: list[int],
        start: int,
        end: int,
        request_id: str,
        cache_salt: str = "",
        request_configs: dict[str, Any] | None = None,
    ) -> None:
        assert request_id not in self.ended, "the session is over: the server has forgotten what was locked"
        assert request_id in self._answers or request_id not in self._asked, "the lookup is still running"
        super().free_lookup_locks(token_ids, start, end, request_id, cache_salt, request_configs)


class Engine(lmcache_engine.Engine):
    """`child`: where vLLM finds the LMCache class. The mock comes first; its loads have contents, too."""

    def __init__(self, ours: bool, child: str, *, num_blocks: int = 400, batch: int = 128, weight: float = 1) -> None:
        Sessions.ledger = self.ledger = Ledger()
        Sessions.slow, Sessions.ended = 0, set()
        Sessions.polls.clear()
        leaf = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": child,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"load_weight": weight},
        }
        config = multi(mock(), leaf)
        if ours:
            config["kv_connector_module_path"] = "pdserve.connectors.multi"
        self.lab = Lab(num_blocks=num_blocks, max_num_batched_tokens=batch, connector=config)
        self.places, self.loads, self.stored, self.computed, self.steps = {}, [], 0, 0, 0
        self._arriving, self._saving, self._seen = set(), set(), 0

    @property
    def mock(self) -> Any:
        return self.lab.connector._connectors[0]

    @property
    def lmcache(self) -> Any:
        return self.lab.connector._connectors[LMCACHE]

    def _work(self, metadata: Any, direction: str) -> None:
        if direction == "RETRIEVE":
            self._load_from_mock()
        super()._work(metadata, direction)

    def _of_lmcache(self, metadata: Any) -> Any:
        return metadata.metadata[LMCACHE]

    def _load_from_mock(self) -> None:
        for load in self.mock.book.loads[self._seen :]:
            request = self.lab.get(load.request_id)
            end = min(self.mock.script(request)["matched"], request.num_tokens)
            names = lmcache_engine._prefix_names(list(request.all_token_ids)[:end])
            self._write(list(load.blocks[0]), names, end - load.tokens, end)
            self._arriving.add(load.request_id)
        self._seen = len(self.mock.book.loads)

    def state(self) -> dict[str, Any]:
        return {
            "locked": self.ledger.locked,
            "loads": [tokens for _, *tokens in self.loads],
            "mock": [load.tokens for load in self.mock.book.loads],
            "stored": self.stored,
        }


def overtaken(ours: bool, child: str) -> Any:
    """The mock has the prompt, LMCache's lookup takes five polls: steps until the load begins, what stays locked."""
    engine = Engine(ours, child)
    engine.ledger.store(PROMPT, 0, len(PROMPT))
    Sessions.slow = 5
    engine.lab.add("r", PROMPT, {"mock": {"matched": len(PROMPT)}})
    for _ in range(20):
        engine.step()
        if engine.mock.book.loads or engine.loads:
            break
    steps = engine.steps
    return {"steps": steps, "done": engine.run(), **engine.state(), "sessions": engine.ledger.sessions_ended}


def heavier(ours: bool, child: str) -> Any:
    """The same, but LMCache has the larger weight: its answer is waited for, and it loads."""
    engine = Engine(ours, child, weight=2)
    engine.ledger.store(PROMPT, 0, len(PROMPT))
    Sessions.slow = 5
    engine.lab.add("r", [*PROMPT, 7], {"mock": {"matched": 256}})
    return {"done": engine.run(), **engine.state()}


def aborted(ours: bool, child: str) -> Any:
    """Requests that end before they get blocks: with the lookup unanswered, and with it answered."""
    results = {}
    for case, slow in (("unanswered", 5), ("answered", 0)):
        engine = Engine(ours, child, num_blocks=20)
        engine.ledger.store(PROMPT, 0, len(PROMPT))
        engine.lab.add("big", 256, max_tokens=8)
        engine.step()
        Sessions.slow = slow
        engine.lab.add("r", PROMPT[:256])
        engine.step()
        engine.abort("r")
        results[case] = {"done": engine.run(), "locked": engine.ledger.locked}
    return results


def preempted(ours: bool, child: str) -> Any:
    """A lookup that was overtaken, and is the connector's own again when the request is preempted and asked for."""
    engine = Engine(ours, child, num_blocks=40, batch=512)
    engine.ledger.store(PROMPT, 0, len(PROMPT))
    Sessions.slow = 10**6
    engine.lab.add("other", 200, {}, max_tokens=120)
    Sessions.slow = 0
    engine.step()
    Sessions.slow = 10**6
    engine.lab.add("r", PROMPT[:256], {"mock": {"matched": 256}}, max_tokens=120)
    for _ in range(400):
        if engine.lab.get("r") is None or engine.lab.get("r").num_preemptions:
            break
        engine.step()
    request = engine.lab.get("r")
    was_preempted = request is not None and request.num_preemptions > 0
    for request_id, (hit, _) in list(engine.lmcache.scheduler_adapter._asked.items()):
        engine.lmcache.scheduler_adapter._asked[request_id] = (hit, 0)
    Sessions.slow = 0
    return {"preempted": was_preempted, "done": engine.run(800), "locked": engine.ledger.locked}


def stores(ours: bool, child: str) -> Any:
    """A prompt that nobody has, computed in four steps: whether LMCache gets the blocks of its tokens."""
    engine = Engine(ours, child)
    engine.lab.add("r", [*PROMPT, 7])
    return {"done": engine.run(), "stored": engine.stored}


def failed_load(ours: bool, child: str) -> Any:
    """The mock's load fails; meanwhile LMCache has got the prompt, of which it had nothing when it was asked first."""
    engine = Engine(ours, child)
    engine.lab.add("r", [*PROMPT, 7], {"mock": {"matched": 256}})
    engine.step()
    engine.ledger.store(PROMPT, 0, len(PROMPT))
    engine.mock.book.failed.add("r")
    engine._arriving.clear()
    engine.lab.step(finished_recving={"r"}, invalid_block_ids=engine.lab.blocks("r"))
    return {"done": engine.run(100), "status": engine.lab.status("r"), "locked": engine.ledger.locked}


CASES: tuple[Callable[[bool, str], Any], ...] = (overtaken, heavier, aborted, preempted, stores, failed_load)


def without_keeper(child: str) -> Any:
    """What overtaking alone would leave behind."""
    settle = LookupKeeper.settle
    LookupKeeper.settle = lambda self: self._unwanted.clear()  # type: ignore[method-assign]
    try:
        return overtaken(True, child)
    finally:
        LookupKeeper.settle = settle  # type: ignore[method-assign]


def tried(case: Callable[[bool, str], Any], ours: bool, child: str) -> Any:
    """What it found, or what the engine saw go wrong."""
    try:
        return case(ours, child)
    except AssertionError as error:
        return {"wrong": str(error)}


def measure() -> dict[str, Any]:
    """Case -> upstream's, ours with lmcache's own class for a child, and ours with our class."""
    child = lmcache_engine.upstream_module()
    module: Any = importlib.import_module(child)
    module.LMCacheMPSchedulerAdapter = lambda *_, **arguments: Sessions(arguments.get("vllm_block_size", 16))
    if hasattr(module, "create_scheduler_adapter"):
        module.create_scheduler_adapter = module.LMCacheMPSchedulerAdapter
    results: dict[str, Any] = {case.__name__: {"upstream": tried(case, False, child)} for case in CASES}
    for case in CASES:
        results[case.__name__]["ours"] = tried(case, True, child)
        results[case.__name__]["both ours"] = tried(case, True, lmcache_engine.OURS)
    return {**results, "without keeper": without_keeper(child)}
