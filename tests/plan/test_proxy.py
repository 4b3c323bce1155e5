"""What the proxy is told beyond the golden plans, and who reaches that of a Slurm job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.plan.node import Local, Node, Reach, Srun
from pdserve.plan.proxy import loopback_warnings
from tests.plan.kit import aggregated, hosts, on_gpus, plan, recipe
from tests.tables import each_row

_LEAST = (
    "host", "port", "served_name", "protocol", "workers", "request_timeout_seconds", "connect_timeout_seconds",
    "drain_seconds", "max_body_bytes",
)  # fmt: skip


def test_a_configuration_of_the_least_is_complete() -> None:
    """One that was written before these sections existed is still read, and means the same."""
    config = plan(recipe()).proxy
    least = {name: value for name, value in config.model_dump(mode="json").items() if name in _LEAST}
    assert ProxyConfig.model_validate_json(json.dumps(least)) == config


@each_row(
    "reach, changes, place",
    [
        (Local(), {}, ""),
        (Srun(job="1", kill_wait=30), {}, " on gpu1 only (proxy.host opens it to others)"),
        (Srun(job="1", kill_wait=30), {"proxy": {"host": "0.0.0.0"}}, ""),
    ],
)
def test_a_loopback_address_is_shown_with_its_node_where_that_is_another_machine(
    reach: Reach, changes: dict[str, Any], place: str
) -> None:
    node = Node(name="gpu1", address="10.1.0.1", reach=reach)
    assert plan(recipe(changes), node).proxy_place == place


@each_row("kind", ["round_robin", "least_loaded", "power_of_two", "prefix_aware"])
def test_policies_that_do_not_listen_change_nothing_about_engines(kind: str) -> None:
    routing = {"proxy": {"routing": {"aggregated": {"kind": kind}}}}
    plain, routed = plan(recipe(aggregated())), plan(recipe(aggregated(), routing))
    assert routed.process("aggregated-0") == plain.process("aggregated-0")


SLURM = {"slurm": {"time": "08:00:00"}}
TWO = hosts(8, 8)


def warned(*changes: dict[str, Any], nodes: tuple[Node, ...] = TWO) -> list[str]:
    return [*loopback_warnings(recipe(on_gpus(8, 8), *changes), nodes)]


def test_loopback_of_a_jobs_first_node_names_what_to_set_and_what_then_guards_it() -> None:
    (warning,) = warned(SLURM)
    assert warning.startswith("the proxy listens on 127.0.0.1 of host0, the first node of the job")
    assert "proxy.host: 0.0.0.0 with proxy.auth.keys_file (pdserve new-key NAME --file FILE)" in warning
    (warning,) = warned(SLURM, {"proxy": {"kind": "vllm-router"}})
    assert "keys_file" not in warning, "it asks for no key"


def test_a_job_counts_as_one_whatever_the_recipe_has() -> None:
    in_a_job = tuple(node.model_copy(update={"reach": Srun(job="1", kill_wait=30)}) for node in TWO)
    assert len(warned(nodes=in_a_job)) == 1


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [
        ((SLURM,), hosts(16)),
        ((), TWO),
        ((SLURM, {"proxy": {"host": "0.0.0.0"}}), TWO),
        ((SLURM, {"proxy": {"host": "198.51.100.7"}}), TWO),
    ],
    ids=["one node", "no Slurm", "open", "an address"],
)
def test_nothing_is_said_where_clients_reach_it(changes: tuple[dict[str, Any], ...], nodes: tuple[Node, ...]) -> None:
    assert warned(*changes, nodes=nodes) == []
