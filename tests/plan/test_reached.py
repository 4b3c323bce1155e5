"""Who reaches the proxy of a Slurm job, and what is said where its clients do not."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.node import Node, Srun
from pdserve.plan.proxy import loopback_warnings
from tests.plan.kit import hosts, on_gpus, recipe

SLURM = {"slurm": {"time": "08:00:00"}}
TWO = hosts(8, 8)


def warned(*changes: dict[str, Any], nodes: tuple[Node, ...] = TWO) -> list[str]:
    return [*loopback_warnings(recipe(on_gpus(8, 8), *changes), nodes)]


def test_loopback_of_a_jobs_first_node_names_what_to_set_and_what_then_guards_it() -> None:
    (warning,) = warned(SLURM)
    assert warning.startswith("the proxy listens on 127.0.0.1 of host0, the first node of the job")
    assert "proxy.host: 0.0.0.0 with proxy.auth.keys_file (pdserve new-key NAME --file FILE)" in warning


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
