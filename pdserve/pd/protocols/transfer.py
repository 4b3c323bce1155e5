"""One hand-over of KV over Mooncake, as the requests to both engines describe it."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from pdserve.pd.requests.body import encode
from pdserve.pd.workers.registry import Worker


class Transfer:
    """A transfer of KV from one rank of a prefill."""

    __slots__ = ("engine_id", "id", "prefill", "rank", "ranks")

    def __init__(self, id_: str, prefill: Worker, rank: str, engine_id: str, ranks: int) -> None:
        """`ranks`: how many that prefill has."""
        self.id = id_
        self.prefill = prefill
        self.rank = rank
        self.engine_id = engine_id
        self.ranks = ranks

    def of_engine(self, engine_id: str) -> Transfer:
        """Return the transfer from another life of that prefill."""
        return Transfer(self.id, self.prefill, self.rank, engine_id, self.ranks)

    def for_prefill(self) -> bytes:
        return _FOR_PREFILL + self.id.encode() + _END

    def for_decode(self) -> bytes:
        return _for_decode(self.prefill.config.bootstrap_url, self.engine_id) + self.id.encode() + _END

    def rank_header(self) -> bytes:
        return b"x-data-parallel-rank: %b\r\n" % self.rank.encode() if self.ranks > 1 else b""


_FOR_PREFILL: Final = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"'
_FOR_DECODE: Final = (
    b'{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":%b,"remote_engine_id":%b,'
    b'"transfer_id":"'
)
_END: Final = b'"}'


@lru_cache(maxsize=1024)
def _for_decode(bootstrap_url: str | None, engine_id: str) -> bytes:
    """Up to the id; the same few again and again."""
    return _FOR_DECODE % (encode(bootstrap_url), encode(engine_id))
