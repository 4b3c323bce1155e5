"""What the proxy is told beyond the golden plans, and who reaches that of a Slurm job."""

from __future__ import annotations

from typing import Any

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


IN_A_JOB = tuple(node.model_copy(update={"reach": Srun(job="1", kill_wait=30)}) for node in TWO)


@each_row("changes, nodes, said", [
    ((), IN_A_JOB, 1),  # whatever the recipe has
    ((SLURM,), hosts(16), 0), ((), TWO, 0), ((SLURM, {"proxy": {"host": "198.51.100.7"}}), TWO, 0),
])  # fmt: skip
def test_it_is_said_where_clients_do_not_reach_it(
    changes: tuple[dict[str, Any], ...], nodes: tuple[Node, ...], said: int
) -> None:
    assert len(warned(*changes, nodes=nodes)) == said
