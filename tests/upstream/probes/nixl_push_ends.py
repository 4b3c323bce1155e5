"""What becomes of a push with the patch nixl-push, on the installed vLLM and NIXL's own library.

Two engines of one process: real Scheduler, both real halves of NixlPushConnector, KV moved by UCX. One pair has all
cases, under ids of their own, because every agent of the library has threads that spin.
"""

from __future__ import annotations

from tests.upstream.nixl_push_lab import PROMPT, Engine, until  # isort: skip  # takes the CPU

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from pdserve.patches import effects
from pdserve.patches.nixl import push, push_decode
from pdserve.patches.nixl.push_messages import base_of
from pdserve.patches.verdict import judge
from pdserve.pd.protocols.push_addresses import ASK
from tests.upstream.probes.multiconnector_metrics import versions_here

LEASE = 30.0
TIMEOUT = 480.0
"""push_registration_timeout, as upstream sets it."""
_NUMBERS = itertools.count()
WAITS = "WAITING_FOR_REMOTE_KVS"


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
        return f"cmpl-{number}-0-aaaaaaaa", f"cmpl-{number}-0-bbbbbbbb", list(range(first, first + PROMPT))

    def counted(self) -> dict[str, float]:
        now = {effect: value for (patch, effect), value in effects.totals().items() if patch == push.PATCH.name}
        new = {effect: value - self._seen.get(effect, 0) for effect, value in now.items()}
        self._seen = now
        return {effect: value for effect, value in new.items() if value}

    def until(self, condition: Callable[[], bool]) -> bool:
        return until(condition, self.prefill, self.decode)

    def rest(self) -> bool:
        """Both engines have all of their blocks back."""
        return self.until(lambda: self.prefill.all_free and self.decode.all_free)


def prefill_first(pair: Pair) -> Any:
    here, there, tokens = pair.names()
    blocks = pair.prefill.prefill(here, tokens)
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    return _arrives(pair, there, blocks)


def decode_first(pair: Pair) -> Any:
    here, there, tokens = pair.names()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    blocks = pair.prefill.prefill(here, tokens)
    return _arrives(pair, there, blocks)


def _arrives(pair: Pair, name: str, blocks: list[int]) -> Any:
    targets = pair.decode.lab.blocks(name)
    pair.decode.kv[targets] = 0.0
    here = pair.until(lambda: pair.decode.lab.status(name) != WAITS or name in _received(pair))
    same = torch.equal(pair.prefill.kv[blocks], pair.decode.kv[targets])
    done = pair.rest()
    # The first token after the prompt is sampled from its last one, which decode computes.
    return {"here": here, "same": same, "computed": pair.decode.scheduled.get(name), "free": done}


def _received(pair: Pair) -> set[str]:
    return set(pair.decode.lab.scheduler.finished_recving_kv_req_ids)


def client_leaves(pair: Pair) -> Any:
    """Prefill has never heard of the prompt: its leg has failed."""
    _, there, tokens = pair.names()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    registered = pair.until(lambda: there in pair.prefill.worker._pending_d_registrations)
    pair.decode.lab.abort(there)
    held = not pair.decode.all_free
    return {
        "registered": registered,
        "held": held,
        "free": pair.rest(),
        "left": sorted(pair.prefill.worker._pending_d_registrations),
    }


def client_leaves_before_prefill_has_computed(pair: Pair) -> Any:
    """Its leg there goes on: what is kept then is for nobody, and is free long before its lease ends."""
    here, there, tokens = pair.names()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    pair.until(lambda: there in pair.prefill.worker._pending_d_registrations)
    pair.decode.lab.abort(there)
    told = pair.until(lambda: pair.decode.all_free)
    pair.prefill.prefill(here, tokens)
    began = time.monotonic()
    free = pair.rest()
    return {
        "told": told,
        "free": free,
        "within_the_lease": time.monotonic() - began < LEASE - 1,
        "writer_waits_for": sorted(pair.prefill.worker._push_finished_blocks),
    }


def client_leaves_before_the_registration(pair: Pair) -> Any:
    """While decode still shakes hands with prefill: nobody has been told of its blocks."""
    _, there, tokens = pair.names()
    worker, handshake = pair.decode.worker, Future[Any]()
    worker._ensure_handshake = lambda *_, **__: handshake
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    pair.decode.lab.abort(there)
    free = pair.rest()
    del worker._ensure_handshake
    handshake.set_result(({}, 0.0))
    worker._push_writer_wake.set()
    for _ in range(20):
        pair.decode.step()
        pair.prefill.step()
    return {"free": free, "registered": there in pair.prefill.worker._pending_d_registrations}


def client_leaves_decodes_queue(pair: Pair) -> Any:
    """Decode has never scheduled it: prefill's KV is given back before its lease ends."""
    here, there, tokens = pair.names()
    pair.prefill.prefill(here, tokens)
    pair.decode.ask(there, tokens, pair.prefill)
    held = not pair.prefill.all_free
    pair.decode.lab.abort(there)
    return {"held": held, "free": pair.rest(), "entries": sorted(pair.decode.worker._recving_metadata)}


def never_pushed(pair: Pair) -> Any:
    """Nobody leaves, and prefill never gets the prompt."""
    _, there, tokens = pair.names()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    with pair.decode.later(TIMEOUT + 1):
        pair.decode.step()
    pair.until(lambda: there in pair.decode.lab.finish_reasons)
    return {
        "end": pair.decode.lab.finish_reasons.get(there),
        "computed": pair.decode.scheduled.get(there),
        "free": pair.rest(),
    }


def prefill_aborts(pair: Pair) -> Any:
    """Decode is told at once, and computes."""
    here, there, tokens = pair.names()
    pair.prefill.lab.add(here, tokens, json.loads(ASK), max_tokens=8)
    pair.prefill.step()
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    pair.until(lambda: there in pair.prefill.worker._pending_d_registrations)
    pair.prefill.lab.abort(here)
    ended = pair.until(lambda: there in pair.decode.lab.finish_reasons)
    return {"ended": ended, "computed": pair.decode.scheduled.get(there), "free": pair.rest()}


def lease_ends_before_decode_asks(pair: Pair) -> Any:
    here, there, tokens = pair.names()
    pair.prefill.prefill(here, tokens)
    pair.prefill.step()
    with pair.prefill.later(LEASE + 1):
        pair.prefill.step()
    pair.prefill.step()
    freed = pair.prefill.all_free
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    ended = pair.until(lambda: there in pair.decode.lab.finish_reasons)
    return {"freed": freed, "ended": ended, "computed": pair.decode.scheduled.get(there), "free": pair.rest()}


def heartbeats(pair: Pair) -> Any:
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
    extended = pair.prefill.worker._reqs_to_send[here] > before
    pair.decode.scheduler._stop_heartbeat(there)
    pair.prefill.worker._reqs_to_send[here] = 0.0
    return {"named": named == there, "extended": extended, "free": pair.rest()}


def write_outlives_the_lease(pair: Pair) -> Any:
    """Prefill's blocks stay while it writes from them, and decode's while it is written to."""
    here, there, tokens = pair.names()
    with pair.prefill.held_writes():
        pair.prefill.prefill(here, tokens)
        pair.decode.ask(there, tokens, pair.prefill)
        pair.decode.step()
        writes = pair.until(lambda: here in pair.prefill.worker._sending_transfers)
        with pair.prefill.later(LEASE + 1):
            pair.prefill.step()
            pair.prefill.step()
        kept = not pair.prefill.all_free
    return {"writes": writes, "kept": kept, "free": pair.rest()}


def withdrawn_while_it_is_written(pair: Pair) -> Any:
    """Its answer waits for the end of the WRITE. What tells decode that it is complete is kept from it."""
    here, there, tokens = pair.names()
    decode = pair.decode.worker
    original, decode._get_new_notifs = decode._get_new_notifs, lambda: set()
    with pair.prefill.held_writes():
        pair.prefill.prefill(here, tokens)
        pair.decode.ask(there, tokens, pair.prefill)
        pair.decode.step()
        writes = pair.until(lambda: here in pair.prefill.worker._sending_transfers)
        pair.decode.lab.abort(there)
        asked = pair.until(lambda: base_of(there) in pair.prefill.worker.pdserve_push.writes._owed)
        for _ in range(20):
            pair.prefill.step()
            pair.decode.step()
        kept = not pair.prefill.all_free and not pair.decode.all_free
    free = pair.rest()
    decode._get_new_notifs = original
    return {"writes": writes, "asked": asked, "kept": kept, "free": free}


def write_after_the_lease(pair: Pair) -> Any:
    """One that has waited for its handshake: whether it begins."""
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
    return {"begun": begun, "free": pair.rest()}


def a_write_that_fails(pair: Pair) -> Any:
    """Decode computes the prompt at once, not after its own limit."""
    here, there, tokens = pair.names()
    agent = pair.prefill.worker.nixl_wrapper
    original = agent.transfer
    agent.transfer = _failing
    pair.prefill.prefill(here, tokens)
    pair.decode.ask(there, tokens, pair.prefill)
    pair.decode.step()
    ended = pair.until(lambda: there in pair.decode.lab.finish_reasons)
    agent.transfer = original
    return {"ended": ended, "computed": pair.decode.scheduled.get(there), "free": pair.rest()}


def _failing(handle: Any) -> str:
    raise RuntimeError("no transfer")


def engine_gone(pair: Pair, *, another: bool) -> Any:
    """Prefill ends while decode waits for it; or another one has its side channel by then. The last cases."""
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
    held = not decode.all_free
    free = until(lambda: decode.all_free, decode)
    if heir is not None:
        heir.close()
    return {"held": held, "free": free}


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
)


def main() -> None:
    push.apply()
    push.apply()
    push_decode.GONE_SECONDS = push_decode.ASK_SECONDS = 0.5
    results: dict[str, Any] = {"verdict": judge(push.PATCH, versions_here()).outcome}
    pair = Pair()
    results["address"] = sorted(pair.address)
    for case in CASES:
        results[case.__name__] = {"saw": case(pair), "counted": pair.counted()}
        print(case.__name__, results[case.__name__], flush=True)
    for another in (False, True):
        saw = engine_gone(pair, another=another)
        results["another_engine" if another else "engine_gone"] = {"saw": saw, "counted": pair.counted()}
    pair.prefill.close()
    pair.decode.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
