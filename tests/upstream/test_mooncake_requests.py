"""MooncakeConnector's scheduler half, real, with kv_transfer_params as a client or a broken router may send them."""

from __future__ import annotations

from typing import Any

from pdserve.patches.mooncake.requests import PATCH
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, count, on

if IN_RELEASE:
    from tests.upstream.scheduler_lab import Lab

WHOLE: dict[str, Any] = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "remote_engine_id": "e",
    "remote_bootstrap_addr": "http://127.0.0.1:1",
}
ASKED: dict[str, Any] = {"do_remote_decode": True, "transfer_id": "t"}
FLAG_ALONE = {"do_remote_prefill": True}
AT_DECODE: tuple[Any, ...] = (
    *(FLAG_ALONE, {"do_remote_prefill": "no"}, ASKED, WHOLE | {"do_remote_decode": True}),
    *({name: value for name, value in WHOLE.items() if name != lacking} for lacking in WHOLE if lacking[0] != "d"),
    *(WHOLE | {"transfer_id": ""}, WHOLE | {"transfer_id": 7}, WHOLE | {"remote_engine_id": ["e"]}),
    *("do_remote_prefill", ["do_remote_prefill"], [], "", 0),
)
AT_PREFILL: tuple[Any, ...] = (
    *(WHOLE, {"do_remote_decode": True}, ASKED | {"transfer_id": ["t"]}, [], "do_remote_decode"),
)
BAD = [("kv_consumer", params) for params in AT_DECODE] + [("kv_producer", params) for params in AT_PREFILL]
GOOD = [
    ("kv_consumer", WHOLE),
    ("kv_producer", ASKED),
    ("kv_consumer", {}),
    ("kv_consumer", {"transfer_id": "t", "lmcache.max_offload_tokens": 3}),
]
WHEN = ("never", "waiting", "later")
"""The client leaves: waiting, before it is scheduled."""


@on(*VLLM_VERSIONS)
def test_each_is_served_without_a_transfer_and_counted_once_with_the_patch() -> None:
    """Upstream parks some for KV that no prefill was asked for, and EngineCore ends with others. What is right is left
    alone."""
    before = {str(case): [tried(*case, when) for when in WHEN] for case in (*BAD, *GOOD)}
    parked = {case for case, ends in before.items() if ends[0] == "waits"}
    without = [{name: value for name, value in WHOLE.items() if name != lacking} for lacking in WHOLE]
    parks = (FLAG_ALONE, {"do_remote_prefill": "no"}, *without[1:])
    assert parked >= {str(("kv_consumer", params)) for params in parks}
    assert before[str(("kv_consumer", without[1]))][2] == "holds blocks as WAITING_FOR_REMOTE_KVS"
    for error, case in {
        "AssertionError": ("kv_consumer", ASKED),
        "KeyError": ("kv_consumer", without[2]),
        "TypeError": ("kv_consumer", WHOLE | {"remote_engine_id": ["e"]}),
        "AttributeError": ("kv_consumer", "do_remote_prefill"),
    }.items():
        assert error in before[str(case)], case
    assert "AssertionError" in before[str(("kv_producer", WHOLE))]
    PATCH.apply()
    for case in BAD:
        for when in WHEN:
            rejected = count(PATCH.name, "params-rejected")
            assert tried(*case, when) == "served", (case, when)
            assert count(PATCH.name, "params-rejected") == rejected + 1, (case, when)
    rejected = count(PATCH.name, "params-rejected")
    assert {str(case): [tried(*case, when) for when in WHEN] for case in GOOD}.items() <= before.items()
    assert count(PATCH.name, "params-rejected") == rejected == 3 * 20


def tried(role: str, params: Any, when: str) -> str:
    """Return what an engine does with it: "served", "waits", or the error that ends EngineCore."""
    lab = Lab(connector={"kv_connector": "MooncakeConnector", "kv_role": role})
    try:
        lab.add("bad", 64, dict(params) if isinstance(params, dict) else params, max_tokens=1)
        if when == "waiting":
            lab.abort("bad")
        for _ in range(5):
            lab.step()
        status = lab.status("bad")
        if when == "later":
            lab.abort("bad")
            lab.step()
        lab.add("next", 64, max_tokens=1)
        for _ in range(5):
            lab.step()
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        return type(error).__name__
    assert lab.finish_reasons["next"] == "length"
    if status == "WAITING_FOR_REMOTE_KVS" and when == "never":
        return "waits"
    return f"holds blocks as {status}" if lab.free_blocks != 63 else "served"
