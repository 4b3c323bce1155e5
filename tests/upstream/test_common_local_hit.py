"""A model with recurrent state goes on where it has a state: on the real Scheduler, with a prefix cache whose KV groups
have hits of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.patches.scheduler import common_local_hit
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, count, on, verdict

if IN_RELEASE:
    from tests.upstream.scheduler_lab import Lab, mock, multi

BLOCK = 16
PROMPT = list(range(1000, 1000 + 7 * BLOCK + 1))
"""Its states are kept at the ends of its steps: after 64 tokens and after 112."""
LONGER = [*PROMPT, *range(2000, 2000 + 5 * BLOCK)]
FULL, STATE = 0, 1
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
WHOLE, NO_STATE, LAST_STATE = "nothing is evicted", "no state is left", "the last state is evicted"
ATTENTION = "full attention is evicted behind 32 tokens"
OFFERED, OFFERED_WHOLE = "no state is left, 160 tokens are offered", "nothing is evicted, 160 tokens are offered"
EVICTED: dict[str, Mapping[int, slice]] = {
    WHOLE: {},
    NO_STATE: {STATE: slice(None)},
    LAST_STATE: {STATE: slice(4, None)},
    ATTENTION: {FULL: slice(2, None)},
    OFFERED: {STATE: slice(None)},
    OFFERED_WHOLE: {},
}
"""Case -> of each group which of its blocks are gone."""
RIGHT: dict[str, Any] = {
    **{WHOLE: (112, True), NO_STATE: (0, True), LAST_STATE: (64, True), ATTENTION: (0, True)},
    **{OFFERED: 160, OFFERED_WHOLE: 48},
}


@on(*ALL_VLLM_VERSIONS)
def test_a_request_goes_on_where_every_group_can_with_the_patch_and_since_0_28(version: str) -> None:
    """Until 0.26 the longest hit of any group counts, whatever the connector offers. Until 0.27 the state is left to
    any connector. NIXL alone keeps upstream's answer where upstream falls back."""
    unpatched = look()
    if version >= "0.28":
        assert (verdict(common_local_hit.PATCH), unpatched) == ("not-needed", RIGHT)
        return
    assert verdict(common_local_hit.PATCH) == "apply"
    assert [unpatched[case] for case in (WHOLE, OFFERED_WHOLE)] == [RIGHT[case] for case in (WHOLE, OFFERED_WHOLE)]
    assert unpatched[OFFERED] == 48
    if version < "0.27":
        assert unpatched[NO_STATE] == unpatched[LAST_STATE] == (112, False)
    common_local_hit.PATCH.apply()
    common_local_hit.PATCH.apply()
    assert look() == RIGHT
    assert count(common_local_hit.PATCH.name, common_local_hit.BROUGHT_TOGETHER) == len(RIGHT) - 2
    assert [is_common(each) for each in (NIXL, multi(NIXL, mock()), mock())] == [version < "0.27", True, True]


def look() -> dict[str, Any]:
    return {case: second(evicted, 160 if "offered" in case else 0) for case, evicted in EVICTED.items()}


def second(evicted: Mapping[int, slice], offered: int) -> Any:
    """Of a request that goes on from what a first one has left: after how many tokens, and whether it has a state
    there; what it loads; or what it dies of."""
    lab = Lab(block_size=BLOCK, max_num_batched_tokens=4 * BLOCK, recurrent_state=True)
    lab.add("first", PROMPT, max_tokens=1)
    blocks: dict[int, dict[int, int]] = {FULL: {}, STATE: {}}
    for _ in range(3):
        output = lab.schedule()
        for group, seen in blocks.items():
            seen.update((at, block) for at, block in enumerate(lab.blocks("first", group)) if block)
        lab.update(output)
    assert lab.status("first") == "GONE"
    for group, which in evicted.items():
        lab.pool.evict_blocks({block for at, block in blocks[group].items() if at in range(7)[which]})
    lab.add("second", LONGER, {"mock": {"matched": offered}})
    try:
        output = lab.schedule()
    except Exception as error:  # noqa: BLE001  # whatever ends EngineCore
        return type(error).__name__
    if lab.book.loads:
        return lab.book.loads[0].tokens
    (new,) = output.scheduled_new_reqs
    at = new.num_computed_tokens
    return at, at == 0 or bool(lab.blocks("second", STATE)[at // BLOCK - 1])


def is_common(connector: Mapping[str, Any]) -> bool:
    """Tell whether the patch takes the common hit with that connector."""
    lab = Lab(block_size=32, recurrent_state=True, connector=connector)
    return bool(getattr(lab.scheduler.kv_cache_manager.coordinator, "pdserve_common_hit", False))
