"""Data-parallel load balancing: which processes an instance has, what each is told, and what the proxy knows of it."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError, RecipeError
from pdserve.plan import model_rules
from pdserve.plan.engines import CPU_SERVE
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.recipe.rules import problems
from tests.plan.kit import NIXL, hosts, on_gpus, plan, recipe, value_of, with_lmcache

INTERNAL, HYBRID, EXTERNAL = "internal", "hybrid", "external"


def wide(mode: str, **parallel: Any) -> dict[str, Any]:
    """A prefill of four ranks over two nodes."""
    return {"prefill": {"parallel": {"dp": 4, "nodes": 2, "ep": True, "load_balancing": mode, **parallel}}}


def built(mode: str, *changes: dict[str, Any], sizes: tuple[int, ...] = (2, 2, 1), **parallel: Any) -> Plan:
    return plan(recipe(on_gpus(), wide(mode, **parallel), *changes), *hosts(*sizes))


def prefills(made: Plan) -> dict[str, Process]:
    return {process.name: process for process in made.processes if process.role == "prefill"}


def test_internal_is_the_default_and_has_one_server_with_headless_followers() -> None:
    made = built(INTERNAL)
    leader, follower = prefills(made).values()
    assert ("--headless" in leader.argv, "--headless" in follower.argv) == (False, True)
    assert not any("-lb" in word for process in (leader, follower) for word in process.argv)
    assert (value_of(leader, "--nnodes"), value_of(follower, "--node-rank")) == ("2", "1")
    assert [worker.ranks for worker in made.proxy.workers if worker.role == "prefill"] == [4]
    assert recipe({"prefill": {"parallel": {"dp": 2}}}).roles()[0][1].parallel.load_balancing == INTERNAL


def test_hybrid_has_a_server_on_each_node_for_the_ranks_of_that_node() -> None:
    first, second = prefills(built(HYBRID)).values()
    assert (first.name, second.name, second.instance) == ("prefill-0", "prefill-0-node1", "prefill-0")
    for rank, process in enumerate((first, second)):
        assert "--data-parallel-hybrid-lb" in process.argv
        assert value_of(process, "--data-parallel-size") == "4"
        assert value_of(process, "--data-parallel-size-local") == "2"
        assert value_of(process, "--data-parallel-start-rank") == str(2 * rank)
        assert value_of(process, "--host") == f"192.0.2.{rank + 1}"
        assert process.probe is not None
        assert process.devices == (0, 1)
        assert process.ranks is not None
        assert (process.ranks.cores, process.ranks.workers) == (2, 2)
        assert not {"--headless", "--nnodes", "--node-rank", "--master-addr"} & set(process.argv)


def test_external_has_a_server_for_each_rank_on_devices_of_its_own() -> None:
    made = prefills(built(EXTERNAL))
    assert list(made) == ["prefill-0", "prefill-0-rank1", "prefill-0-rank2", "prefill-0-rank3"]
    for rank, process in enumerate(made.values()):
        assert "--data-parallel-external-lb" in process.argv
        assert value_of(process, "--data-parallel-rank") == str(rank)
        assert value_of(process, "--data-parallel-size") == "4"
        assert "--data-parallel-size-local" not in process.argv
        assert (process.node, process.devices) == (f"host{rank // 2}", (rank % 2,))
        assert process.env.set["CUDA_VISIBLE_DEVICES"] == str(rank % 2)
        assert process.instance == "prefill-0"


@pytest.mark.parametrize("mode", [HYBRID, EXTERNAL])
def test_all_processes_meet_at_the_leader_at_a_port_of_the_plan(mode: str) -> None:
    made = prefills(built(mode))
    for process in made.values():
        assert value_of(process, "--data-parallel-address") == "192.0.2.1"
        assert value_of(process, "--data-parallel-rpc-port") == "29500"
        assert value_of(process, "--distributed-executor-backend") == "mp"
    assert [process.ports.get("dp_master") for process in made.values()] == [29500] + [None] * (len(made) - 1)


def test_a_rank_of_several_workers_stays_on_its_node() -> None:
    made = prefills(built(EXTERNAL, sizes=(4, 4, 1), tp=2))
    assert [(p.node, p.devices) for p in made.values()] == [
        ("host0", (0, 1)),
        ("host0", (2, 3)),
        ("host1", (0, 1)),
        ("host1", (2, 3)),
    ]


def test_named_devices_are_divided_among_the_ranks() -> None:
    made = prefills(built(EXTERNAL, {"prefill": {"devices": [3, 2, 1, 0]}}, sizes=(4, 4, 1)))
    assert [process.devices for process in made.values()] == [(3,), (2,), (1,), (0,)]


@pytest.mark.parametrize(
    ("mode", "names", "ranks"),
    [
        (HYBRID, ["prefill-0", "prefill-0-node1"], 2),
        (EXTERNAL, ["prefill-0", "prefill-0-rank1", "prefill-0-rank2", "prefill-0-rank3"], 1),
    ],
)
def test_the_proxy_has_a_worker_for_each_server_with_its_own_bootstrap(mode: str, names: list[str], ranks: int) -> None:
    made = built(mode)
    workers = [worker for worker in made.proxy.workers if worker.role == "prefill"]
    assert [worker.name for worker in workers] == names
    assert {worker.ranks for worker in workers} == {ranks}
    for worker in workers:
        process = made.process(worker.name)
        assert worker.url.endswith(f":{process.ports['http']}")
        assert worker.bootstrap_url is not None
        assert worker.bootstrap_url.endswith(f":{process.ports['bootstrap']}")
        assert process.env.set["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == str(process.ports["bootstrap"])
        assert process.reached_by["http"] == ("proxy",)
    assert len({worker.url for worker in workers}) == len({worker.bootstrap_url for worker in workers}) == len(workers)


@pytest.mark.parametrize(("mode", "each"), [(HYBRID, 2), (EXTERNAL, 1)])
def test_a_nixl_side_channel_is_where_the_plan_says_although_vllm_adds_the_rank(mode: str, each: int) -> None:
    made = prefills(built(mode, {"prefill": {"connector": NIXL}, "decode": {"connector": NIXL}}))
    for index, process in enumerate(made.values()):
        base = int(process.env.set["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        channels = [port for purpose, port in process.ports.items() if purpose.startswith("nixl")]
        assert [base + rank for rank in range(index * each, (index + 1) * each)] == channels


def test_several_instances_keep_their_ranks_and_ports_apart() -> None:
    made = built(EXTERNAL, {"prefill": {"instances": 2}}, sizes=(4, 4, 1))
    names = list(prefills(made))
    assert names[4:] == ["prefill-1", "prefill-1-rank1", "prefill-1-rank2", "prefill-1-rank3"]
    assert value_of(made.process("prefill-1-rank1"), "--data-parallel-rpc-port") == "29501"
    assert [p.name for p in made.instance_of("prefill-1-rank3")] == names[4:]


def test_external_ranks_may_share_one_node() -> None:
    made = prefills(built(EXTERNAL, sizes=(8,), nodes=1))
    assert {process.node for process in made.values()} == {"host0"}
    assert [process.ports["http"] for process in made.values()] == [8100, 8101, 8102, 8103]
    assert value_of(made["prefill-0-rank3"], "--data-parallel-rpc-port") == "29500"


def test_on_cpus_ranks_go_to_the_nodes_in_turn_and_a_follower_has_a_program() -> None:
    made = plan(recipe(wide(INTERNAL)), *hosts(0, 0))
    leader, follower = prefills(made).values()
    assert (leader.node, follower.node) == ("host0", "host1")
    assert leader.argv[:3] == ("python", "-m", "vllm.entrypoints.openai.api_server")
    assert follower.argv[:3] == ("python", "-m", CPU_SERVE)
    external = prefills(plan(recipe(wide(EXTERNAL)), *hosts(0, 0)))
    assert [process.node for process in external.values()] == ["host0", "host0", "host1", "host1"]


def test_on_a_cpu_too_few_nodes_are_counted_not_their_devices() -> None:
    with pytest.raises(PreflightError) as caught:
        plan(recipe(wide(EXTERNAL)), *hosts(0))
    assert str(caught.value) == "prefill-0 spans 2 nodes, and there is 1 here"
    assert "sbatch --nodes=2 --gres=none" in str(caught.value.todo)


def test_api_servers_share_a_port() -> None:
    made = built(HYBRID, api_servers=3)
    assert [value_of(p, "--api-server-count") for p in prefills(made).values()] == ["3", "3"]
    assert value_of(prefills(built(EXTERNAL))["prefill-0-rank1"], "--api-server-count") == "1"
    alone = plan(recipe({"decode": {"parallel": {"api_servers": 2}}}))
    assert value_of(alone.process("decode-0"), "--api-server-count") == "2"
    assert alone.process("decode-0").argv[2] == CPU_SERVE
    assert "--api-server-count" not in alone.process("prefill-0").argv


def test_prefill_context_parallelism_takes_devices() -> None:
    change = {"prefill": {"connector": NIXL, "parallel": {"pcp": 2}}, "decode": {"connector": NIXL}}
    process = plan(recipe(on_gpus(2), change), *hosts(8)).process("prefill-0")
    assert value_of(process, "--prefill-context-parallel-size") == "2"
    assert process.devices == (0, 1, 2, 3)
    assert process.ranks is not None
    assert process.ranks.workers == 4


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prefill": {"parallel": {"load_balancing": HYBRID}}}, "hybrid load balancing divides", "raise dp"),
    (wide(EXTERNAL, dp=3), "3 ranks over 2 nodes: with external load balancing", "multiple of nodes"),
    (wide(HYBRID, nodes=1), "on one node hybrid is internal", "internal"),
    (wide(HYBRID, dp=2), "each node has one rank", "external"),
    ({**with_lmcache(), **wide(EXTERNAL)}, "prefill attaches to LMCache", "take prefill out of lmcache.on"),
    ({"prefill": {"parallel": {"pcp": 2}}}, "Mooncake's bootstrap server knows no context-parallel", "nixl"),
    ({"decode": {"connector": NIXL, "parallel": {"pcp": 2}}}, "NIXL takes context parallelism in prefills", "remove"),
    ({"platform": "cpu", "prefill": {"parallel": {"pcp": 2}}}, "attention on a CPU has no context", "remove"),
    (
        {**wide(EXTERNAL, nodes=1), "proxy": {"routing": {"prefill": {"kind": "kv_events"}}}},
        "publish in processes of their own",
        "prefix_aware",
    ),
]


@pytest.mark.parametrize(("change", "what", "todo"), REFUSED, ids=[what for _, what, _ in REFUSED])
def test_what_cannot_be_is_refused_with_what_to_write(change: dict[str, Any], what: str, todo: str) -> None:
    refused = [problem for problem in problems(recipe(on_gpus(), change)) if what in problem.what]
    assert len(refused) == 1
    assert todo in f"{refused[0].todo} {refused[0].write}"


def test_a_model_without_experts_has_no_external_ranks() -> None:
    wanted = recipe(on_gpus(), wide(EXTERNAL))
    with pytest.raises(RecipeError, match="this model has no experts") as caught:
        model_rules.check_experts(wanted, {"model_type": "llama"})
    assert caught.value.todo == "write `instances: 4` with dp 1: that is the same"
    for config in ({"num_local_experts": 8}, {"text_config": {"n_routed_experts": 256}}, None):
        model_rules.check_experts(wanted, config)
    model_rules.check_experts(recipe(on_gpus(), wide(HYBRID)), {"model_type": "llama"})
