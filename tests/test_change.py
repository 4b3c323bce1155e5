"""What `up` starts of a deployment that runs, by its record, and what it says of that before."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import StateError
from pdserve.operations.shown_change import ShownChange, shown_change
from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.plan.running import RunningProcesses
from pdserve.run.change import can_exchange_kv, change, plan_between, recorded_change
from pdserve.run.directory import RunDir
from pdserve.run.state import ProcessPhase, ProcessState
from tests.launch.records import recorded_state
from tests.plan import kit
from tests.tables import each_row

NODES = Node(name="a", address="192.0.2.1"), Node(name="b", address="192.0.2.2")


def planned(**decode: object) -> Plan:
    return kit.plan(kit.recipe(kit.with_lmcache(), {"decode": decode}), *NODES)


def ports(plan: Plan, *names: str) -> set[int]:
    return {port for name in names for port in plan.process(name).ports.values()}


def running(folder: Path, plan: Plan, **phases: ProcessPhase) -> RunDir:
    """All are ready but those of `phases` (prefill_0="dead")."""
    run = RunDir(folder)
    processes = {
        process.name: ProcessState(
            role=process.role, node=process.node, phase=phases.get(process.name.replace("-", "_"), "ready")
        )
        for process in plan.processes
    }
    run.write(run.plan, plan.model_dump_json())
    run.write(run.state, recorded_state(name=plan.name, processes=processes).model_dump_json())
    return run


def test_nothing_is_started_of_what_runs_as_it_should(tmp_path: Path) -> None:
    plan = planned()
    seen = recorded_change(running(tmp_path, plan), plan)
    assert (seen.starting, seen.replaced) == ((), ())
    for node in ("a", "b"):
        there = [process.name for process in plan.processes if process.node == node]
        assert seen.ports[node] == ports(plan, *there)


@each_row("kind, dead, starting", [
    ("vllm-router", "prefill-0", ("prefill-0", "proxy")),
    ("vllm-router", "decode-0", ("decode-0",)),
    ("pdserve", "prefill-0", ("prefill-0",)),
])  # fmt: skip
def test_vllm_router_is_started_anew_last(tmp_path: Path, kind: str, dead: str, starting: tuple[str, ...]) -> None:
    moved = {"connector": kit.MOONCAKE}
    plan = kit.plan(kit.recipe({"proxy": {"kind": kind}, "prefill": moved, "decode": moved}), *NODES)
    phases: dict[str, ProcessPhase] = {dead.replace("-", "_"): "dead"}
    seen = recorded_change(running(tmp_path, plan, **phases), plan)
    assert (seen.starting, seen.replaced) == (starting, ())


@each_row("phase", ["dead", "stopped", "pending", "draining"])
def test_what_does_not_run_is_started_and_its_ports_are_nobodys(tmp_path: Path, phase: ProcessPhase) -> None:
    plan = planned()
    seen = recorded_change(running(tmp_path, plan, decode_0=phase), plan)
    assert (seen.starting, seen.replaced) == (("decode-0",), ())
    assert not seen.ports[plan.process("decode-0").node] & ports(plan, "decode-0")
    for lives in ("starting", "degraded", "done"):
        assert not recorded_change(running(tmp_path, plan, decode_0=lives), plan).starting


def test_what_runs_otherwise_is_replaced_on_its_own_ports(tmp_path: Path) -> None:
    plan, other = planned(), planned(args={"max-num-seqs": 3})
    seen = recorded_change(running(tmp_path, plan), other)
    assert seen.starting == seen.replaced == ("decode-0",)
    assert ports(plan, "decode-0") <= seen.ports[plan.process("decode-0").node]


def test_the_proxy_runs_on_when_only_its_workers_are_others(tmp_path: Path) -> None:
    """It is told of them; whatever else of its configuration changes takes another start."""
    more, longer = planned(instances=2), kit.recipe(kit.with_lmcache(), {"proxy": {"drain_seconds": 99.0}})
    assert recorded_change(running(tmp_path / "more", planned()), more).starting == ("decode-1",)
    assert recorded_change(running(tmp_path / "fewer", more), planned()).starting == ()
    seen = recorded_change(running(tmp_path / "longer", planned()), kit.plan(longer, *NODES))
    assert seen.replaced == ("proxy",)


def prepared(*setup: str, **decode: object) -> Plan:
    return kit.plan(kit.recipe(kit.with_lmcache(), {"decode": decode, "setup": list(setup)}), *NODES)


def test_a_setup_that_changed_restarts_what_it_prepares_but_not_the_proxy(tmp_path: Path) -> None:
    plan = prepared("a", "b")
    done: dict[str, ProcessPhase] = {one.name.replace("-", "_"): "done" for one in plan.processes if one.is_setup}
    run = running(tmp_path, plan, **done)
    assert recorded_change(run, plan).starting == ()
    seen = recorded_change(run, prepared("a", "c"))
    assert seen.starting == ("setup-1", "setup-1-node1", "lmcache-0", "prefill-0", "decode-0")
    assert seen.replaced == seen.starting
    first = recorded_change(run, prepared("c", "b")).starting
    assert first[:4] == ("setup-0", "setup-0-node1", "setup-1", "setup-1-node1")
    assert "proxy" not in first


def test_a_node_that_is_prepared_anew_restarts_nothing_on_another_one(tmp_path: Path) -> None:
    plan = prepared("a")
    seen = recorded_change(running(tmp_path, plan, setup_0="done", setup_0_node1="dead"), plan)
    assert {plan.process(name).node for name in seen.starting} == {plan.process("setup-0-node1").node}


def test_a_setup_that_is_gone_is_not_undone_and_that_is_said(tmp_path: Path) -> None:
    run = running(tmp_path, prepared("a"), setup_0="done", setup_0_node1="done")
    seen = recorded_change(run, prepared())
    assert seen.starting == ()
    assert seen.stays == "; what setup-0, setup-0-node1 did stays until pdserve down and up"
    assert recorded_change(run, prepared("a")).stays == ""


def test_a_run_without_a_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        recorded_change(RunDir(tmp_path), planned())


def test_all_processes_of_an_instance_are_started_when_one_of_them_is(tmp_path: Path) -> None:
    ranks = {"parallel": {"dp": 2, "nodes": 2, "load_balancing": "external"}}
    plan = kit.plan(kit.recipe({"decode": ranks}), *NODES)
    seen = recorded_change(running(tmp_path, plan, decode_0_rank1="dead"), plan)
    assert seen.starting == ("decode-0", "decode-0-rank1")
    assert seen.replaced == ("decode-0",)


def test_a_plan_between_two_has_what_runs(tmp_path: Path) -> None:
    """One decode more, prefill-0 with another command: after the first step only the new decode is there."""
    old, new = (
        planned(),
        kit.plan(
            kit.recipe(kit.with_lmcache(), {"decode": {"instances": 2}, "prefill": {"args": {"max-num-seqs": 3}}}),
            *NODES,
        ),
    )
    assert plan_between(old, new, ()).processes == old.processes
    between = plan_between(old, new, {"decode-1"})
    assert between.process("prefill-0") == old.process("prefill-0")
    assert between.process("decode-1") == new.process("decode-1")
    assert {worker.name for worker in between.proxy.workers} == {"prefill-0", "decode-0", "decode-1"}
    assert "decode-1" in between.process("proxy").files["proxy.json"]
    assert between.lmcache == old.lmcache
    assert not between.lacking()
    changed = plan_between(old, new, new.names())
    assert {process.name: process for process in changed.processes} == {p.name: p for p in new.processes}
    assert (changed.lmcache, changed.proxy) == (new.lmcache, new.proxy)


@each_row("changed, can", [
    ({"engine": {"args": {"max-num-seqs": 3}}}, True),
    ({"decode": {"instances": 2}}, True),
    ({"engine": {"args": {"block-size": 64}}}, False),
    ({"model": {"path": "models/other"}}, False),
    ({"prefill": {"connector": kit.NIXL}, "decode": {"connector": kit.NIXL}}, False),
])  # fmt: skip
def test_engines_exchange_kv_only_where_both_sides_agree(changed: dict[str, object], can: bool) -> None:
    assert can_exchange_kv(kit.plan(kit.recipe()), kit.plan(kit.recipe(changed))) is can


def routed(prefill: int, *, running: Plan | None = None, kind: str = "pdserve", setup: tuple[str, ...] = ()) -> Plan:
    moved = {"connector": kit.MOONCAKE}
    wanted = kit.recipe(
        {"proxy": {"kind": kind}, "prefill": {**moved, "instances": prefill}, "decode": moved, "setup": list(setup)}
    )
    return kit.plan(wanted, *kit.hosts(0), running=RunningProcesses(running, wanted.ports))


def shown(old: Plan, new: Plan, *dead: str) -> ShownChange:
    living = [name for name in old.names() if name not in dead]
    return shown_change("/run/x", old, new, change(old, new, living), living)


def test_what_comes_what_goes_and_what_is_dead_is_shown() -> None:
    old = routed(1)
    more = shown(old, routed(2, running=old))
    assert (more.start, more.stop, more.stay) == (("prefill-1",), (), ("prefill-0", "decode-0", "proxy"))
    old = routed(3)
    less = shown(old, routed(1, running=old))
    assert (less.start, less.stop, less.stay) == ((), ("prefill-1", "prefill-2"), ("prefill-0", "decode-0", "proxy"))
    assert shown(old, routed(3, running=old), "prefill-1").start == ("prefill-1",)
    assert shown(old, routed(2, running=old), "prefill-2").stop == ()


def test_vllm_router_that_lives_is_shown_to_be_restarted_for_a_new_prefill() -> None:
    old = routed(1, kind="vllm-router")
    assert shown(old, routed(2, running=old, kind="vllm-router")).restart == ("proxy",)
