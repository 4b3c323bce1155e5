"""The scheduler halves of vLLM's MoRIIOConnector with the configuration that a plan gives them and the parameters that
pdserve's proxy sends. The library `mori` is imported by their workers alone, and no worker is made here.

A test here that fails has news: upstream may have changed its contract, or mended what the patch is for.
"""

from __future__ import annotations

import json
import time
from typing import Any
from unittest import mock

from pdserve.patches.moriio import COMPUTED, NAME
from pdserve.pd.protocols.moriio import ask
from pdserve.plan.model import Versions
from tests.plan.kit import hosts, on_gpus, plan, recipe, value_of
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, INSTALLED_VLLM, count, on

if IN_RELEASE:
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_common
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import MoRIIOConfig

    from tests.upstream.scheduler_lab import Lab

BLOCK = 16
PROMPT = list(range(1000, 1000 + 3 * BLOCK + 5))
TP = 4
_ACCEPTED = {"connector": {"kind": "moriio", "accept_unsafe_aborts": True}}


def planned(process: str) -> dict[str, Any]:
    """The kv-transfer-config of a process of a plan."""
    wanted = recipe(on_gpus(TP, TP, "rocm"), {"prefill": _ACCEPTED, "decode": _ACCEPTED})
    built = plan(wanted, *hosts(2 * TP), versions=Versions(vllm="0.32.0", mori="1.2.4"))
    mapping: dict[str, Any] = json.loads(value_of(built.process(process), "--kv-transfer-config"))
    return mapping


def engine(process: str, *, upstream: bool = False) -> Any:
    """`upstream`: with vLLM's own class in place of pdserve's."""
    mapping = planned(process)
    if upstream:
        del mapping["kv_connector_module_path"]
    return Lab(block_size=BLOCK, connector=mapping)


def keeping(name: str = "cmpl-one", **sampling: Any) -> tuple[Any, int, dict[str, Any] | None]:
    """A prefill that was asked as the proxy asks, how many blocks were free before, and what its answer says."""
    lab = engine("prefill-0")
    free = lab.free_blocks
    lab.add(name, PROMPT, json.loads(ask()), max_tokens=1, **sampling)
    produced = lab.update(lab.schedule())
    (output,) = [output for outputs in produced.values() for output in outputs.outputs]
    return lab, free, json.loads(json.dumps(output.kv_transfer_params))


@on(INSTALLED_VLLM)
def test_its_configuration_has_what_the_plan_meant() -> None:
    """Of the last of four workers of decode. Without `proxy_ip` it starts no heartbeat."""
    lab = engine("decode-0")
    where = {"get_tensor_model_parallel_rank": TP - 1, "get_tensor_model_parallel_world_size": TP}
    with mock.patch.multiple(moriio_common, **{name: mock.Mock(return_value=value) for name, value in where.items()}):
        read = MoRIIOConfig.from_vllm_config(lab.config)
    expected = {
        **{"local_ip": "192.0.2.1", "proxy_ip": "", "proxy_ping_port": 0, "http_port": 8200, "handshake_port": 6305},
        **{"notify_port": 61009 + 3, "tp_rank": 3, "read_mode": True, "backend": "rdma"},
        **dict.fromkeys(("transfer_timeout", "recv_abort_timeout", "defer_timeout"), 3660),
    }
    assert {name: getattr(read, name) for name in expected} == expected


@on(INSTALLED_VLLM)
def test_prefills_answer_has_all_that_decode_needs_to_read_and_its_blocks_are_held_until_it_has() -> None:
    prefill, free, params = keeping()
    assert params is not None
    assert free - prefill.free_blocks == 4
    ports = params["remote_handshake_port"], params["remote_notify_port"]
    assert (params["remote_host"], *ports) == ("192.0.2.1", 6301, 61005)
    decode = engine("decode-0")
    decode.add("cmpl-one", PROMPT, dict(params))
    output = decode.schedule()
    read = output.kv_connector_metadata.reqs_to_recv["cmpl-one"]
    assert (read.remote_host, read.remote_handshake_port, read.remote_notify_port) == ("192.0.2.1", 6301, 61005)
    assert read.transfer_id == params["transfer_id"]
    assert (len(read.local_block_ids[0]), len(read.remote_block_ids[0])) == (4, 4)
    assert output.num_scheduled_tokens["cmpl-one"] == 1
    prefill.add("cmpl-next", BLOCK, max_tokens=2)
    prefill.step(finished_sending={"cmpl-one"})
    prefill.run()
    assert prefill.free_blocks == free


@on(INSTALLED_VLLM)
def test_a_request_that_is_aborted_in_decodes_queue_releases_them_without_a_read() -> None:
    _, _, params = keeping()
    decode = engine("decode-0")
    decode.add("cmpl-one", PROMPT, params)
    decode.abort("cmpl-one")
    told = decode.schedule().kv_connector_metadata.reqs_to_recv["cmpl-one"]
    assert ([list(group) for group in told.local_block_ids], told.remote_notify_port) == ([[]], 61005)


@on(INSTALLED_VLLM)
def test_prefill_gives_them_up_only_after_the_proxy_has_ended_the_request() -> None:
    """Seconds after its answer. One that ends by stop keeps nothing and says nothing."""
    lab, free, _ = keeping()
    for seconds, freed in ((3600, False), (3661, True)):
        with mock.patch("time.monotonic", return_value=time.monotonic() + seconds):
            lab.add(f"cmpl-{seconds}", BLOCK, max_tokens=1)
            lab.step(finished_sending={"cmpl-unknown"})
        assert (lab.free_blocks == free) == freed
    lab, free, params = keeping(stop_token_ids=[7])
    assert (params, lab.free_blocks) == (None, free)


@on(INSTALLED_VLLM, ALL_VLLM_VERSIONS[-1])
def test_decode_computes_what_it_does_not_read_with_the_patch_and_takes_it_for_read_without(version: str) -> None:
    """Of such prompts upstream computes the last token alone: the rest is whatever its blocks held before. 0.33 looks
    at one of three things that a read needs."""
    upstream = dict.fromkeys(("plain", "no_blocks", "no_engine", "again"), 1)
    if version == ALL_VLLM_VERSIONS[-1]:
        upstream |= {"plain": len(PROMPT), "again": len(PROMPT)}
    assert computed(upstream=True) == upstream
    assert computed(upstream=False) == dict.fromkeys(upstream, len(PROMPT))
    # One that waits for blocks is counted once: the scheduler asks in each step how much of it will be read.
    decode, before = engine("decode-0"), count(NAME, COMPUTED)
    request = decode.add("cmpl-plain", PROMPT)
    for _ in range(3):
        decode.connector.get_num_new_matched_tokens(request, 0)
    decode.schedule()
    assert count(NAME, COMPUTED) - before == 1


def computed(*, upstream: bool) -> dict[str, int]:
    """Tokens that decode computes of prompts that name no KV, no blocks or no engine, and of one that comes again after
    a preemption."""
    _, _, params = keeping()
    assert params is not None
    lacking = {
        "plain": None,
        "no_blocks": params | {"remote_block_ids": []},
        "no_engine": {name: value for name, value in params.items() if name != "remote_engine_id"},
    }
    tokens = {}
    for name, named in lacking.items():
        decode = engine("decode-0", upstream=upstream)
        decode.add(f"cmpl-{name}", PROMPT, named)
        tokens[name] = decode.schedule().num_scheduled_tokens[f"cmpl-{name}"]
    again = engine("decode-0", upstream=upstream)
    request = again.add("cmpl-one", PROMPT, params)
    again.step()
    taken, _ = again.connector.get_num_new_matched_tokens(request, 0)
    return tokens | {"again": len(PROMPT) - taken}
