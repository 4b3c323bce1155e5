"""What the proxy is told beyond the golden plans, and who reaches that of a Slurm job."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.node import Local, Node, Reach, Srun
from pdserve.plan.proxy import loopback_warnings
from tests.plan.kit import hosts, on_gpus, plan, recipe
from tests.tables import each_row


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
