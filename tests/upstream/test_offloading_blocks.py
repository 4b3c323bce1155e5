"""A store of OffloadingConnector is waited for before a load of another child writes to its blocks, or it stores KV of
another prompt. On the real Scheduler and MultiConnector."""

from __future__ import annotations

from pdserve.patches.offloading import NAME, NOTED, PATCH
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, count, on, verdict

if IN_RELEASE:
    from tests.upstream.scheduler_lab import Lab, mock, multi

PROMPT = 128
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}


@on(*ALL_VLLM_VERSIONS)
def test_it_is_waited_for_with_the_patch_and_since_0_33(version: str) -> None:
    assert waited_for() == (version >= "0.33")
    assert (verdict(PATCH) == "apply") == (version < "0.33")
    if version < "0.33":
        PATCH.apply()
        PATCH.apply()
        assert waited_for()
        assert count(NAME, NOTED) > 0


def waited_for() -> bool:
    """One request is stored, and ends before its store has; another one loads into its blocks by the other child."""
    lab = Lab(num_blocks=PROMPT // 16 + 3, max_num_batched_tokens=2 * PROMPT, connector=multi(mock(), OFFLOADING))
    (_, offloading) = lab.connector._connectors
    manager = offloading.connector_scheduler.manager
    if hasattr(manager, "_num_blocks"):
        manager._num_blocks = 1 << 10  # of as many bytes as the lab's layers have, which is none
    lab.add("stored", PROMPT, max_tokens=3)
    jobs: set[int] = set()
    for _ in range(6):
        output = lab.schedule()
        (_, told) = output.kv_connector_metadata.metadata
        jobs |= set(told.store_jobs)
        lab.update(output)
    assert (lab.status("stored"), len(jobs)) == ("GONE", 1)
    lab.add("loads", PROMPT, {"mock": {"matched": PROMPT - 16}})
    (_, told) = lab.schedule().kv_connector_metadata.metadata
    assert [load.request_id for load in lab.book.loads] == ["loads"]
    return jobs <= set(told.jobs_to_flush or ())
