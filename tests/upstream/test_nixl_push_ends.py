"""What becomes of a push with the patch nixl-push, on the installed vLLM and NIXL's own library.

Two engines of one process: real Scheduler, both real halves of NixlPushConnector. KV is real memory, moved by UCX. No
model: a prefill's blocks are filled by the test. What a test holds up, it holds up where the worker asks the
library (`held_writes`), or by not stepping an engine. One pair has all cases, under ids of their own, because every
agent of the library has threads that spin.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import pickle
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pdserve.patches import effects
from pdserve.patches.nixl import push, push_decode
from pdserve.patches.nixl.push_messages import base_of
from pdserve.pd.protocols.push_addresses import ASK, for_decode
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, all_hold, on, verdict

if IN_RELEASE:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    from tests.upstream.engine_config import LAYER, kv_cache_config
    from tests.upstream.nixl_lab import BLOCK_SIZE, BLOCKS, NIXL, nixl_of
    from tests.upstream.scheduler_lab import Lab

LIMIT_SECONDS = 60.0
"""For what takes milliseconds on an idle machine."""
LEASE = 30.0
TIMEOUT = 480.0
"""push_registration_timeout, as upstream sets it."""
WAITS = "WAITING_FOR_REMOTE_KVS"
_NUMBERS = itertools.count()


def prompt_tokens() -> int:
    return 4 * BLOCK_SIZE


class Engine:
    """`role`: kv_producer or kv_consumer. `extra`: its kv_connector_extra_config."""

    def __init__(self, role: str, *, port: int | None = None, **extra: Any) -> None:
        self.port = port or free_port()
        self.id = str(uuid.uuid4())
        transfer = NIXL | {
            "kv_connector": "NixlPushConnector",
            "kv_role": role,
            "engine_id": self.id,
            "kv_connector_extra_config": extra,
        }
        with side_channel(self.port):
            self.lab = Lab(
                num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=4 * prompt_tokens(), connector=transfer
            )
            self.lab.config.scheduler_config.disable_hybrid_kv_cache_manager = True
            self.kv = torch.zeros(BLOCKS, 1, BLOCK_SIZE, 2)
            self._worker = self._made()
        self.worker = nixl_of(self._worker).connector_worker
        self.scheduler = nixl_of(self.lab.connector).connector_scheduler
        handshake = self._worker.get_handshake_metadata()
        self.lab.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self.empty = self.lab.free_blocks
        self.scheduled: dict[str, int] = {}
        """Tokens that were computed here, of each request."""

    def _made(self) -> Any:
        layout = kv_cache_config(BLOCKS, BLOCK_SIZE, None)
        alone: dict[str, Any] = {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
        }
        there: dict[str, Any] = {name: value for name, value in alone.items() if hasattr(base_worker, name)}
        with set_current_vllm_config(self.lab.config), mock.patch.multiple(base_worker, **there):
            worker = KVConnectorFactory.create_connector(self.lab.config, KVConnectorRole.WORKER, layout)
            worker.register_kv_caches({LAYER: self.kv})
        return worker

    def step(self) -> None:
        """One step of the engine, with what its worker reports."""
        output = self.lab.schedule()
        for name, tokens in output.num_scheduled_tokens.items():
            self.scheduled[name] = self.scheduled.get(name, 0) + tokens
        self._begin(output)
        worker = self._worker
        results = worker.get_transfer_results(output.finished_req_ids)
        invalid = worker.get_block_ids_with_load_errors()
        worker.clear_connector_metadata()
        self.lab.update(
            output,
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=invalid,
        )

    def _begin(self, output: Any) -> None:
        self._worker.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        self._worker.start_load_kv(SimpleNamespace(attn_metadata=None))

    @property
    def all_free(self) -> bool:
        return self.lab.free_blocks == self.empty

    def prefill(self, name: str, tokens: list[int]) -> list[int]:
        """A prompt that is computed; its blocks get a pattern of their own. Their ids."""
        self.lab.add(name, tokens, json.loads(ASK), max_tokens=1)
        output = self.lab.schedule()
        blocks = self.lab.blocks(name)
        for block in blocks:
            self.kv[block] = torch.rand_like(self.kv[block])
        self._begin(output)
        self._worker.clear_connector_metadata()
        self.lab.update(output)
        return blocks

    def ask(self, name: str, tokens: list[int], prefill: Engine) -> None:
        """A request of decode, as the proxy sends it: of prefill it has the address only."""
        self.lab.add(name, tokens, dict(prefill.address), max_tokens=2)

    @cached_property
    def address(self) -> dict[str, Any]:
        """What the proxy has decodes told of this prefill, learnt from its answer to a request for one token."""
        name = "cmpl-address-0-cccccccc"
        self.lab.add(name, [1], json.loads(ASK), max_tokens=1)
        output = self.lab.schedule()
        self._begin(output)
        self._worker.clear_connector_metadata()
        (produced,) = self.lab.update(output).values()
        (answer,) = produced.outputs
        self.step()
        self.worker._reqs_to_send[name] = 0.0
        self.step()
        body = {"id": name, "choices": [], "kv_transfer_params": answer.kv_transfer_params}
        params: dict[str, Any] = json.loads(for_decode(json.dumps(body).encode()))
        return params

    @contextmanager
    def held_writes(self) -> Iterator[None]:
        """WRITEs of this engine that begin are under way until the end of the block."""
        agent = self.worker.nixl_wrapper
        original = agent.check_xfer_state
        agent.check_xfer_state = lambda _: "PROC"
        try:
            yield
        finally:
            agent.check_xfer_state = original

    def later(self, seconds: float) -> Any:
        """A `with` block in which upstream's clock is so far ahead, for whoever looks at it."""
        return mock.patch.object(time, "perf_counter", return_value=time.perf_counter() + seconds)

    def close(self) -> None:
        """As the end of its process: the side channel is refused from then on, and no WRITE begins."""
        self._worker.shutdown()
        self.lab.connector.shutdown()


def until(condition: Callable[[], bool], *engines: Engine) -> bool:
    """Steps these engines until it is true. False: it was not within the limit."""
    ends = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > ends:
            return False
        for engine in engines:
            engine.step()
        threading.Event().wait(0.005)
    return True


@contextmanager
def side_channel(port: int) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}):
        yield


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Pair:
    """A prefill and a decode, and what the patch has counted since the last look."""

    def __init__(self) -> None:
        self.prefill = Engine("kv_producer")
        self.decode = Engine("kv_consumer")
        self.address = dict(self.prefill.address)
        self._seen: dict[str, float] = {}

    def names(self) -> tuple[str, str, list[int]]:
        """Ids of one request at prefill and at decode, as vLLM makes them of one X-Request-Id, and its prompt."""
        number = next(_NUMBERS)
        first = 1000 * (number + 1)
        return f"cmpl-{number}-0-aaaaaaaa", f"cmpl-{number}-0-bbbbbbbb", list(range(first, first + prompt_tokens()))

    def counted(self) -> set[str]:
        now = {effect: value for (patch, effect), value in effects.totals().items() if patch == push.PATCH.name}
        before, self._seen = self._seen, now
        return {effect for effect, value in now.items() if value != before.get(effect, 0)}

    def until(self, condition: Callable[[], bool]) -> bool:
        return until(condition, self.prefill, self.decode)

    def rest(self) -> bool:
        """Both engines have all of their blocks back."""
        return self.until(lambda: self.prefill.all_free and self.decode.all_free)


def prefill_first(pair: Pair) -> None:
    here, there, tokens = pair.names()
    blocks = pair.prefill.prefill(here, tokens)
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    arrives(pair, there, blocks)


def decode_first(pair: Pair) -> None:
    here, there, tokens = pair.names()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    blocks = pair.prefill.prefill(here, tokens)
    arrives(pair, there, blocks)


def arrives(pair: Pair, name: str, blocks: list[int]) -> None:
    """KV is whole. The first token after the prompt is sampled from its last one, which decode computes."""
    targets = pair.decode.lab.blocks(name)
    pair.decode.kv[targets] = 0.0
    received = pair.decode.lab.scheduler.finished_recving_kv_req_ids
    assert pair.until(lambda: pair.decode.lab.status(name) != WAITS or name in received)
    assert torch.equal(pair.prefill.kv[blocks], pair.decode.kv[targets])
    assert pair.rest()
    assert (pair.decode.scheduled[name], pair.counted()) == (2, set())


def client_leaves(pair: Pair) -> None:
    """Prefill has never heard of the prompt: its leg has failed."""
    _, there, tokens = pair.names()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    assert pair.until(lambda: there in pair.prefill.worker._pending_d_registrations)
    pair.decode.lab.abort(there)
    assert not pair.decode.all_free
    assert pair.rest()
    assert not pair.prefill.worker._pending_d_registrations
    assert pair.counted() == {"registrations-withdrawn", "registrations-cleared", "withdrawals-answered"}


def client_leaves_before_prefill_has_computed(pair: Pair) -> None:
    """Its leg there goes on: what is kept then is for nobody, and is free long before its lease ends."""
    here, there, tokens = pair.names()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    pair.until(lambda: there in pair.prefill.worker._pending_d_registrations)
    pair.decode.lab.abort(there)
    assert pair.until(lambda: pair.decode.all_free)
    pair.prefill.prefill(here, tokens)
    began = time.monotonic()
    assert pair.rest()
    assert time.monotonic() - began < LEASE - 1
    assert not pair.prefill.worker._push_finished_blocks


def client_leaves_before_the_registration(pair: Pair) -> None:
    """While decode still shakes hands with prefill: nobody has been told of its blocks."""
    _, there, tokens = pair.names()
    worker, handshake = pair.decode.worker, Future[Any]()
    worker._ensure_handshake = lambda *_, **__: handshake
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    pair.decode.lab.abort(there)
    assert pair.rest(), "at once"
    del worker._ensure_handshake
    handshake.set_result(({}, 0.0))
    worker._push_writer_wake.set()
    for _ in range(20):
        pair.decode.step()
        pair.prefill.step()
    assert there not in pair.prefill.worker._pending_d_registrations
    assert pair.counted() == {"registrations-withdrawn", "registrations-unsent"}


def client_leaves_decodes_queue(pair: Pair) -> None:
    """Decode has never scheduled it: prefill's KV is given back before its lease ends."""
    here, there, tokens = pair.names()
    pair.prefill.prefill(here, tokens)
    pair.decode.ask(there, tokens, pair.prefill)
    assert not pair.prefill.all_free
    pair.decode.lab.abort(there)
    assert pair.rest()
    assert not pair.decode.worker._recving_metadata


def never_pushed(pair: Pair) -> None:
    """Nobody leaves, and prefill never gets the prompt: it is computed, and no block is lost."""
    _, there, tokens = pair.names()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    with pair.decode.later(TIMEOUT + 1):
        pair.decode.step()
    assert pair.until(lambda: there in pair.decode.lab.finish_reasons)
    assert (pair.decode.lab.finish_reasons[there], pair.rest()) == ("length", True)
    assert pair.decode.scheduled[there] >= prompt_tokens()
    assert "registrations-expired" in pair.counted()


def prefill_aborts(pair: Pair) -> None:
    here, there, tokens = pair.names()
    pair.prefill.lab.add(here, tokens, json.loads(ASK), max_tokens=8)
    pair.prefill.step()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    pair.until(lambda: there in pair.prefill.worker._pending_d_registrations)
    pair.prefill.lab.abort(here)
    told_at_once(pair, there)


def told_at_once(pair: Pair, name: str) -> None:
    """Decode is told that prefill will not write, and computes: no time of upstream's or ours has passed for it."""
    assert pair.until(lambda: name in pair.decode.lab.finish_reasons)
    assert pair.rest()
    assert pair.decode.scheduled[name] >= prompt_tokens()
    counted = pair.counted()
    assert "registrations-cleared" in counted
    assert "registrations-expired" not in counted


def lease_ends_before_decode_asks(pair: Pair) -> None:
    here, there, tokens = pair.names()
    pair.prefill.prefill(here, tokens)
    pair.prefill.step()
    with pair.prefill.later(LEASE + 1):
        pair.prefill.step()
    pair.prefill.step()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    told_at_once(pair, there)


def heartbeats(pair: Pair) -> None:
    """Decode has the request in its queue: its heartbeats extend prefill's lease, under decode's own id."""
    here, there, tokens = pair.names()
    pair.prefill.prefill(here, tokens)
    pair.prefill.step()
    before = pair.prefill.worker._reqs_to_send[here]
    request = pair.decode.lab.request(there, tokens, dict(pair.prefill.address))
    pair.decode.scheduler.on_new_request(request)
    named = request.kv_transfer_params["remote_request_id"]
    with pair.prefill.later(LEASE / 2):
        pair.prefill.worker._handle_heartbeat(named)
    assert pair.prefill.worker._reqs_to_send[here] > before
    pair.decode.scheduler._stop_heartbeat(there)
    pair.prefill.worker._reqs_to_send[here] = 0.0
    assert (named, pair.rest()) == (there, True)


def write_outlives_the_lease(pair: Pair) -> None:
    """Prefill's blocks stay while it writes from them, and decode's while it is written to."""
    here, there, tokens = pair.names()
    with pair.prefill.held_writes():
        pair.prefill.prefill(here, tokens)
        pair.decode.ask(there, tokens, pair.prefill)
        pair.decode.step()
        assert pair.until(lambda: here in pair.prefill.worker._sending_transfers)
        with pair.prefill.later(LEASE + 1):
            pair.prefill.step()
            pair.prefill.step()
        assert not pair.prefill.all_free
    assert pair.rest()
    assert "leases-outlived" in pair.counted()


def withdrawn_while_it_is_written(pair: Pair) -> None:
    """Its answer waits for the end of the WRITE. What tells decode that it is complete is kept from it."""
    here, there, tokens = pair.names()
    decode = pair.decode.worker
    original, decode._get_new_notifs = decode._get_new_notifs, lambda: set()
    with pair.prefill.held_writes():
        pair.prefill.prefill(here, tokens)
        pair.decode.ask(there, tokens, pair.prefill)
        pair.decode.step()
        assert pair.until(lambda: here in pair.prefill.worker._sending_transfers)
        pair.decode.lab.abort(there)
        assert pair.until(lambda: base_of(there) in pair.prefill.worker.pdserve_push.writes._owed)
        for _ in range(20):
            pair.prefill.step()
            pair.decode.step()
        assert not pair.prefill.all_free
        assert not pair.decode.all_free
    assert pair.rest()
    decode._get_new_notifs = original
    assert "registrations-cleared" in pair.counted()


def write_after_the_lease(pair: Pair) -> None:
    """One that has waited for its handshake does not begin."""
    here, there, tokens = pair.names()
    blocks = pair.prefill.prefill(here, tokens)
    pair.prefill.step()
    with pair.prefill.later(LEASE + 1):
        pair.prefill.step()
    pair.prefill.step()
    begun: list[str] = []
    worker = pair.prefill.worker
    worker._xfer_blocks_for_req = lambda req_id, meta: begun.append(req_id)
    worker._do_start_push_kv(
        here,
        (blocks,),
        {
            "request_id": there,
            "decode_engine_id": pair.decode.id,
            "decode_host": "localhost",
            "decode_port": pair.decode.port,
            "decode_tp_size": 1,
            "local_block_ids": (blocks,),
        },
    )
    del worker._xfer_blocks_for_req
    assert (begun, pair.rest()) == ([], True)
    assert "writes-refused" in pair.counted()


def a_write_that_fails(pair: Pair) -> None:
    """Decode computes the prompt at once, not after its own limit."""
    here, there, tokens = pair.names()
    agent = pair.prefill.worker.nixl_wrapper
    original = agent.transfer
    agent.transfer = mock.Mock(side_effect=RuntimeError("no transfer"))
    pair.prefill.prefill(here, tokens)
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    pair.until(lambda: there in pair.decode.lab.finish_reasons)
    agent.transfer = original
    told_at_once(pair, there)


def engine_gone(pair: Pair, *, another: bool = False) -> None:
    """Prefill ends while decode waits for it; or another one has its side channel by then, instead of its answer."""
    prefill = Engine("kv_producer")
    _, there, tokens = pair.names()
    decode = pair.decode
    decode.ask(there, tokens, prefill)
    decode.step()
    until(lambda: there in decode.worker.pdserve_push.withdrawals._sent, decode)
    prefill.close()
    heir = Engine("kv_producer", port=prefill.port) if another else None
    decode.lab.abort(there)
    for _ in range(5):
        decode.step()
    assert not decode.all_free
    assert until(lambda: decode.all_free, decode)
    if heir is not None:
        heir.close()
    assert "registrations-orphaned" in pair.counted()


def another_engine(pair: Pair) -> None:
    engine_gone(pair, another=True)


CASES = (
    prefill_first,
    decode_first,
    client_leaves,
    client_leaves_before_prefill_has_computed,
    client_leaves_before_the_registration,
    client_leaves_decodes_queue,
    never_pushed,
    prefill_aborts,
    lease_ends_before_decode_asks,
    heartbeats,
    write_outlives_the_lease,
    withdrawn_while_it_is_written,
    write_after_the_lease,
    a_write_that_fails,
    engine_gone,
    another_engine,
)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL's library is not installed")
@on(INSTALLED_VLLM)
def test_every_push_ends_and_no_block_is_lost() -> None:
    push.apply()
    push.apply()
    push_decode.GONE_SECONDS = push_decode.ASK_SECONDS = 0.5
    assert verdict(push.PATCH) == "apply"
    pair = Pair()
    # What the proxy sends to decode is made of prefill's own answer. All requests of decode here have it; those of
    # prefill have the proxy's words too.
    assert sorted(pair.address) == [
        *("dcp_size", "do_remote_decode", "do_remote_prefill", "pp_size", "remote_engine_id", "remote_host"),
        *("remote_port", "remote_request_id", "tp_size"),
    ]
    all_hold(*(functools.wraps(case)(functools.partial(run, case, pair)) for case in CASES))
    pair.prefill.close()
    pair.decode.close()


def run(case: Callable[[Pair], None], pair: Pair) -> None:
    pair.counted()
    case(pair)
