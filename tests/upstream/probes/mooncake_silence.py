"""A prefill that says nothing: it is stopped, killed, does not know withdrawals, or its answer comes late or is lost.

Scenarios of the probe mooncake_transfers.
"""

from __future__ import annotations

from typing import Any

from tests.upstream.mooncake_steps import LONG, WATCHED, all_free, arrived, prompt, rounded, slowed, soon  # isort: skip

from tests.upstream.mooncake_lab import Engine, Relay, impatient, remote_prefill, until
from tests.upstream.probes import mooncake_flood as flood


def killed() -> dict[str, Any]:
    """The prefill that decode waits for is stopped, goes on, and is killed; then another one is asked for."""
    decode = Engine("kv_consumer")
    seen: dict[str, Any] = {}
    with remote_prefill() as prefill:
        decode.decode("d", "t", prompt(), prefill)
        until(lambda: bool(decode.worker._remote_agents), decode, seconds=LONG)
        until(lambda: False, decode, seconds=0.2)
        prefill.stop()
        waits = until(lambda: decode.lab.status("d") == "GONE", decode, seconds=WATCHED)
        prefill.go_on()
        tokens = prompt()
        prefill.prefill("p2", "t2", tokens)
        decode.decode("d2", "t2", tokens, prefill)
        seen["stopped"] = {"gave up": rounded(waits), "then served": rounded(until(arrived(decode, "d2"), decode))}
        decode.lab.abort("d2")
        until(lambda: decode.lab.get("d2") is None, decode, seconds=soon())
        prefill.kill()
        seen["ended"] = rounded(until(lambda: decode.lab.status("d") == "GONE", decode, seconds=max(10, soon())))
        seen["freed"] = rounded(until(all_free(decode), decode, seconds=soon()))
        seen["reason"] = decode.lab.finish_reasons.get("d")
        seen["forgotten"] = prefill.engine_id not in decode.worker._remote_agents
        decode.decode("d3", "t3", prompt(), prefill)
        seen["asked again"] = rounded(until(lambda: decode.lab.status("d3") == "GONE", decode, seconds=soon()))
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
        seen: dict[str, Any] = {
            "freed early": rounded(freed),
            "freed by the transfer": rounded(then),
            "next served": rounded(served),
        }
        if not flood.patched():
            return seen  # until 0.30 upstream's scheduler asserts at the pull of a rejected request
        flood.reject(decode, "d3", prefill, "t3")
        until(lambda: False, decode, seconds=0.3)
        seen["a rejected one is pulled"] = flood.open_pulls(decode) > 0
        prefill.prefill("p3", "t3", prompt())
        released = until(lambda: not flood.open_pulls(decode), decode, seconds=soon())
        return {**seen, "released by its transfer": rounded(released)}


def reconnected() -> dict[str, Any]:
    """The connection breaks and both live: the answer is lost, the blocks may still be written."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    with Relay(prefill.worker.side_channel_port) as relay:
        decode.worker._remote_agents[prefill.engine_id] = {0: {0: f"tcp://127.0.0.1:{relay.port}"}}
        decode.worker._tp_size[prefill.engine_id] = 1
        tokens = prompt()
        decode.decode("d", "t", tokens, prefill)
        until(lambda: "t" in prefill.worker.reqs_need_send, decode, prefill, seconds=soon())
        relay.cut()
        ended = until(lambda: decode.lab.status("d") == "GONE", decode, prefill, seconds=soon())
        prefill.kv.fill_(1)
        prefill.prefill("p", "t", tokens)
        until(lambda: prefill.lab.get("p") is None, prefill, decode, seconds=0.3)
    return {"ended": rounded(ended), "reason": decode.lab.finish_reasons.get("d"), "written": bool(decode.kv.any())}


def unanswered() -> dict[str, Any]:
    """Decode's own time for an answer (0.3 s here, 60 s more than the abort timeout) ends before prefill has said any.

    Prefill is writing, will never have the KV, or is stopped and then killed.
    """
    return {"writing": _unanswered_write(), "nothing comes": _unanswered_wait(), "stopped": _unanswered_stop()}


def _unanswered_write() -> dict[str, Any]:
    prefill, decode = Engine("kv_producer"), impatient(Engine("kv_consumer"))
    begun, go_on = slowed(prefill)
    tokens = prompt()
    prefill.prefill("p", "t", tokens)
    decode.decode("d", "t", tokens, prefill)
    until(begun.is_set, prefill, decode, seconds=soon())
    held = until(all_free(decode), prefill, decode, seconds=WATCHED)
    go_on.set()
    return {"freed": rounded(held), "freed then": rounded(until(all_free(decode), prefill, decode, seconds=soon()))}


def _unanswered_wait() -> dict[str, Any]:
    prefill, decode = Engine("kv_producer"), impatient(Engine("kv_consumer"))
    prefill.kv.fill_(1)
    tokens = prompt()
    decode.decode("d", "t", tokens, prefill)
    until(lambda: "t" in prefill.worker.reqs_need_send, decode, seconds=soon())
    freed = until(all_free(decode), decode, seconds=soon())
    prefill.prefill("p", "t", tokens)
    until(lambda: prefill.lab.get("p") is None, prefill, decode, seconds=0.3)
    return {"freed": rounded(freed), "reason": decode.lab.finish_reasons.get("d"), "written": bool(decode.kv.any())}


def _unanswered_stop() -> dict[str, Any]:
    decode = impatient(Engine("kv_consumer"))
    with remote_prefill() as prefill:
        decode.decode("d", "t", prompt(), prefill)
        until(lambda: bool(decode.worker._remote_agents), decode, seconds=LONG)
        prefill.stop()
        held = until(all_free(decode), decode, seconds=WATCHED)
        prefill.kill()
        freed = until(all_free(decode), decode, seconds=soon())
    return {"freed": rounded(held), "freed then": rounded(freed)}
