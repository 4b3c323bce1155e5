"""Open files of a proxy process: clients may have them as far as connections to engines are not short of them."""

from __future__ import annotations

import contextlib
import logging
import resource

log = logging.getLogger("pdserve.proxy")

RESERVED = 64
"""For health checks, probes of the proxy (http.places), listeners, logs, KV events and libraries."""


def raised_limit() -> int:
    """Raise the soft limit of descriptors as far as it may go, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 31 if soft == resource.RLIM_INFINITY else soft


def clients_that_fit(wanted: int, legs: int) -> int:
    """Connections of clients, at most `wanted`, if each of them may need so many connections to engines."""
    limit = raised_limit()
    fit = max(1, (limit - RESERVED) // (1 + legs))
    if fit < wanted:
        log.warning(
            "max_connections is %d and not %d: this process may have %d open files (ulimit -Hn), and a request takes "
            "up to %d beside its client's",
            fit,
            wanted,
            limit,
            legs,
        )
    return min(wanted, fit)
