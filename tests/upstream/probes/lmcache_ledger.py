"""Stands in for an LMCache server behind the scheduler's half of LMCacheMPConnector, and keeps strict book.

It knows which chunks exist and how many read locks each has: a lookup takes one on every chunk of its hit, as the
server does; only a retrieve or a release gives it back, and giving back what is not locked is an error. The locks are
anonymous there too, so one release too many would take away another reader's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

CHUNK = 64


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
        self.chunks.update(_names(tokens, start, end))

    def lookup(self, tokens: Sequence[int]) -> int:
        """Tokens found: whole chunks from the begin on. Locks them."""
        self.lookups += 1
        stored_tokens = 0
        for name in _names(tokens, 0, len(tokens) // CHUNK * CHUNK):
            if name not in self.chunks:
                break
            self.locks[name] += 1
            stored_tokens += CHUNK
        return stored_tokens

    def release(self, tokens: Sequence[int], start: int, end: int) -> None:
        """As FREE_LOOKUP_LOCKS: a chunk that `end` cuts keeps its lock, one that `start` cuts loses it."""
        self._drop(_names(tokens, start // CHUNK * CHUNK, end // CHUNK * CHUNK))

    def retrieve(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Reads chunks; they must exist and be locked, and are locked by one less afterwards."""
        assert start % CHUNK == 0, start
        assert end % CHUNK == 0, end
        names = list(_names(tokens, start, end))
        assert set(names) <= self.chunks, "retrieves what is not there"
        self._drop(names)

    def _drop(self, names: Iterable[int]) -> None:
        for name in names:
            assert self.locks[name] > 0, "gives back a lock that nobody holds"
            self.locks[name] -= 1


class LedgerAdapter:
    """What the connector's scheduler role needs of LMCache's adapter.

    `slow`: a lookup, whose locks are taken at once, is answered at the poll after so many others.
    """

    ledger: ClassVar[Ledger] = Ledger()
    slow: ClassVar[int] = 0
    polls: ClassVar[Counter[str]] = Counter()

    def __init__(self, block_size: int) -> None:
        self.lmcache_tokens_per_chunk = CHUNK
        self.tp_size = self.world_size = 1
        self.is_healthy = True
        self._block_size = block_size
        self._asked: dict[str, tuple[int, int]] = {}
        self._answers: dict[str, int] = {}

    def num_blocks_per_chunk(self) -> int:
        return CHUNK // self._block_size

    def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int], **_: Any) -> None:
        if request_id not in self._asked:
            self._asked[request_id] = (self.ledger.lookup(token_ids), self.slow)

    def check_lookup_result(self, request_id: str) -> int | None:
        self.polls[request_id] += 1
        if request_id not in self._asked:
            return self._answers.get(request_id, 0)
        if request_id not in self._answers:
            stored_tokens, polls_left = self._asked[request_id]
            if polls_left:
                self._asked[request_id] = (stored_tokens, polls_left - 1)
                return None
            self._answers[request_id] = stored_tokens
        return self._answers[request_id]

    def cleanup_lookup_result(self, request_id: str) -> None:
        self._asked.pop(request_id, None)
        self._answers.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        self.ledger.sessions_ended += 1

    def report_block_allocations(self, records: object) -> None: ...

    def shutdown(self) -> None: ...

    def free_lookup_locks(
        self,
        token_ids: list[int],
        start: int,
        end: int,
        request_id: str,
        cache_salt: str = "",
        request_configs: dict[str, Any] | None = None,
    ) -> None:
        self.ledger.release(token_ids, start, end)


def install() -> str:
    """Makes upstream's connector use the stand-in; the module that has the class that vLLM would load."""
    from pdserve.connectors.lmcache_mp import upstream_class

    module_name = str(upstream_class().__module__)
    module: Any = __import__(module_name, fromlist=["LMCacheMPConnector"])

    def adapter(*_: object, **arguments: Any) -> LedgerAdapter:
        return LedgerAdapter(arguments.get("vllm_block_size", 16))

    if hasattr(module, "create_scheduler_adapter"):
        module.create_scheduler_adapter = adapter
    module.LMCacheMPSchedulerAdapter = adapter
    return module_name


def _names(tokens: Sequence[int], start: int, end: int) -> Iterable[int]:
    return [hash(tuple(tokens[: begin + CHUNK])) for begin in range(start, end, CHUNK)]
