"""A real engine (no model) and real LMCache servers, each of which is killed: the engine must be the next one's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from pdserve.patches.lmcache import registration
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from tests.upstream.lmcache_engine import BLOCK, CHUNK, THEIRS, leaf
    from tests.upstream.lmcache_server import WITHIN_SECONDS, Server
    from tests.upstream.scheduler_lab import Lab

PROMPT = 256
BLOCKS = 96
GIVE_UP = 20.0
HEARTBEAT_SECONDS = 2.0


class Client:
    """An engine and its prompts, no two of which begin alike: the real Scheduler and both roles of the connector."""

    def __init__(self, server: Any) -> None:
        self._server = server
        where = {"host": "tcp://127.0.0.1", "port": server.port, "mq_timeout": WITHIN_SECONDS}
        extra = where | {"mp_transfer_mode": "lmcache_driven", "heartbeat_interval": HEARTBEAT_SECONDS}
        connector = leaf(THEIRS, **{f"lmcache.mp.{name}": value for name, value in extra.items()})
        self.lab = Lab(num_blocks=BLOCKS, max_num_batched_tokens=256, connector=connector)
        kv = {f"layer.{index}": torch.zeros(BLOCKS, BLOCK, 2, 8) for index in range(2)}
        spec = self.lab.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        groups = [KVCacheGroupSpec(list(kv), spec)]
        layout = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.worker: Any = KVConnectorFactory.create_connector(self.lab.config, KVConnectorRole.WORKER, layout)
        self.worker.register_kv_caches(kv)
        self.worker.get_handshake_metadata()  # as EngineCore does once it is ready
        self.adapter = self.worker.worker_adapter
        self.loaded = 0
        """Tokens that were to come from the server; less when a load has failed."""
        self._ended: set[str] = set()
        self._prompts = 0

    def close(self) -> None:
        """End it once it has no lock left. Not before: LMCache handles UNREGISTER at once and FREE_LOOKUP_LOCKS in a
        thread, where it fails when it comes after the last engine of the model has gone (lmcache 0.5.6,
        engine_context.py: find_attn_desc raises)."""
        self._server.unlocked()
        self.worker.shutdown()
        self.lab.connector.shutdown()

    def step(self) -> None:
        before = set(self.lab.scheduler.requests)
        output = self.lab.schedule()
        metadata = output.kv_connector_metadata
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        self.worker.start_load_kv(None)
        loads = (request.op for request in metadata.requests if request.direction == "RETRIEVE")
        self.loaded += sum(load.end - load.start - load.skip_first_n_tokens for load in loads)
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(self._ended)
        self.worker.clear_connector_metadata()
        arrived = {name for name in received or () if self.lab.get(name) is not None}
        sent = {name for name in sent or () if self.lab.get(name) is not None} - arrived
        failed = self.worker.get_block_ids_with_load_errors()
        self.loaded -= BLOCK * len(failed)
        self.lab.update(output, finished_recving=arrived, finished_sending=sent, invalid_block_ids=failed)
        self._ended = {name for name in before if (kept := self.lab.get(name)) is not None and kept.is_finished()}

    def prompt(self) -> list[int]:
        self._prompts += 1
        return list(range(self._prompts * 1000, self._prompts * 1000 + PROMPT))

    def add(self, tokens: list[int]) -> None:
        self.lab.add(f"r{time.monotonic_ns()}", [*tokens, 5], max_tokens=2)

    def until(self, holds: Callable[[], bool], seconds: float = GIVE_UP) -> bool:
        """Steps until it holds. False: not in time."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > seconds:
                return False
            self.step()
            time.sleep(0.002)
        return True

    def idle(self) -> bool:
        return not self.lab.scheduler.requests

    def loads(self, tokens: list[int]) -> int:
        """Tokens of the prompt that come from the server."""
        assert self.lab.scheduler.reset_prefix_cache()
        before = self.loaded
        self.add(tokens)
        assert self.until(self.idle)
        return self.loaded - before


def never_used(client: Client, server: Any) -> None:
    """No request has ever come."""


def idle(client: Client, server: Any) -> None:
    """It has stored."""
    client.add(client.prompt())
    assert client.until(client.idle)


def during_a_store(client: Client, server: Any) -> None:
    client.add(client.prompt())
    with stopped_before(client, server, "batched_submit_store_requests"):
        assert client.until(lambda: bool(client.adapter.store_futures)), "no store"


def during_a_retrieve(client: Client, server: Any) -> None:
    tokens = client.prompt()
    client.add(tokens)
    assert client.until(client.idle)
    server.until_stored(PROMPT // CHUNK)
    assert client.lab.scheduler.reset_prefix_cache()
    client.add(tokens)
    with stopped_before(client, server, "batched_submit_retrieve_requests"):
        assert client.until(lambda: bool(client.adapter.retrieve_futures)), "no retrieve"


@contextlib.contextmanager
def stopped_before(client: Client, server: Any, method: str) -> Iterator[None]:
    """The server is stopped when the worker's adapter is asked for this: it never answers it."""
    submit = getattr(client.adapter, method)

    def stopped(*arguments: Any, **named: Any) -> Any:
        server.stop()
        return submit(*arguments, **named)

    setattr(client.adapter, method, stopped)
    try:
        yield
    finally:
        delattr(client.adapter, method)


def during_a_lookup(client: Client, server: Any) -> None:
    server.stop()
    client.add(client.prompt())
    client.step()
    assert client.lab.connector.scheduler_adapter._unacked_lookups, "no lookup"


MOMENTS = (never_used, idle, during_a_store, during_a_retrieve, during_a_lookup)


def seen(server: Any, client: Client, moment: Callable[[Client, Any], None]) -> dict[str, Any]:
    """Return what becomes of one kill: the next server is ready half a second later."""
    moment(client, server)
    server.kill()
    server.begin()
    began = time.monotonic()
    registered = None
    while registered is None and time.monotonic() - began < HEARTBEAT_SECONDS + 4:
        if not client.idle():
            client.step()
        if server.registered(client.adapter.instance_id):
            registered = round(time.monotonic() - began, 2)
        time.sleep(0.005)
    result: dict[str, Any] = {"moment": moment.__name__, "registered": registered, "loaded": 0}
    if result.setdefault("finished", client.until(client.idle, 5.0)):
        # Healthy again: a moment after the registration is seen.
        scheduler = client.lab.connector.scheduler_adapter
        client.until(lambda: client.adapter.is_healthy and scheduler.is_healthy)
        tokens = client.prompt()
        client.add(tokens)
        client.until(client.idle)
        with contextlib.suppress(AssertionError):
            server.until_stored(PROMPT // CHUNK, 3.0)
        result["loaded"] = client.loads(tokens)
    return result


def kills(number: int, *, patched: bool) -> list[dict[str, Any]]:
    """Return what was seen of so many, which take the moments in turn."""
    if patched:
        registration.REGISTRATION.apply()
    server = Server("lmcache_driven", registration.IDENTITY_NAME if patched else "")
    results: list[dict[str, Any]] = []
    client: Client | None = None
    try:
        server.begin()
        for moment in (MOMENTS * number)[:number]:
            if client is None or moment is never_used:
                if client is not None:
                    client.close()
                client = Client(server)
            results.append(result := seen(server, client, moment))
            if not result["finished"] or result["registered"] is None:
                client = None
    finally:
        server.close()
    return results


@on(INSTALLED_VLLM)
def test_upstream_stays_unknown_to_a_server_that_is_back_before_it_was_missed() -> None:
    """What it stored is gone, in silence."""
    (life,) = kills(1, patched=False)
    assert (life["registered"], life["loaded"]) == (None, 0)


@on(INSTALLED_VLLM)
def test_with_the_patches_a_worker_is_registered_within_a_heartbeat_whatever_it_did() -> None:
    """And every request ends, and what is stored then is loaded again."""
    lives = kills(len(MOMENTS), patched=True)
    assert [(life["finished"], life["loaded"]) for life in lives] == [(True, PROMPT)] * len(MOMENTS)
    assert [life for life in lives if life["registered"] is None] == [], "within a heartbeat, and 4 s of a busy machine"
