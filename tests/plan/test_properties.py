"""What holds for every recipe that can be planned."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from pdserve.errors import PdserveError
from pdserve.plan.build import build_plan
from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.plan.running import NOTHING, RunningProcesses
from pdserve.recipe.model import Recipe, Role
from tests.plan.kit import MOONCAKE, MULTI, NIXL, VERSIONS, hosts, recipe

parallels = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2, 4]), "pp": st.sampled_from([1, 2]), "dp": st.sampled_from([1, 2])}
)
roles = st.fixed_dictionaries({"instances": st.integers(1, 4), "parallel": parallels})
base_ports = st.dictionaries(
    st.sampled_from(["proxy", "prefill", "decode", "bootstrap", "nixl", "lmcache", "lmcache_http", "transfer"]),
    st.integers(8000, 8120),
    max_size=4,
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    connector = draw(st.sampled_from([MOONCAKE, NIXL]))
    document: dict[str, Any] = {
        "platform": draw(st.sampled_from(["cpu", "cuda", "rocm"])),
        "prefill": {**draw(roles), "connector": connector},
        "decode": {**draw(roles), "connector": connector},
        "ports": draw(base_ports),
        "engine": {"env": {"A_TOKEN": {"secret": "MY_TOKEN"}}},
    }
    if connector is MOONCAKE and draw(st.booleans()):
        document["prefill"]["connector"] = MULTI
        document["lmcache"] = {
            "l1_size_gb": 1,
            "transfer_mode": "auto",
            "per": draw(st.sampled_from(["node", "tp-rank"])),
        }
    return document


node_sets = st.lists(st.sampled_from([0, 4, 8, 16]), min_size=1, max_size=4).map(lambda sizes: hosts(*sizes))


def build(wanted: Recipe, nodes: tuple[Node, ...], running: RunningProcesses = NOTHING) -> Plan:
    return build_plan(wanted, nodes, run_dir="/run/x", run_id="r", versions=VERSIONS, running=running)


def planned(document: dict[str, Any], nodes: tuple[Node, ...]) -> tuple[Recipe, Plan]:
    """The recipe and its plan; documents that are refused are not what these tests are about."""
    wanted = recipe(document)
    try:
        return wanted, build(wanted, nodes)
    except PdserveError:
        reject()


many = settings(
    max_examples=settings().max_examples * 3 // 2,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def no_port_is_shared(plan: Plan) -> None:
    claims: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for process in plan.processes:
        claims[process.node] += [(port, port) for port in process.ports.values()]
        if "MC_MIN_RPC_PORT" in process.env.set:
            claims[process.node].append(
                (int(process.env.set["MC_MIN_RPC_PORT"]), int(process.env.set["MC_MAX_RPC_PORT"]))
            )
    for taken in claims.values():
        for (_, last), (first, _) in pairwise(sorted(taken)):
            assert last < first


def no_device_is_shared(plan: Plan, nodes: tuple[Node, ...]) -> None:
    used: dict[str, list[int]] = defaultdict(list)
    for process in plan.processes:
        if process.is_engine:
            used[process.node] += process.devices
    offered = {node.name: set(node.devices) for node in nodes}
    for node, devices in used.items():
        assert len(devices) == len(set(devices))
        assert set(devices) <= offered[node]


@many
@given(documents(), node_sets)
def test_no_port_and_no_device_is_shared_and_every_engine_is_known(
    document: dict[str, Any], nodes: tuple[Node, ...]
) -> None:
    wanted, plan = planned(document, nodes)
    no_port_is_shared(plan)
    no_device_is_shared(plan, nodes)
    sizes: dict[str, int] = {}
    for name, role in wanted.roles():
        sizes[name] = role.parallel.tp * role.parallel.pp * role.parallel.dp
    engines = [process for process in plan.processes if process.is_engine]
    for engine in engines:
        assert len(engine.devices) == (0 if plan.platform == "cpu" else sizes[engine.role])
    assert [worker.name for worker in plan.proxy.workers] == [engine.name for engine in engines]
    assert len(set(plan.names())) == len(plan.names())
    for server in plan.lmcache:
        node = plan.process(server.process).node
        assert {plan.process(engine).node for engine in server.engines} == {node}, "its own node's"
        assert server.expected_workers >= len(server.engines)


@many
@given(documents(), node_sets)
def test_a_plan_survives_json_and_is_made_again(document: dict[str, Any], nodes: tuple[Node, ...]) -> None:
    wanted, plan = planned(document, nodes)
    before = wanted.model_copy(deep=True)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan == build(wanted, nodes)
    assert wanted == before


@many
@given(documents(), node_sets, st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_what_runs_stays_as_it_is_when_the_numbers_change(
    document: dict[str, Any], nodes: tuple[Node, ...], instances: tuple[int, int]
) -> None:
    before, running = planned(document, nodes)
    numbers = dict(zip(("prefill", "decode"), instances, strict=True))
    changed: dict[str, Role] = {
        name: role.model_copy(update={"instances": numbers[name]}) for name, role in before.roles()
    }
    try:
        new = build(before.model_copy(update=changed), nodes, RunningProcesses(running, before.ports))
    except PdserveError:
        reject()
    no_port_is_shared(new)
    no_device_is_shared(new, nodes)
    then = {process.name: process for process in new.processes}
    for process in running.processes:
        # On devices an LMCache server sees those of its engines, and is another one with them.
        stays = process.is_engine or (process.is_lmcache and new.platform == "cpu")
        if stays and process.name in then:
            assert process == then[process.name]
