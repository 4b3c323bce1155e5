"""A prefill engine with vLLM's real Scheduler and both real halves of NixlConnector, without NIXL's library or a model.

The library's agent is stood in for: leases, their ends and how they are counted are vLLM's; no KV is moved.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput

from tests.upstream.cpu_platform import on_a_cpu
from tests.upstream.scheduler_lab import Lab, connector_report

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}
LAYER = "model.layers.0.self_attn"
BLOCK_SIZE = 32
"""The smallest that the CPU's attention backend takes."""
BLOCKS = 64
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
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


class Prefill:
    """`connector`: another kv-transfer-config with NIXL in it. `workers`: each has every lease, as with TP."""

    def __init__(self, connector: Mapping[str, Any] = NIXL, *, workers: int = 1) -> None:
        self.lab = Lab(num_blocks=BLOCKS, block_size=BLOCK_SIZE, connector=connector)
        self.lab.config.scheduler_config.disable_hybrid_kv_cache_manager = True
        self.workers = [self._worker() for _ in range(workers)]
        self._together = KVOutputAggregator(expected_finished_count=workers)
        self.empty = self.lab.free_blocks

    def _worker(self) -> Any:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        layout = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)]
        )
        with set_current_vllm_config(self.lab.config), without_the_library():
            connector = KVConnectorFactory.create_connector(self.lab.config, KVConnectorRole.WORKER, layout)
            try:
                connector.register_kv_caches({LAYER: torch.zeros(BLOCKS, 1, BLOCK_SIZE, 2)})
            except AssertionError:
                # 0.24 takes no KV that a CPU backend makes. It is in the way of transfers, not of leases.
                nixl_of(connector).connector_worker.transfer_topo = mock.Mock(tp_ratio=lambda _: 1)
        return connector

    def prefill(self, name: str, **params: Any) -> None:
        """A request that has been computed, and that the scheduler has told of."""
        self.lab.add(name, 2 * BLOCK_SIZE, ASKED | params, max_tokens=1)
        self.step()

    def step(self) -> None:
        """One step of the engine, with what its workers report."""
        output = self.lab.schedule()
        reports = [_report(worker, output) for worker in self.workers]
        answers = [ModelRunnerOutput([], {}, kv_connector_output=report) for report in reports]
        together = self._together.aggregate(answers, output_rank=0).kv_connector_output
        self.lab.update(output, finished_sending=together.finished_sending or ())

    def pulled(self, name: str) -> None:
        """A decode has the KV."""
        for worker in self.workers:
            nixl_of(worker).connector_worker.nixl_wrapper.notifs.append(f"{name}:1".encode())

    def expired(self) -> int:
        """Leases that vLLM counts as expired, of the first worker."""
        stats = nixl_of(self.workers[0]).connector_worker.xfer_stats
        return len(stats.data["num_kv_expired_reqs"])


def nixl_of(connector: Any) -> Any:
    """NIXL's own, alone or as the first child."""
    return next(iter(getattr(connector, "_connectors", [connector])))


def _report(worker: Any, output: Any) -> Any:
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
    worker.start_load_kv(SimpleNamespace(attn_metadata=None))
    if hasattr(worker, "get_transfer_results"):
        sent = worker.get_transfer_results(output.finished_req_ids).finished_sending
    else:
        sent, _ = worker.get_finished(output.finished_req_ids)
    worker.clear_connector_metadata()
    return connector_report(finished_sending=set(sent or ()))


@contextmanager
def without_the_library() -> Iterator[None]:
    """And a tensor-parallel group of one, as far as the worker asks."""
    stands_in: dict[str, Any] = {
        "NixlWrapper": Agent,
        "nixl_agent_config": mock.Mock(),
        "check_nixl_version": mock.Mock(),
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
    }
    there = {name: value for name, value in stands_in.items() if hasattr(_UPSTREAM, name)}
    with mock.patch.multiple(_UPSTREAM, **there):
        yield


on_a_cpu()
