"""Real prefill and decode engines (no model) over the real transfer engine: what becomes of pulls that go wrong.

Every scenario runs without the patches, then with them. Prints what was seen, times in seconds; null: not in time.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.upstream.mooncake_steps import (
    LONG,
    WATCHED,
    abort_seconds,
    all_free,
    arrived,
    prompt,
    rounded,
    set_patched,
    slowed,
    soon,
)  # isort: skip

from tests.upstream.mooncake_lab import Engine, free_port, prepare_remote_prefills, until  # isort: skip

import httpx
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector, mooncake_utils

from pdserve.installed.distributions import installed
from pdserve.patches import effects
from pdserve.patches.mooncake import bootstrap as mooncake_bootstrap
from pdserve.patches.mooncake import cpu_device, lines, pull_watch, pulls, requests, sends
from pdserve.patches.verdict import judge
from tests.upstream.probes import mooncake_flood as flood
from tests.upstream.probes import mooncake_requests as parameters
from tests.upstream.probes import mooncake_silence as silence

PATCHES = (requests.PATCH, sends.PATCH, pulls.PATCH, mooncake_bootstrap.PATCH)
CLIENTS = 25


def transfer() -> dict[str, Any]:
    """Nothing goes wrong. Decode has half of the prompt already the second time."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.copy_(torch.rand_like(prefill.kv))
    equal = []
    first = prompt(4)
    for number, tokens in enumerate((first, first[:64] + prompt(2))):
        prefill.prefill(f"p{number}", f"t{number}", tokens)
        decode.decode(f"d{number}", f"t{number}", tokens, prefill)
        prefill.step()
        source = prefill.lab.blocks(f"p{number}")
        until(arrived(decode, f"d{number}"), prefill, decode, seconds=LONG)
        source = source if len(source) == 4 else list(range(source[0], source[0] + 4))
        target = decode.lab.blocks(f"d{number}")[:4]
        equal.append(torch.equal(decode.kv[target], prefill.kv[source]))
        until(lambda: not decode.lab.busy, prefill, decode, seconds=LONG)
    return {"equal": equal, "freed": rounded(until(all_free(prefill, decode), prefill, decode, seconds=soon()))}


def departed() -> dict[str, Any]:
    """Clients leave while prefill is still computing, each with a pull of its own. Then another one comes."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    names = [str(number) for number in range(CLIENTS)]
    began = time.monotonic()
    for name in names:
        tokens = prompt(4)
        prefill.prefill(f"p{name}", f"t{name}", tokens)
        decode.decode(f"d{name}", f"t{name}", tokens, prefill)
        decode.step()
    prefill.step()
    until(lambda: len(prefill.worker.reqs_need_send) == CLIENTS, seconds=soon())
    prefill.lab.abort(*(f"p{name}" for name in names))
    decode.lab.abort(*(f"d{name}" for name in names))
    seen = _next_request(prefill, decode, began)
    freed = until(all_free(prefill, decode), prefill, decode, seconds=soon())
    return {**seen, "freed": rounded(freed), "kept": len(prefill.worker.reqs_need_send)}


def waiting() -> dict[str, Any]:
    """As many pulls wait for prefills that have not come."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    began = time.monotonic()
    for number in range(CLIENTS):
        decode.decode(f"d{number}", f"t{number}", prompt(4), prefill)
        decode.step()
    return _next_request(prefill, decode, began)


def _next_request(prefill: Engine, decode: Engine, began: float) -> dict[str, Any]:
    """`began`: when there was no pull yet."""
    tokens = prompt()
    prefill.prefill("p", "t", tokens)
    decode.decode("d", "t", tokens, prefill)
    served = until(arrived(decode, "d"), prefill, decode, seconds=2 * abort_seconds())
    since_first = time.monotonic() - began
    decode.lab.abort("d")
    return {"served": rounded(served), "since the first pull": rounded(since_first)}


def late_pull() -> dict[str, Any]:
    """Prefill was aborted before decode asks. With either policy for loads that fail."""
    return {policy: _late_pull(policy) for policy in ("fail", "recompute")}


def _late_pull(policy: str) -> list[Any]:
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer", policy=policy)
    tokens = prompt(4)
    prefill.prefill("p", "t", tokens)
    prefill.step()
    prefill.lab.abort("p")
    prefill.step()
    decode.decode("d", "t", tokens, prefill)
    decode.step()
    ended = until(lambda: "WAITING_FOR" not in decode.lab.status("d"), prefill, decode, seconds=soon())
    if ended < soon():
        until(lambda: not decode.lab.busy, prefill, decode, seconds=soon())
    return [rounded(ended), decode.lab.finish_reasons.get("d")]


def left_before_prefill() -> dict[str, Any]:
    """A client leaves decode, then its prefill comes after all. Its KV must not go where other KV is by now."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.fill_(1)
    tokens = prompt()
    decode.decode("d", "t", tokens, prefill)
    until(lambda: "t" in prefill.worker.reqs_need_send, decode, seconds=soon())
    decode.lab.abort("d")
    freed = until(all_free(decode), decode, seconds=soon())
    prefill.prefill("p", "t", tokens)
    prefill_freed = until(lambda: prefill.lab.get("p") is None, prefill, decode, seconds=soon())
    time.sleep(0.1)
    return {"freed": rounded(freed), "prefill freed": rounded(prefill_freed), "written": bool(decode.kv.any())}


def left_during_write() -> dict[str, Any]:
    """A client leaves while its KV is being written: the blocks are its own until that has ended."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    begun, go_on = slowed(prefill)
    tokens = prompt()
    prefill.prefill("p", "t", tokens)
    decode.decode("d", "t", tokens, prefill)
    until(begun.is_set, prefill, decode, seconds=soon())
    decode.lab.abort("d")
    held = until(all_free(decode), prefill, decode, seconds=0.5)
    go_on.set()
    freed = until(all_free(prefill, decode), prefill, decode, seconds=LONG)
    return {"freed during the write": rounded(held), "freed after it": rounded(freed)}


def one_of_two_fails() -> dict[str, Any]:
    """Two prefill workers have a part of the KV each. One fails while the other is still writing."""
    first, second, decode = Engine("kv_producer"), Engine("kv_producer"), Engine("kv_consumer")
    first.worker._send_blocks = lambda *_: -1
    begun, go_on = slowed(second)
    decode.worker._remote_agents[first.engine_id] = {0: {0: first.side_channel}, 1: {0: second.side_channel}}
    decode.worker._tp_size[first.engine_id] = 2
    tokens = prompt()
    decode.decode("d", "t", tokens, first)
    for prefill in (second, first):
        prefill.prefill("p", "t", tokens)
    until(begun.is_set, second, decode, seconds=soon())
    failed = until(lambda: "d" in decode.lab.finish_reasons, first, decode, seconds=soon())
    held = until(all_free(decode), first, second, decode, seconds=WATCHED)
    go_on.set()
    freed = until(all_free(decode), first, second, decode, seconds=soon())
    return {"failed": rounded(failed), "freed during the write": rounded(held), "freed after it": rounded(freed)}


def stopped_by_token() -> dict[str, Any]:
    """Prefill's one token is a stop token."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.copy_(torch.rand_like(prefill.kv))
    tokens = prompt()
    prefill.prefill("p", "t", tokens, stop_token_ids=[7])
    decode.decode("d", "t", tokens, prefill)
    prefill.step()
    served = until(arrived(decode, "d"), prefill, decode, seconds=soon())
    equal = torch.equal(decode.kv[decode.lab.blocks("d")[:2]], prefill.kv[[1, 2]]) if served < soon() else None
    return {"served": rounded(served), "equal": equal, "prefill ended by": prefill.lab.finish_reasons.get("p")}


def unknown_transfer() -> str | None:
    """Prefill's scheduler names a transfer that its worker has never heard of."""
    prefill = Engine("kv_producer")
    metadata = mooncake_connector.MooncakeConnectorMetadata()
    metadata.reqs_not_processed = {"never heard of"}
    done = asyncio.run_coroutine_threadsafe(prefill.worker.record_send_reqs(metadata), prefill.worker.sender_loop)
    error = done.exception(60)
    return None if error is None else type(error).__name__


def same_id_twice() -> dict[str, Any]:
    """A list of prompts with one transfer id: the second prefill's blocks are read by no decode."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    first, two = prompt(), prompt()
    prefill.prefill("p1", "t", first)
    prefill.prefill("p2", "t", two)
    until(lambda: not prefill.lab.busy, prefill, seconds=soon())
    decode.decode("d1", "t", first, prefill)
    until(arrived(decode, "d1"), prefill, decode, seconds=soon())
    return {"freed": rounded(until(all_free(prefill), prefill, decode, seconds=soon()))}


def same_id_in_one_batch() -> dict[str, Any]:
    """One prefill has ended and another one with its transfer id is aborted: the worker hears of both at once."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.copy_(torch.rand_like(prefill.kv))
    tokens = prompt()
    prefill.prefill("p1", "t", tokens)
    prefill.step()
    source = prefill.kv[prefill.lab.blocks("p1")]
    prefill.prefill("p2", "t", prompt())
    prefill.lab.abort("p2")
    prefill.step()
    decode.decode("d", "t", tokens, prefill)
    served = until(arrived(decode, "d"), prefill, decode, seconds=soon())
    equal = torch.equal(decode.kv[decode.lab.blocks("d")[:2]], source) if served < soon() else None
    return {"served": rounded(served), "equal": equal}


def bootstrap() -> dict[str, Any]:
    """A prefill registers at a server that knows a predecessor: one that lives, one that is dead."""
    port = free_port()
    server = mooncake_utils.MooncakeBootstrapServer("127.0.0.1", port)
    server.start()
    old, other = socket.create_server(("127.0.0.1", 0)), free_port()

    def register(engine: str, address: int, rank: int = 0) -> int:
        payload = {"engine_id": engine, "dp_rank": 0, "tp_rank": rank, "pp_rank": 0}
        payload["addr"] = f"tcp://127.0.0.1:{address}"
        return httpx.post(f"http://127.0.0.1:{port}/register", json=payload, timeout=60).status_code

    seen: dict[str, Any] = {"first": register("one", old.getsockname()[1])}
    seen["beside a living one"] = register("two", other)
    seen["known"] = httpx.get(f"http://127.0.0.1:{port}/query", timeout=60).json()["0"]["engine_id"]
    old.close()
    seen["after a dead one"] = register("two", other)
    seen["its other rank"] = register("two", free_port(), rank=1)
    seen["the same again, moved"] = register("two", free_port())
    entry = httpx.get(f"http://127.0.0.1:{port}/query", timeout=60).json()["0"]
    seen["known then"] = [entry["engine_id"], sorted(entry["worker_addr"])]
    return seen


def construction() -> str | None:
    try:
        Engine("kv_consumer")
    except RuntimeError as error:
        return str(error)
    return None


SCENARIOS: dict[str, Callable[[], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        transfer,
        departed,
        waiting,
        late_pull,
        left_before_prefill,
        left_during_write,
        one_of_two_fails,
        silence.killed,
        silence.other_peer,
        silence.reconnected,
        stopped_by_token,
        unknown_transfer,
        same_id_twice,
        same_id_in_one_batch,
        silence.unanswered,
        bootstrap,
        flood.rejected,
        flood.rejected_by_decode,
        flood.more_than_at_once,
        flood.no_descriptors,
    )
}


def main() -> None:
    chosen = sys.argv[1:] or list(SCENARIOS)
    prepare_remote_prefills(6)
    seen: dict[str, Any] = {"construction": [construction()]}
    cpu_device.apply()
    seen["construction"].append(construction())
    seen["verdicts"] = {patch.name: judge(patch, installed()).outcome for patch in PATCHES}
    mooncake_bootstrap._PATIENCE_SECONDS = 0.5
    pull_watch._LOOK_SECONDS = 0.2
    # Nothing may work only because of it: longer than AT_ONCE of the test.
    lines._IDLE_SECONDS = 120.0
    # Without the patches most of them only wait, so they wait together. With them they are timed one by one.
    with ThreadPoolExecutor(len(SCENARIOS)) as together:
        for name, without in {name: together.submit(SCENARIOS[name]) for name in chosen if name in SCENARIOS}.items():
            seen[name] = [without.result()]
    parameters.verdicts(seen.setdefault("parameters", {}))
    for patch in PATCHES:
        patch.apply()
    set_patched()
    for name in (name for name in chosen if name in SCENARIOS):
        began = time.monotonic()
        seen[name].append(SCENARIOS[name]())
        seen.setdefault("seconds", {})[name] = rounded(time.monotonic() - began)
    parameters.verdicts(seen["parameters"])
    declared = {(patch.name, effect) for patch in PATCHES for effect in patch.effects}
    counted = effects.totals()
    seen["effects"] = {f"{patch}/{effect}": counted.get((patch, effect), 0) for patch, effect in declared}
    seen["undeclared"] = [list(each) for each in counted if each not in declared]
    sys.stdout.flush()
    print("\n" + json.dumps(seen), flush=True)
    os._exit(0)  # upstream's shutdown waits for its own sockets


if __name__ == "__main__":
    main()
