"""A prefill and a decode engine with vLLM's real scheduler and MooncakeConnector, and no model.

Each step goes through the real Scheduler, the pickled metadata, the real worker half of the connector with the real
transfer engine over TCP, and back. The KV of a block is whatever a test writes into the tensor.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_HOST_IP": "127.0.0.1", "MC_FORCE_TCP": "1", "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}

from tests.upstream.scheduler_lab import Lab  # isort: skip  # stands in for gguf

import torch  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402

LAYER = "model.layers.0.self_attn"
BLOCK_SIZE = 32
"""The smallest that the CPU's attention backend takes."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Engine:
    """One engine. `role`: kv_producer or kv_consumer. A prefill has a bootstrap server of its own."""

    def __init__(self, role: str, *, num_blocks: int = 256, num_workers: int = 10, policy: str = "fail") -> None:
        self.port = free_port()
        os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(self.port)
        transfer = {
            "kv_connector": "MooncakeConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": num_workers},
        }
        self.lab = Lab(num_blocks=num_blocks, block_size=BLOCK_SIZE, connector=transfer, load_failure_policy=policy, max_num_seqs=64)
        self.lab.config.scheduler_config.disable_hybrid_kv_cache_manager = False
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        layout = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)]
        )
        with set_current_vllm_config(self.lab.config), _alone():
            self.connector = upstream.MooncakeConnector(self.lab.config, KVConnectorRole.WORKER, layout)
        self.worker = self.connector.connector_worker
        # Until 0.23 or so a CPU backend has keys and values apart, each with blocks of its own.
        apart = getattr(self.worker.transfer_topo, "split_k_and_v", False)
        shape = (2, num_blocks, 1, BLOCK_SIZE, 1) if apart else (num_blocks, 1, BLOCK_SIZE, 2)
        self._tensor = torch.zeros(shape)
        self.kv = self._tensor.movedim(1, 0) if apart else self._tensor
        """A view: on the first axis the block's id."""
        self.worker.register_kv_caches({LAYER: self._tensor})

    def step(self) -> None:
        """One step of the engine, with what its worker reports."""
        output = self.lab.schedule()
        self.connector.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        self.connector.start_load_kv(None)
        if hasattr(self.connector, "get_transfer_results"):
            results = self.connector.get_transfer_results(output.finished_req_ids)
            report = {name: getattr(results, name) for name in ("finished_sending", "finished_recving", "failed_recving")}
        else:
            sent, received = self.connector.get_finished(output.finished_req_ids)
            report = {"finished_sending": sent or (), "finished_recving": received or ()}
        report["invalid_block_ids"] = self.connector.get_block_ids_with_load_errors()
        self.connector.clear_connector_metadata()
        self.lab.update(output, **report)

    def prefill(self, name: str, transfer: str, tokens: list[int], **sampling: Any) -> Any:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return self.lab.add(name, list(tokens), params, max_tokens=1, **sampling)

    def decode(self, name: str, transfer: str, tokens: list[int], prefill: Engine | Address) -> Any:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": prefill.engine_id,
            "remote_bootstrap_addr": prefill.bootstrap,
        }
        return self.lab.add(name, list(tokens), params)

    @property
    def engine_id(self) -> str:
        return str(self.worker.engine_id)

    @property
    def bootstrap(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def side_channel(self) -> str:
        return f"tcp://127.0.0.1:{self.worker.side_channel_port}"


class Address:
    """Of a prefill in another process."""

    def __init__(self, engine_id: str, bootstrap: str) -> None:
        self.engine_id = engine_id
        self.bootstrap = bootstrap


def until(holds: Callable[[], Any], *engines: Engine, seconds: float = 20.0) -> float:
    """Steps the engines until something holds. How long it took; math.inf if it did not in that time."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            return float("inf")
        for engine in engines:
            engine.step()
        time.sleep(0.005)
    return time.monotonic() - began


@contextmanager
def _alone() -> Iterator[None]:
    """A tensor-parallel group of one, as far as the connector's worker asks."""
    stands_in: dict[str, Any] = {
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_pp_group": lambda: type("Group", (), {"rank_in_group": 0}),
    }
    before = {name: getattr(upstream, name) for name in stands_in}
    for name, value in stands_in.items():
        setattr(upstream, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(upstream, name, value)
