"""What a plan's process says of itself, beyond the golden plans."""

from __future__ import annotations

from typing import Any

from pdserve.plan.process import PlannedConnector
from pdserve.recipe.base import TrialTransfer
from pdserve.recipe.container_options import uses_rdma
from tests.plan.kit import MOONCAKE, NIXL, hosts, on_gpus, plan, recipe
from tests.plan.shapes import both
from tests.tables import each_row

RDMA = {"kind": "mooncake", "protocol": "rdma", "device_name": "a, b"}


def test_a_raw_mapping_is_looked_into() -> None:
    raw = {"kind": "raw", "config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}
    process = plan(recipe(both(raw))).process("decode-0")
    trial = TrialTransfer(engine="nixl", pulled=True, host_buffer=False, ports="nixl")
    assert process.connectors == (PlannedConnector(class_name="NixlConnector", package="nixl", trial=trial),)
    unknown = {"kind": "raw", "config": {"kv_connector": "Other", "kv_role": "kv_both"}}
    built = plan(recipe({"mode": "aggregated", "prefill": None, "decode": None, "aggregated": {"connector": unknown}}))
    assert built.process("aggregated-0").packages == ("vllm",)


@each_row(
    "connector, env, devices",
    [
        (RDMA, {}, ("a", "b")),
        ({"kind": "mooncake"}, {}, ()),
        (MOONCAKE, {}, None),
        (NIXL, {}, None),
        (RDMA, {"MC_FORCE_TCP": 1}, None),
        ({"kind": "raw", "config": {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}}, {}, ()),
    ],
)
def test_rdma_devices(connector: dict[str, Any], env: dict[str, Any], devices: tuple[str, ...] | None) -> None:
    made = recipe(on_gpus(), both(connector), {"engine": {"env": env}})
    assert plan(made, *hosts(8)).process("decode-0").rdma_devices == devices
    assert uses_rdma(made) is (devices is not None), "known without a plan"
