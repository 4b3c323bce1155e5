"""A decode engine with vLLM's real Scheduler and both real halves of NixlConnector, for a model with two KV groups.

The library's agent is stood in for, and so is what fails: the handshake with the prefill, or a transfer.
"""

from __future__ import annotations

from tests.upstream.nixl_lab import BLOCK_SIZE, BLOCKS, NIXL, nixl_of, without_the_library  # isort: skip

import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import ModelRunnerOutput

from tests.upstream.engine_config import kv_cache_config
from tests.upstream.scheduler_lab import Lab, connector_report

PREFILL = "prefill-engine"
PROMPT = 4 * BLOCK_SIZE
WINDOW = 2 * BLOCK_SIZE
UNREACHABLE = "the handshake"
BROKEN = "the transfer"
FAILURES = (UNREACHABLE, BROKEN)
PULL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": PREFILL,
    "remote_host": "localhost",
    "remote_port": 1,
    "remote_block_ids": ([1, 2, 3, 4], [1, 2, 3, 4]),
    "tp_size": 1,
}


class Decode:
    """`policy`: kv_load_failure_policy. `window`: of the second KV group, in tokens; None: there is one group."""

    def __init__(self, policy: str, *, window: int | None = WINDOW, workers: int = 1) -> None:
        transfer = NIXL | {"kv_role": "kv_consumer"}
        self.lab = Lab(
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=2 * PROMPT,
            connector=transfer,
            load_failure_policy=policy,
            sliding_window=window,
        )
        self.lab.config.scheduler_config.disable_hybrid_kv_cache_manager = False
        self.workers = [self._worker(window) for _ in range(workers)]
        self._together = KVOutputAggregator(expected_finished_count=workers)
        self.empty = self.lab.free_blocks
        self.scheduled: dict[str, int] = {}
        """Tokens that were computed here, of each request."""

    def _worker(self, window: int | None) -> Any:
        layout = kv_cache_config(BLOCKS, BLOCK_SIZE, window)
        with set_current_vllm_config(self.lab.config), without_the_library():
            worker = KVConnectorFactory.create_connector(self.lab.config, KVConnectorRole.WORKER, layout)
        # Nothing is ever moved: it is only asked whether it is there.
        nixl_of(worker).connector_worker.transfer_topo = mock.Mock()
        return worker

    def fail(self, what: str, worker: int = 0) -> None:
        """From now on, of one worker. The others go on with a transfer that never ends."""
        for index, connector in enumerate(self.workers):
            half = nixl_of(connector).connector_worker
            if index == worker and what == UNREACHABLE:
                half._nixl_handshake = mock.Mock(side_effect=ConnectionError("no prefill listens there"))
                continue
            half._remote_agents[PREFILL] = {}
            half._read_blocks_for_req = lambda name, _, half=half: half._recving_transfers[name].append(7)
            half.nixl_wrapper.check_xfer_state = lambda _, index=index: "ERR" if index == worker else "PROC"

    def end_the_other_transfers(self) -> None:
        """With an error as well, so that no KV has to be looked at."""
        for connector in self.workers:
            nixl_of(connector).connector_worker.nixl_wrapper.check_xfer_state = lambda _: "ERR"

    def pull(self, name: str) -> None:
        """A request whose KV a prefill has, as far as its parameters say."""
        self.lab.add(name, PROMPT, PULL | {"remote_request_id": name}, max_tokens=4)

    def step(self) -> None:
        """One step of the engine, with what its workers report."""
        output = self.lab.schedule()
        for name, tokens in output.num_scheduled_tokens.items():
            self.scheduled[name] = self.scheduled.get(name, 0) + tokens
        reports = [_report(worker, output) for worker in self.workers]
        answers = [ModelRunnerOutput([], {}, kv_connector_output=report) for report in reports]
        together = self._together.aggregate(answers, output_rank=0).kv_connector_output
        self.lab.update(
            output,
            finished_recving=together.finished_recving or (),
            invalid_block_ids=together.invalid_block_ids,
            failed_recving=getattr(together, "failed_recving", ()),
        )


def _report(worker: Any, output: Any) -> Any:
    """What a worker says of a step. The handshake's thread has then done what it was asked for."""
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
    worker.start_load_kv(SimpleNamespace(attn_metadata=None))
    nixl_of(worker).connector_worker._handshake_initiation_executor.submit(int).result()
    failed: set[str] = set()
    if hasattr(worker, "get_transfer_results"):
        results = worker.get_transfer_results(output.finished_req_ids)
        received, failed = results.finished_recving, results.failed_recving
    else:
        _, received = worker.get_finished(output.finished_req_ids)
    invalid = worker.get_block_ids_with_load_errors()
    worker.clear_connector_metadata()
    return connector_report(finished_recving=set(received or ()), invalid_block_ids=invalid, failed_recving=set(failed))
