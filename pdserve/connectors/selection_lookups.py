"""Lookups of an LMCache connector that are no longer needed: their read locks are given back all the same.

A lookup locks every chunk that it finds on the LMCache server. The connector drops its own record of a lookup when the
request is scheduled or ends, whether or not the answer has come; what is still locked then stays locked until the
server's read TTL (300 s), and END_SESSION does not unlock it (lmcache 0.5.6, modules/lookup.py). The unlocking needs
the answer, so the record is kept here until it comes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdserve.patches import effects

GIVE_UP_SECONDS = 60.0
"""Well below the server's read TTL: unlocking after it could take away the lock of another reader."""

_METHODS = (
    "maybe_submit_lookup_request",
    "check_lookup_result",
    "cleanup_lookup_result",
    "free_lookup_locks",
    "end_session",
)

_SUBMITTED = ("request_id", "token_ids", "cache_salt", "request_configs", "reserve_last_token")
"""Of maybe_submit_lookup_request, lmcache 0.5.6."""


@dataclass
class _Unwanted:
    asked: dict[str, Any]
    since: float
    session_over: bool = False


class LookupKeeper:
    """Stands in for a connector's `scheduler_adapter`, and passes on everything that is not about unwanted lookups."""

    def __init__(self, adapter: Any, patch: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._adapter = adapter
        self._patch = patch
        self._clock = clock
        # Once: the scheduler asks about every pending lookup in every step.
        self._submitted = tuple(inspect.signature(adapter.maybe_submit_lookup_request).parameters)
        self._submit = adapter.maybe_submit_lookup_request
        if self._submitted == _SUBMITTED:
            self.maybe_submit_lookup_request = self._submit_by_name  # type: ignore[method-assign]  # the faster one
        self.check_lookup_result = adapter.check_lookup_result
        """The adapter's own, without the detour over __getattr__: it is called as often."""
        self._release = set(inspect.signature(adapter.free_lookup_locks).parameters)
        self._open: dict[str, dict[str, Any]] = {}
        self._unwanted: dict[str, _Unwanted] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    # Called by the connector, as the adapter's own.

    def maybe_submit_lookup_request(self, *args: Any, **kwargs: Any) -> None:
        """Submit a lookup. One that was unwanted and is asked for again (after a preemption) is the connector's once
        more."""
        # It comes first in every LMCache so far.
        if (args[0] if args else kwargs["request_id"]) not in self._open:
            self._note(*args, **kwargs)
        self._submit(*args, **kwargs)

    def _submit_by_name(
        self,
        request_id: str,
        token_ids: Any,
        cache_salt: str = "",
        request_configs: Any = None,
        reserve_last_token: bool = False,
    ) -> None:
        """Submit where the arguments are known (lmcache 0.5.6): names that need no dictionary cost half as much."""
        if request_id not in self._open:
            self._note(request_id, token_ids, cache_salt, request_configs, reserve_last_token)
        self._submit(request_id, token_ids, cache_salt, request_configs, reserve_last_token)

    def _note(self, *args: Any, **kwargs: Any) -> None:
        asked = dict(zip(self._submitted, args, strict=False)) | kwargs
        returned = self._unwanted.pop(asked["request_id"], None)
        self._open[asked["request_id"]] = returned.asked if returned else asked

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Clean up only once the locks are given back."""
        if request_id not in self._unwanted:
            self._adapter.cleanup_lookup_result(request_id)

    def end_session(self, request_id: str) -> None:
        """End the session only once the locks are given back: the server forgets with the session what the lookup had
        locked."""
        if request_id in self._unwanted:
            self._unwanted[request_id].session_over = True
        else:
            self._adapter.end_session(request_id)

    # Called by MultiConnector.

    def scheduled(self, request_id: str, *, answered: bool) -> None:
        """Hear that a request has its blocks. The connector gives back the locks of an answered lookup itself."""
        asked = self._open.pop(request_id, None)
        if asked is not None and not answered:
            self._unwanted[request_id] = _Unwanted(asked, self._clock())

    def finished(self, request_id: str) -> None:
        """Hear that a request is about to end; if it never got blocks, upstream does not give its locks back."""
        asked = self._open.pop(request_id, None)
        if asked is not None:
            self._unwanted[request_id] = _Unwanted(asked, self._clock())

    def settle(self) -> None:
        """Gives back what has been answered by now. Never waits for an answer."""
        if not self._unwanted:
            return
        for request_id, lookup in list(self._unwanted.items()):
            tokens = self._adapter.check_lookup_result(request_id)
            if tokens is None and self._clock() - lookup.since < GIVE_UP_SECONDS:
                continue
            if tokens is None:
                effects.count(self._patch, "lookups-left-to-expire")
            elif tokens > 0:
                named = {name: value for name, value in lookup.asked.items() if name in self._release}
                self._adapter.free_lookup_locks(**{**named, "start": 0, "end": tokens})
                effects.count(self._patch, "lookups-released")
            del self._unwanted[request_id]
            self._adapter.cleanup_lookup_result(request_id)
            if lookup.session_over:
                self._adapter.end_session(request_id)

    @property
    def unsettled(self) -> int:
        """Return how many lookups have an answer that is still awaited for the sake of their locks."""
        return len(self._unwanted)


def keep_lookups(child: Any, patch: str) -> LookupKeeper | None:
    """Puts a keeper before the adapter of an LMCache connector, or finds the one that the connector put there itself.

    None for a connector that has no such adapter.
    """
    adapter = getattr(child, "scheduler_adapter", None)
    if isinstance(adapter, LookupKeeper):
        return adapter
    if adapter is None or not all(hasattr(adapter, name) for name in _METHODS):
        return None
    keeper = LookupKeeper(adapter, patch)
    child.scheduler_adapter = keeper
    return keeper
