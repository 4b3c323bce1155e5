"""A NIXL receive that has failed: the request is computed anew or fails, with several KV groups as with one.

On the real Scheduler and both real halves of NixlConnector.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from pdserve.patches.nixl import FAILED, FAILED_GROUPS
from pdserve.patches.scheduler import failed_group
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, count, on, verdict

if IN_RELEASE:
    from tests.upstream.nixl_lab import BLOCK_SIZE, DECODE, PULL, Engine

NONSENSE = (False, [4, 12], "length", True)
"""Four tokens, of a prompt whose KV neither came nor was computed."""
POLICIES = {"recompute": (True, [4, 12], "length", True), "fail": (False, [0, 12], "error", True)}
WAYS = ("the handshake", "the transfer")


@on(*ALL_VLLM_VERSIONS)
def test_with_several_groups_nonsense_is_answered_before_0_30_and_not_with_the_patch(version: str) -> None:
    for policy, end in POLICIES.items():
        for what in WAYS:
            assert receive(what, policy, groups=1) == end, (what, policy)
            assert receive(what, policy) == (NONSENSE if version < "0.30" else end), (what, policy)
    if version < "0.30":
        assert verdict(FAILED_GROUPS) == "apply"
        FAILED_GROUPS.apply()
        FAILED_GROUPS.apply()
    else:
        assert verdict(FAILED_GROUPS) == "not-needed"
    for policy, end in POLICIES.items():
        for what in WAYS:
            assert receive(what, policy) == receive(what, policy, groups=1) == end, (what, policy)
        assert receive("the handshake", policy, workers=2) == end, policy
    if version < "0.30":
        # Of each policy two receives by one worker; and of two workers the one that fails at once, then the other.
        assert count(FAILED_GROUPS.name, FAILED) == 2 * (2 + 2)
        assert count(FAILED_GROUPS.name, failed_group.RECOMPUTATIONS) >= 2 * (2 + 1)


def receive(what: str, policy: str, *, groups: int = 2, workers: int = 1) -> Any:
    """One request whose receive fails in the first worker, beside one that needs none: whether it is computed anew,
    tokens of both, how it has ended, and whether all blocks are free."""
    prompt = 4 * BLOCK_SIZE
    decode = Engine(
        DECODE,
        workers=workers,
        window=2 * BLOCK_SIZE if groups == 2 else None,
        max_num_batched_tokens=2 * prompt,
        load_failure_policy=policy,
    )
    decode.lab.add("other", 40, max_tokens=12)
    for index, worker in enumerate(decode.workers):
        if index == 0 and what == "the handshake":
            worker._nixl_handshake = mock.Mock(side_effect=ConnectionError("no prefill listens there"))
        else:
            worker._remote_agents[PULL["remote_engine_id"]] = {}
            worker._read_blocks_for_req = lambda name, _, worker=worker: worker._recving_transfers[name].append(7)
            worker.nixl_wrapper.check_xfer_state = lambda _, index=index: "PROC" if index else "ERR"
    decode.lab.add("a", prompt, PULL | {"remote_request_id": "a"}, max_tokens=4)
    for step in range(40):
        if step == 2:  # the others' transfers end, with an error as well, so that no KV has to be looked at
            for worker in decode.workers:
                worker.nixl_wrapper.check_xfer_state = lambda _: "ERR"
        decode.step()
    tokens = [len(decode.lab.outputs.get(name, [])) for name in ("a", "other")]
    return decode.scheduled.get("a", 0) >= prompt, tokens, decode.lab.finish_reasons.get("a"), decode.all_free
