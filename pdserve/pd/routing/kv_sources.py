"""Find the addresses at which an engine publishes its KV events."""

from __future__ import annotations

from dataclasses import dataclass

_EVERYWHERE = ("*", "0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True)
class Source:
    """One publisher: an engine has one for each data parallel rank."""

    rank: int
    endpoint: str
    """tcp://host:port or ipc://path, to connect to."""
    replay_endpoint: str | None = None
    topic: str = ""


def sources_from(answer: object, host: str) -> tuple[Source, ...]:
    """Read the answer of GET /kv_event_sources (vLLM 0.31 and later). `host`: of the worker's URL, for publishers that
    listen everywhere. Empty: this engine publishes none. Raises ValueError.

    A publisher whose endpoint names a host (no wildcard) connects instead of binding, and has no listener; one with
    tcp://*:0 binds to the node's address and does name a host. From here the two look the same.
    """
    if not isinstance(answer, dict):
        raise ValueError("not an object")
    sources = []
    for rank, config in answer.items():
        if not isinstance(config, dict):
            raise ValueError(f"rank {rank}: not an object")
        if config.get("publisher", "zmq") != "zmq" or not config.get("enable_kv_cache_events", True):
            continue
        endpoint, replay, topic = (config.get(key) for key in ("endpoint", "replay_endpoint", "topic"))
        if not isinstance(endpoint, str) or not isinstance(replay, str | None) or not isinstance(topic, str | None):
            raise ValueError(f"rank {rank}: no endpoint")
        sources.append(Source(int(rank), _reach(endpoint, host), replay and _reach(replay, host), topic or ""))
    return tuple(sources)


def sources_of(endpoint: str, replay_endpoint: str | None, topic: str, host: str, ranks: int) -> tuple[Source, ...]:
    """Read the engine's own --kv-events-config, for versions that cannot be asked: rank n publishes at port + n. Raises
    ValueError."""
    return tuple(
        Source(
            rank,
            _shift(_reach(endpoint, host), rank),
            replay_endpoint and _shift(_reach(replay_endpoint, host), rank),
            topic,
        )
        for rank in range(ranks)
    )


def _reach(endpoint: str, host: str) -> str:
    """An address to bind to as one to connect to."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return endpoint
    name, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdecimal() or not 0 < int(port) < 65536 or not name:
        raise ValueError(f"not an endpoint to connect to: {endpoint!r}")
    if name in _EVERYWHERE:
        name = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{name}:{port}"


def _shift(endpoint: str, rank: int) -> str:
    if rank == 0 or not endpoint.startswith("tcp://"):
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"
