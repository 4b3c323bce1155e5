"""An engine with vLLM's real Scheduler and both real halves of NixlConnector, without NIXL's library or a model.

The library's agent is stood in for: leases, their ends and how they are counted are vLLM's; no KV is moved.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
from vllm.v1.outputs import ModelRunnerOutput

from tests.upstream.engine_config import kv_cache_config
from tests.upstream.scheduler_lab import Lab, connector_report, group_of_one, worker_report

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}
DECODE = NIXL | {"kv_role": "kv_consumer"}
BLOCK_SIZE = 32
"""The smallest that the CPU's attention backend takes."""
BLOCKS = 64
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
"""What a prefill is asked, and with what a decode comes then."""
PULL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-engine",
    "remote_host": "localhost",
    "remote_port": 1,
    "remote_block_ids": ([1, 2, 3, 4], [1, 2, 3, 4]),
    "tp_size": 1,
}
_UPSTREAM = next(
    sys.modules[base.__module__]
    for base in NixlConnectorWorker.__mro__
    if hasattr(sys.modules[base.__module__], "NixlWrapper")
)
"""Where the worker takes the library's agent from."""


class Agent:
    """The library's: it registers whatever it is given, and the test decides which notifications come from decodes."""

    def __init__(self, *_: Any) -> None:
        self.notifs: list[bytes] = []

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notifs, self.notifs = self.notifs, []
        return {"decode": notifs}

    def get_agent_metadata(self) -> bytes:
        return b""

    def __getattr__(self, name: str) -> Any:
        return mock.Mock()


class Engine:
    """`connector`: a kv-transfer-config with NIXL in it. `workers`: each has every request, as with TP. `window`: of
    the second KV group, in tokens; None: there is one group. `lab`: keywords of Lab."""

    def __init__(
        self, connector: Mapping[str, Any] = NIXL, *, workers: int = 1, window: int | None = None, **lab: Any
    ) -> None:
        self.lab = Lab(num_blocks=BLOCKS, block_size=BLOCK_SIZE, connector=connector, sliding_window=window, **lab)
        self.lab.config.scheduler_config.disable_hybrid_kv_cache_manager = connector["kv_role"] != "kv_consumer"
        self._connectors = [self._worker(window) for _ in range(workers)]
        self.workers = [nixl_of(each).connector_worker for each in self._connectors]
        self._together = KVOutputAggregator(expected_finished_count=workers)
        self._empty = self.lab.free_blocks
        self.scheduled: dict[str, int] = {}
        """Tokens that were computed here, of each request."""

    def _worker(self, window: int | None) -> Any:
        layout = kv_cache_config(BLOCKS, BLOCK_SIZE, window)
        without_the_library = {
            "NixlWrapper": Agent,
            "nixl_agent_config": mock.Mock(),
            "check_nixl_version": mock.Mock(),
        }
        with set_current_vllm_config(self.lab.config), group_of_one(_UPSTREAM, **without_the_library):
            connector = KVConnectorFactory.create_connector(self.lab.config, KVConnectorRole.WORKER, layout)
        # Nothing is ever moved: it is only asked whether it is there.
        nixl_of(connector).connector_worker.transfer_topo = mock.Mock(tp_ratio=lambda _: 1)
        return connector

    @property
    def all_free(self) -> bool:
        return self.lab.free_blocks == self._empty

    def prefill(self, name: str, **params: Any) -> None:
        """A request that has been computed, and that the scheduler has told of."""
        self.lab.add(name, 2 * BLOCK_SIZE, ASKED | params, max_tokens=1)
        self.step()

    def step(self) -> None:
        """One step of the engine, with what its workers report."""
        output = self.lab.schedule()
        for name, tokens in output.num_scheduled_tokens.items():
            self.scheduled[name] = self.scheduled.get(name, 0) + tokens
        answers = [ModelRunnerOutput([], {}, kv_connector_output=report_of(each, output)) for each in self._connectors]
        together = self._together.aggregate(answers, output_rank=0).kv_connector_output
        self.lab.update(
            output,
            finished_sending=together.finished_sending or (),
            finished_recving=together.finished_recving or (),
            invalid_block_ids=together.invalid_block_ids,
            failed_recving=getattr(together, "failed_recving", ()),
        )

    def pulled(self, name: str) -> None:
        """A decode has the KV."""
        for worker in self.workers:
            worker.nixl_wrapper.notifs.append(f"{name}:1".encode())

    def expired(self) -> int:
        """Leases that vLLM counts as expired, of the first worker."""
        return len(self.workers[0].xfer_stats.data["num_kv_expired_reqs"])


def nixl_of(connector: Any) -> Any:
    """NIXL's own, alone or as the first child."""
    return next(iter(getattr(connector, "_connectors", [connector])))


def report_of(worker: Any, output: Any) -> Any:
    """Return what a worker says of a step. The handshake's thread has then done what it was asked for."""
    executor = nixl_of(worker).connector_worker._handshake_initiation_executor
    return connector_report(**worker_report(worker, output, lambda: executor.submit(int).result()))
