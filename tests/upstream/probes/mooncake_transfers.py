"""Real prefill and decode engines (no model) over the real transfer engine: what becomes of pulls that go wrong.

Every scenario runs without the patches, then with them. Prints what was seen, times in seconds; null: not in time.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ABORT_SECONDS = 2
os.environ["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(ABORT_SECONDS)

from tests.upstream.mooncake_lab import (  # noqa: E402  # isort: skip
    Engine,
    Relay,
    free_port,
    prepare_remote_prefills,
    remote_prefill,
    until,
)

import httpx  # noqa: E402
import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector, mooncake_utils  # noqa: E402

from pdserve.distributions import installed  # noqa: E402
from pdserve.patches import (  # noqa: E402
    effects,
    mooncake_bootstrap,
    mooncake_cpu_device,
    mooncake_pulls,
    mooncake_requests,
    mooncake_sends,
)
from pdserve.patches.verdict import judge  # noqa: E402
from tests.upstream.probes import mooncake_requests as parameters  # noqa: E402

PATCHES = (mooncake_requests.PATCH, mooncake_sends.PATCH, mooncake_pulls.PATCH, mooncake_bootstrap.PATCH)
CLIENTS = 25
SHORT, LONG = 1.0, 4.0 * ABORT_SECONDS
_tokens = iter(range(100, 10**9))


def prompt(blocks: int = 2) -> list[int]:
    return [next(_tokens) for _ in range(32 * blocks)]


def arrived(decode: Engine, name: str) -> Callable[[], bool]:
    return lambda: decode.lab.status(name) == "RUNNING"


def all_free(*engines: Engine) -> Callable[[], bool]:
    return lambda: all(engine.lab.free_blocks == engine.blocks - 1 for engine in engines)


def rounded(seconds: float) -> float | None:
    return None if seconds == float("inf") else round(seconds, 3)


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
    return {"equal": equal, "freed": rounded(until(all_free(prefill, decode), prefill, decode, seconds=SHORT))}


def departed() -> dict[str, Any]:
    """Clients leave while prefill is still computing, each with a pull of its own. Then another one comes."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    names = [str(number) for number in range(CLIENTS)]
    for name in names:
        tokens = prompt(4)
        prefill.prefill(f"p{name}", f"t{name}", tokens)
        decode.decode(f"d{name}", f"t{name}", tokens, prefill)
        decode.step()
    prefill.step()
    until(lambda: len(prefill.worker.reqs_need_send) == CLIENTS, seconds=SHORT)
    prefill.lab.abort(*(f"p{name}" for name in names))
    decode.lab.abort(*(f"d{name}" for name in names))
    return _next_one(prefill, decode)


def waiting() -> dict[str, Any]:
    """As many pulls wait for prefills that have not come."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    for number in range(CLIENTS):
        decode.decode(f"d{number}", f"t{number}", prompt(4), prefill)
        decode.step()
    return _next_one(prefill, decode)


def _next_one(prefill: Engine, decode: Engine) -> dict[str, Any]:
    tokens = prompt()
    prefill.prefill("p", "t", tokens)
    decode.decode("d", "t", tokens, prefill)
    served = until(arrived(decode, "d"), prefill, decode, seconds=LONG)
    decode.lab.abort("d")
    freed = until(all_free(prefill, decode), prefill, decode, seconds=SHORT)
    return {"served": rounded(served), "freed": rounded(freed), "kept": len(prefill.worker.reqs_need_send)}


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
    ended = until(lambda: "WAITING_FOR" not in decode.lab.status("d"), prefill, decode, seconds=SHORT)
    if ended < SHORT:
        until(lambda: not decode.lab.busy, prefill, decode, seconds=SHORT)
    return [rounded(ended), decode.lab.finish_reasons.get("d")]


def left_before_prefill() -> dict[str, Any]:
    """A client leaves decode, then its prefill comes after all. Its KV must not go where other KV is by now."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.fill_(1)
    tokens = prompt()
    decode.decode("d", "t", tokens, prefill)
    until(lambda: "t" in prefill.worker.reqs_need_send, decode, seconds=SHORT)
    decode.lab.abort("d")
    freed = until(all_free(decode), decode, seconds=SHORT)
    prefill.prefill("p", "t", tokens)
    prefill_freed = until(lambda: prefill.lab.get("p") is None, prefill, decode, seconds=SHORT)
    time.sleep(0.1)
    return {"freed": rounded(freed), "prefill freed": rounded(prefill_freed), "written": bool(decode.kv.any())}


def left_during_write() -> dict[str, Any]:
    """A client leaves while its KV is being written: the blocks are its own until that has ended."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    begun, go_on = slowed(prefill)
    tokens = prompt()
    prefill.prefill("p", "t", tokens)
    decode.decode("d", "t", tokens, prefill)
    until(begun.is_set, prefill, decode, seconds=SHORT)
    decode.lab.abort("d")
    held = until(all_free(decode), prefill, decode, seconds=0.5)
    go_on.set()
    freed = until(all_free(prefill, decode), prefill, decode, seconds=SHORT)
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
    until(begun.is_set, second, decode, seconds=SHORT)
    failed = until(lambda: "d" in decode.lab.finish_reasons, first, decode, seconds=SHORT)
    held = until(all_free(decode), first, second, decode, seconds=0.3)
    go_on.set()
    freed = until(all_free(decode), first, second, decode, seconds=SHORT)
    return {"failed": rounded(failed), "freed during the write": rounded(held), "freed after it": rounded(freed)}


def slowed(prefill: Engine) -> tuple[threading.Event, threading.Event]:
    """Its writes: when one has begun, and what it then waits for."""
    begun, go_on = threading.Event(), threading.Event()
    write = prefill.worker._send_blocks

    def slowly(*args: Any) -> int:
        begun.set()
        go_on.wait(10)
        return int(write(*args))

    prefill.worker._send_blocks = slowly
    return begun, go_on


def killed() -> dict[str, Any]:
    """The prefill that decode waits for is stopped, goes on, and is killed; then another one is asked for."""
    decode = Engine("kv_consumer")
    seen: dict[str, Any] = {}
    with remote_prefill() as prefill:
        decode.decode("d", "t", prompt(), prefill)
        until(lambda: bool(decode.worker._remote_agents), decode, seconds=LONG)
        until(lambda: False, decode, seconds=0.2)
        prefill.stop()
        waits = until(lambda: decode.lab.status("d") == "GONE", decode, seconds=SHORT)
        prefill.go_on()
        tokens = prompt()
        prefill.prefill("p2", "t2", tokens)
        decode.decode("d2", "t2", tokens, prefill)
        seen["stopped"] = {"gave up": rounded(waits), "then served": rounded(until(arrived(decode, "d2"), decode))}
        decode.lab.abort("d2")
        until(lambda: decode.lab.get("d2") is None, decode, seconds=SHORT)
        prefill.kill()
        seen["ended"] = rounded(until(lambda: decode.lab.status("d") == "GONE", decode, seconds=2.5))
        seen["freed"] = rounded(until(all_free(decode), decode, seconds=SHORT))
        seen["reason"] = decode.lab.finish_reasons.get("d")
        seen["forgotten"] = prefill.engine_id not in decode.worker._remote_agents
        decode.decode("d3", "t3", prompt(), prefill)
        seen["asked again"] = rounded(until(lambda: decode.lab.status("d3") == "GONE", decode, seconds=SHORT))
    return seen


def other_peer() -> dict[str, Any]:
    """Decode withdraws from a prefill without the patch: nothing is broken, and nothing is released early."""
    decode = Engine("kv_consumer")
    with remote_prefill() as prefill:
        tokens = prompt()
        decode.decode("d", "t", tokens, prefill)
        until(lambda: bool(decode.worker._remote_agents), decode, seconds=LONG)
        until(lambda: False, decode, seconds=0.2)
        decode.lab.abort("d")
        freed = until(all_free(decode), decode, seconds=0.5)
        prefill.prefill("p", "t", tokens)
        then = until(all_free(decode), decode, seconds=LONG)
        prefill.prefill("p2", "t2", tokens)
        decode.decode("d2", "t2", tokens, prefill)
        served = until(arrived(decode, "d2"), decode, seconds=LONG)
    return {"freed early": rounded(freed), "freed by the transfer": rounded(then), "next served": rounded(served)}


def reconnected() -> dict[str, Any]:
    """The connection breaks and both live: the answer is lost, the blocks may still be written."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    with Relay(prefill.worker.side_channel_port) as relay:
        decode.worker._remote_agents[prefill.engine_id] = {0: {0: f"tcp://127.0.0.1:{relay.port}"}}
        decode.worker._tp_size[prefill.engine_id] = 1
        tokens = prompt()
        decode.decode("d", "t", tokens, prefill)
        until(lambda: "t" in prefill.worker.reqs_need_send, decode, prefill, seconds=SHORT)
        relay.cut()
        ended = until(lambda: decode.lab.status("d") == "GONE", decode, prefill, seconds=SHORT)
        prefill.kv.fill_(1)
        prefill.prefill("p", "t", tokens)
        until(lambda: prefill.lab.get("p") is None, prefill, decode, seconds=0.3)
    return {"ended": rounded(ended), "reason": decode.lab.finish_reasons.get("d"), "written": bool(decode.kv.any())}


def stopped_by_token() -> dict[str, Any]:
    """Prefill's one token is a stop token."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.copy_(torch.rand_like(prefill.kv))
    tokens = prompt()
    prefill.prefill("p", "t", tokens, stop_token_ids=[7])
    decode.decode("d", "t", tokens, prefill)
    prefill.step()
    served = until(arrived(decode, "d"), prefill, decode, seconds=SHORT)
    equal = torch.equal(decode.kv[decode.lab.blocks("d")[:2]], prefill.kv[[1, 2]]) if served < SHORT else None
    return {"served": rounded(served), "equal": equal, "prefill ended by": prefill.lab.finish_reasons.get("p")}


def unknown_transfer() -> str | None:
    """Prefill's scheduler names a transfer that its worker has never heard of."""
    prefill = Engine("kv_producer")
    metadata = mooncake_connector.MooncakeConnectorMetadata()
    metadata.reqs_not_processed = {"never heard of"}
    done = asyncio.run_coroutine_threadsafe(prefill.worker.record_send_reqs(metadata), prefill.worker.sender_loop)
    error = done.exception(5)
    return None if error is None else type(error).__name__


def same_id_twice() -> dict[str, Any]:
    """A list of prompts with one transfer id: the second prefill's blocks are nobody's."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    one, two = prompt(), prompt()
    prefill.prefill("p1", "t", one)
    prefill.prefill("p2", "t", two)
    until(lambda: not prefill.lab.busy, prefill, seconds=SHORT)
    decode.decode("d1", "t", one, prefill)
    until(arrived(decode, "d1"), prefill, decode, seconds=SHORT)
    return {"freed": rounded(until(all_free(prefill), prefill, decode, seconds=SHORT))}


def bootstrap() -> dict[str, Any]:
    """A prefill registers at a server that knows a predecessor: one that lives, one that is dead."""
    port = free_port()
    server = mooncake_utils.MooncakeBootstrapServer("127.0.0.1", port)
    server.start()
    old, other = socket.create_server(("127.0.0.1", 0)), free_port()

    def register(engine: str, address: int, rank: int = 0) -> int:
        payload = {"engine_id": engine, "dp_rank": 0, "tp_rank": rank, "pp_rank": 0}
        payload["addr"] = f"tcp://127.0.0.1:{address}"
        return httpx.post(f"http://127.0.0.1:{port}/register", json=payload, timeout=10).status_code

    seen: dict[str, Any] = {"first": register("one", old.getsockname()[1])}
    seen["beside a living one"] = register("two", other)
    seen["known"] = httpx.get(f"http://127.0.0.1:{port}/query").json()["0"]["engine_id"]
    old.close()
    seen["after a dead one"] = register("two", other)
    seen["its other rank"] = register("two", free_port(), rank=1)
    seen["the same again, moved"] = register("two", free_port())
    entry = httpx.get(f"http://127.0.0.1:{port}/query").json()["0"]
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
        killed,
        other_peer,
        reconnected,
        stopped_by_token,
        unknown_transfer,
        same_id_twice,
        bootstrap,
    )
}


def main() -> None:
    chosen = sys.argv[1:] or list(SCENARIOS)
    prepare_remote_prefills(4)
    seen: dict[str, Any] = {"construction": [construction()]}
    mooncake_cpu_device.apply()
    seen["construction"].append(construction())
    seen["verdicts"] = {patch.name: judge(patch, installed()).outcome for patch in PATCHES}
    mooncake_bootstrap._PATIENCE_SECONDS = 0.5
    # Without the patches most of them only wait, so they wait together. With them they are timed one by one.
    with ThreadPoolExecutor(len(SCENARIOS)) as together:
        for name, without in {name: together.submit(SCENARIOS[name]) for name in chosen if name in SCENARIOS}.items():
            seen[name] = [without.result()]
    parameters.verdicts(seen.setdefault("parameters", {}))
    for patch in PATCHES:
        patch.apply()
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
