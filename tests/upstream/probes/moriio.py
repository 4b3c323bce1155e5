"""The scheduler halves of vLLM's MoRIIOConnector with the configuration that a plan gives them and the parameters that
pdserve's proxy sends. The library `mori` is imported by their workers alone, and no worker is made here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_common
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import MoRIIOConfig

from pdserve.patches import effects
from pdserve.patches.moriio.unread_prompts import COMPUTED, NAME
from pdserve.pd.protocols.moriio import ask
from pdserve.plan.model import Versions
from tests.plan.kit import hosts, on_gpus, plan, recipe, value_of
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


def engine(process: str, *, upstream: bool = False) -> Lab:
    """`upstream`: with vLLM's own class in place of pdserve's."""
    mapping = planned(process)
    if upstream:
        del mapping["kv_connector_module_path"]
    return Lab(block_size=BLOCK, connector=mapping)


def keeping(name: str = "cmpl-one", **sampling: Any) -> tuple[Lab, int, dict[str, Any] | None]:
    """A prefill that was asked as the proxy asks, how many blocks were free before, and what its answer says."""
    lab = engine("prefill-0")
    free = lab.free_blocks
    lab.add(name, PROMPT, json.loads(ask()), max_tokens=1, **sampling)
    produced = lab.update(lab.schedule())
    (output,) = [output for outputs in produced.values() for output in outputs.outputs]
    return lab, free, json.loads(json.dumps(output.kv_transfer_params))


def config() -> Any:
    """What MoRIIOConfig makes of the plan, for the last worker of decode."""
    lab = engine("decode-0")
    where = {"get_tensor_model_parallel_rank": TP - 1, "get_tensor_model_parallel_world_size": TP}
    with mock.patch.multiple(moriio_common, **{name: mock.Mock(return_value=value) for name, value in where.items()}):
        read = MoRIIOConfig.from_vllm_config(lab.config)
    names = (
        *("local_ip", "proxy_ip", "proxy_ping_port", "http_port", "handshake_port", "notify_port", "tp_rank"),
        *("transfer_timeout", "recv_abort_timeout", "defer_timeout", "read_mode", "backend"),
    )
    return {name: getattr(read, name) for name in names}


def legs() -> Any:
    """A prompt through both legs: prefill's answer, and what decode's worker is told to read."""
    prefill, free, params = keeping()
    assert params is not None
    held = free - prefill.free_blocks
    decode = engine("decode-0")
    decode.add("cmpl-one", PROMPT, dict(params))
    output = decode.schedule()
    read = output.kv_connector_metadata.reqs_to_recv["cmpl-one"]
    prefill.add("cmpl-next", BLOCK, max_tokens=2)
    prefill.step(finished_sending={"cmpl-one"})
    prefill.run()
    return {
        "answer": {name: value for name, value in params.items() if name not in ("transfer_id", "remote_block_ids")},
        "held": held,
        "computed_by_decode": output.num_scheduled_tokens["cmpl-one"],
        "same_transfer": read.transfer_id == params["transfer_id"],
        "pairs": [len(read.local_block_ids[0]), len(read.remote_block_ids[0])],
        "from": [read.remote_host, read.remote_handshake_port, read.remote_notify_port, read.tp_size],
        "free_after_the_release": prefill.free_blocks == free,
    }


def stopped() -> Any:
    """A prefill that ends by stop: what it says, and whether it keeps anything."""
    lab, free, params = keeping(stop_token_ids=[7])
    return {"answer": params, "keeps": lab.free_blocks != free}


def aborted() -> Any:
    """A request that is aborted in decode's queue: its worker is told to release without reading."""
    _, _, params = keeping()
    decode = engine("decode-0")
    decode.add("cmpl-one", PROMPT, params)
    decode.abort("cmpl-one")
    told = decode.schedule().kv_connector_metadata.reqs_to_recv["cmpl-one"]
    return {"blocks": [list(group) for group in told.local_block_ids], "port": told.remote_notify_port}


def given_up() -> Any:
    """When prefill frees the blocks of what no decode has read: seconds after its answer, and not before."""
    lab, free, _ = keeping()
    freed = {}
    for seconds in (3600, 3661):
        with later(seconds):
            lab.add(f"cmpl-{seconds}", BLOCK, max_tokens=1)
            lab.step(finished_sending={"cmpl-unknown"})
        freed[seconds] = lab.free_blocks == free
    return freed


def unread(*, upstream: bool) -> Any:
    """Tokens that decode computes of prompts that name no KV, no blocks or no engine, and of one that comes again after
    a preemption."""
    _, _, params = keeping()
    assert params is not None
    lacking = {
        "plain": None,
        "no_blocks": params | {"remote_block_ids": []},
        "no_engine": {name: value for name, value in params.items() if name != "remote_engine_id"},
    }
    computed = {}
    for name, named in lacking.items():
        decode = engine("decode-0", upstream=upstream)
        decode.add(f"cmpl-{name}", PROMPT, named)
        computed[name] = decode.schedule().num_scheduled_tokens[f"cmpl-{name}"]
    again = engine("decode-0", upstream=upstream)
    request = again.add("cmpl-one", PROMPT, params)
    again.step()
    taken, _ = again.connector.get_num_new_matched_tokens(request, 0)
    return computed | {"again": len(PROMPT) - taken}


def counted() -> Any:
    """How often a prompt that names no KV is counted, when the scheduler has asked for it in several steps."""
    decode = engine("decode-0")
    before = effects.totals().get((NAME, COMPUTED), 0)
    request = decode.add("cmpl-plain", PROMPT)
    for _ in range(3):
        decode.connector.get_num_new_matched_tokens(request, 0)
    decode.schedule()
    return effects.totals()[NAME, COMPUTED] - before


def address() -> Any:
    """Where decode would read for a request id that names an address, whatever the parameters say."""
    _, _, params = keeping()
    decode = engine("decode-0")
    name = f"cmpl-___prefill_addr_host:192.0.2.99,handshake:1,notify:2___decode_addr_x_{'0' * 32}-0-abc"
    decode.add(name, PROMPT, params)
    return decode.schedule().kv_connector_metadata.reqs_to_recv[name].remote_host


@contextmanager
def later(seconds: float) -> Iterator[None]:
    """As if that time had passed."""
    now = time.monotonic() + seconds
    with mock.patch("time.monotonic", return_value=now):
        yield


def main() -> None:
    """All cases, or with `unread` the one that the patch is for."""
    cases = () if sys.argv[1:] == ["unread"] else (config, legs, stopped, aborted, given_up, address, counted)
    results = {case.__name__: case() for case in cases}
    results |= {"unread_upstream": unread(upstream=True), "unread": unread(upstream=False)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
