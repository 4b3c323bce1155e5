"""vllm#53049: NIXL reads nothing into the blocks of a request that another child of MultiConnector loads."""

from __future__ import annotations

from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, on

if IN_RELEASE:
    from tests.upstream.nixl_lab import DECODE, PULL
    from tests.upstream.scheduler_lab import Lab, mock, multi

PROMPT = 128


@on(*ALL_VLLM_VERSIONS)
def test_a_child_that_was_not_chosen_writes_to_no_block() -> None:
    """Of a prompt of eight blocks. It still releases those of prefill."""
    for matched, loads, blocks in ((0, 0, 8), (PROMPT, 1, 0)):
        lab = Lab(max_num_batched_tokens=2 * PROMPT, connector=multi(mock(), DECODE))
        pull = PULL | {"remote_block_ids": (list(range(1, 9)),), "remote_request_id": "a"}
        lab.add("a", PROMPT, pull | {"mock": {"matched": matched}})
        (_, nixl) = lab.schedule().kv_connector_metadata.metadata
        read = nixl.reqs_to_recv["a"]
        assert (len(lab.book.loads), sum(len(group) for group in read.local_block_ids)) == (loads, blocks)
