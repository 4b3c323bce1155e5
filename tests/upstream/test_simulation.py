"""Random KV-starved workloads: loads, failed loads, aborts, preemptions, late sends and bogus notifications.

At every step each block is free once or held as often as it is counted, and nothing is freed or run under a transfer;
at the end every request has its tokens and no block, lock or request is left.
"""

from __future__ import annotations

from typing import Any

from pdserve.installed.versions import Versions
from pdserve.patches.scheduler import stale_completions
from pdserve.plan.versions import check_known, role_features
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, VLLM_VERSIONS, on

if IN_RELEASE:
    from tests.upstream import simulation
    from tests.upstream.scheduler_lab import Lab

CASCADING = "0.27.1"
"""vllm#49674: see below."""
UNPATCHED_RUNS = 50
PATCHED_RUNS = 120


@on(*VLLM_VERSIONS)
def test_with_our_patches_nothing_goes_wrong(version: str) -> None:
    for way, seen in simulation.patched(PATCHED_RUNS).items():
        if way == "overlapping" and version == CASCADING:
            assert seen["kinds"].keys() == {"ok", "endless"}
            continue
        assert seen["failures"] == {}
        assert seen["kinds"] == {"ok": seen["runs"]}
        assert seen["noises"] > 10 * seen["runs"]


@on(*VLLM_VERSIONS)
def test_upstream_dies_of_bogus_notifications_and_of_true_ones_about_aborted_loads() -> None:
    """With the guard it does not; what is left are deadlocks, whatever the cap of a load in tokens. Before 0.31 they
    are of a queue head that stops those whose KV has arrived. Since 0.31 only when a load fails in a hybrid model: see
    test_failed_loads."""
    seeds = range(UNPATCHED_RUNS)
    seen = simulation.summary(seeds, noise=simulation.NOISE)
    assert seen["kinds"]["crash"] > UNPATCHED_RUNS / 2
    seen = simulation.summary(seeds, noise=0)
    assert "_update_from_kv_xfer_finished" in seen["failures"]["crash"]
    stale_completions.PATCH.apply()
    kinds: set[str] = set()
    for cap in (0, 64, 256):
        kinds |= simulation.summary(seeds, noise=0, cap=cap)["kinds"].keys()
    assert kinds <= {"ok", "deadlock"} | ({"endless"} if CASCADING == IN_RELEASE else set())
    assert simulation.LOADED_GO_FIRST or "deadlock" in kinds


@on(*ALL_VLLM_VERSIONS)
def test_two_plain_requests_preempt_each_other_for_ever_where_the_plan_warns_of_it(version: str) -> None:
    """vllm#49674, by overlapping steps beside a connector that can load; no transfer takes part, and nothing of ours
    changes it."""
    used = role_features(role="decode", platform="cpu", connectors=frozenset({"NixlConnector"}), per_tp_rank=False)
    warned = any("vllm#49674" in warning for warning in check_known([used], Versions(vllm=version)))
    assert warned == ("0.27" <= version < "0.30")
    lab = Lab(num_blocks=9, max_num_batched_tokens=512, max_num_seqs=2, async_scheduling=True)
    lab.add("long", 84, max_tokens=15)
    under_way: list[Any] = []
    for step in range(400):
        if step == 7:
            lab.add("short", 19, max_tokens=19)
        under_way.append(lab.schedule())
        if len(under_way) == 2:
            lab.update(under_way.pop(0))
    assert lab.busy == warned
