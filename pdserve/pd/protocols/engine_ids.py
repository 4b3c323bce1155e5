"""The engine ids of Mooncake prefills: rank -> id, from each one's bootstrap server, kept for one of its lives."""

from __future__ import annotations

import json
from typing import Final

from pdserve.pd.errors import ApiError
from pdserve.pd.http.fetch import FetchError, fetch
from pdserve.pd.http.upstream import Pool
from pdserve.pd.protocols.transfer import Transfer
from pdserve.pd.random_id import new_id
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Worker

_CONNECT_SECONDS: Final = 5.0


class EngineIds:
    """Remembers what the bootstrap servers have answered."""

    def __init__(self) -> None:
        self._known: dict[Worker, tuple[int, list[tuple[str, str]]]] = {}
        """By the worker itself: another one may have its name by now."""
        self._turns: dict[str, int] = {}

    def next(self, worker: Worker) -> Transfer | None:
        """A new transfer from the next rank of a prefill; None when its ids are not known for this life."""
        life, ranks = self._known.get(worker, (-1, []))
        if life != worker.life:
            return None
        turn = self._turns[worker.name] = self._turns.get(worker.name, -1) + 1
        rank, engine_id = ranks[turn % len(ranks)]
        return Transfer("xfer-" + new_id(), worker, rank, engine_id, len(ranks))

    async def learn(self, worker: Worker) -> dict[str, str]:
        """Asks the bootstrap server. WorkerFailedError when it does not answer as it should."""
        life = worker.life
        ranks = await self._query(worker)
        if worker.life == life and worker.state != "dead":
            self._known[worker] = (life, sorted(ranks.items()))
        return ranks

    def forget(self, worker: Worker) -> None:
        """It died, or was removed."""
        self._known.pop(worker, None)
        self._turns.pop(worker.name, None)

    async def _query(self, worker: Worker) -> dict[str, str]:
        pool = Pool(worker.config.bootstrap_url or "", connect_timeout=_CONNECT_SECONDS)
        try:
            answer = await fetch(pool, "GET", "/query")
            ranks = {str(rank): str(entry["engine_id"]) for rank, entry in json.loads(answer.body).items()}
        except FetchError as error:
            raise _failed(worker, "does not answer") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _failed(worker, "gives no engine ids") from error
        finally:
            pool.close()
        if not ranks:
            raise _failed(worker, "has no engine yet")
        return ranks


def _failed(worker: Worker, what: str) -> WorkerFailedError:
    error = ApiError(502, f"The bootstrap server of {worker.name} {what}")
    return WorkerFailedError(worker, error, retry=True, fault="unavailable")
