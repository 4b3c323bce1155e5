"""Two engines that push: vLLM's real Scheduler, both real halves of NixlPushConnector, and NIXL's own library.

KV is real memory of this process, moved by UCX. There is no model: a prefill's blocks are filled by the test. What a
test holds up, it holds up where the worker asks the library (`hold_writes`), or by not stepping an engine.
"""

from __future__ import annotations

from tests.upstream.nixl_lab import BLOCK_SIZE, BLOCKS, LAYER, NIXL, nixl_of  # isort: skip  # takes the CPU

import json
import os
import pickle
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from pdserve.pd.protocols.push_addresses import ASK, for_decode
from tests.upstream.scheduler_lab import Lab

PUSH = NIXL | {"kv_connector": "NixlPushConnector"}
PROMPT = 4 * BLOCK_SIZE
LIMIT_SECONDS = 60.0
"""For what takes milliseconds on an idle machine."""


class Engine:
    """`role`: kv_producer or kv_consumer. `extra`: its kv_connector_extra_config."""

    def __init__(self, role: str, *, port: int | None = None, **extra: Any) -> None:
        self.port = port or free_port()
        self.id = str(uuid.uuid4())
        transfer = PUSH | {"kv_role": role, "engine_id": self.id, "kv_connector_extra_config": extra}
        with side_channel(self.port):
            self.lab = Lab(
                num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=4 * PROMPT, connector=transfer
            )
            self.lab.config.scheduler_config.disable_hybrid_kv_cache_manager = True
            self.kv = torch.zeros(BLOCKS, 1, BLOCK_SIZE, 2)
            self._worker = self._made()
        self.worker = nixl_of(self._worker).connector_worker
        self.scheduler = nixl_of(self.lab.connector).connector_scheduler
        handshake = self._worker.get_handshake_metadata()
        self.lab.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self.empty = self.lab.free_blocks
        self.scheduled: dict[str, int] = {}
        """Tokens that were computed here, of each request."""

    def _made(self) -> Any:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        layout = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)]
        )
        alone: dict[str, Any] = {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
        }
        there: dict[str, Any] = {name: value for name, value in alone.items() if hasattr(base_worker, name)}
        with set_current_vllm_config(self.lab.config), mock.patch.multiple(base_worker, **there):
            worker = KVConnectorFactory.create_connector(self.lab.config, KVConnectorRole.WORKER, layout)
            worker.register_kv_caches({LAYER: self.kv})
        return worker

    def step(self) -> None:
        """One step of the engine, with what its worker reports."""
        output = self.lab.schedule()
        for name, tokens in output.num_scheduled_tokens.items():
            self.scheduled[name] = self.scheduled.get(name, 0) + tokens
        worker = self._worker
        worker.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        worker.start_load_kv(SimpleNamespace(attn_metadata=None))
        results = worker.get_transfer_results(output.finished_req_ids)
        invalid = worker.get_block_ids_with_load_errors()
        worker.clear_connector_metadata()
        self.lab.update(
            output,
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=invalid,
        )

    @property
    def all_free(self) -> bool:
        return self.lab.free_blocks == self.empty

    def prefill(self, name: str, tokens: list[int]) -> list[int]:
        """A prompt that is computed; its blocks get a pattern of their own. Their ids."""
        self.lab.add(name, tokens, json.loads(ASK), max_tokens=1)
        output = self.lab.schedule()
        blocks = self.lab.blocks(name)
        for block in blocks:
            self.kv[block] = torch.rand_like(self.kv[block])
        self._worker.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        self._worker.start_load_kv(SimpleNamespace(attn_metadata=None))
        self._worker.clear_connector_metadata()
        self.lab.update(output)
        return blocks

    def ask(self, name: str, tokens: list[int], prefill: Engine) -> None:
        """A request of decode, as the proxy sends it: of prefill it has the address only."""
        self.lab.add(name, tokens, dict(prefill.address), max_tokens=2)

    @cached_property
    def address(self) -> dict[str, Any]:
        """What the proxy has decodes told of this prefill, learnt from its answer to a request for one token."""
        name = "cmpl-address-0-cccccccc"
        self.lab.add(name, [1], json.loads(ASK), max_tokens=1)
        output = self.lab.schedule()
        self._worker.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        self._worker.start_load_kv(SimpleNamespace(attn_metadata=None))
        self._worker.clear_connector_metadata()
        (produced,) = self.lab.update(output).values()
        (answer,) = produced.outputs
        self.step()
        self.worker._reqs_to_send[name] = 0.0
        self.step()
        body = {"id": name, "choices": [], "kv_transfer_params": answer.kv_transfer_params}
        params: dict[str, Any] = json.loads(for_decode(json.dumps(body).encode()))
        return params

    @contextmanager
    def held_writes(self) -> Iterator[None]:
        """WRITEs of this engine that begin are under way until the end of the block."""
        agent = self.worker.nixl_wrapper
        original = agent.check_xfer_state
        agent.check_xfer_state = lambda _: "PROC"
        try:
            yield
        finally:
            agent.check_xfer_state = original

    def later(self, seconds: float) -> Any:
        """A `with` block in which upstream's clock is so far ahead, for whoever looks at it."""
        return mock.patch.object(time, "perf_counter", return_value=time.perf_counter() + seconds)

    def close(self) -> None:
        """As the end of its process: the side channel is refused from then on, and no WRITE begins."""
        self._worker.shutdown()
        self.lab.connector.shutdown()


def until(condition: Callable[[], bool], *engines: Engine) -> bool:
    """Steps these engines until it is true. False: it was not within the limit."""
    ends = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > ends:
            return False
        for engine in engines:
            engine.step()
        threading.Event().wait(0.005)
    return True


@contextmanager
def side_channel(port: int) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}):
        yield


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
