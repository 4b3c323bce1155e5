"""`up` on a deployment that serves, with agents that a test plays: what it changes, in which order, what dies then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ServeError, StartError
from pdserve.plan.model import Plan
from pdserve.reach.protocol import Answered, Died
from pdserve.run.inbox import Reply, Restart
from tests.launch.played import REFUSED, Played, adapted, plan, serving_deployment
from tests.plan import kit

pytestmark = [pytest.mark.usefixtures("pdserve_home"), pytest.mark.process]


@asynccontextmanager
async def one_more_decode(folder: Path, **arguments: Any) -> AsyncIterator[tuple[Played, asyncio.Task[Reply]]]:
    """An `up` that has ordered the start of decode-1, which takes until the test lets it be ready."""
    one, two = (plan(decodes=decodes, **arguments) for decodes in (1, 2))
    async with serving_deployment(folder, one) as deployment:
        deployment.held.add(("start", "decode-1"))
        reply = deployment.up(two)
        await deployment.until(lambda: ("start", "decode-1") in deployment.orders)
        deployment.orders.clear()
        yield deployment, reply


async def test_an_engine_that_dies_meanwhile_is_restarted_as_the_recipe_sets(tmp_path: Path) -> None:
    async with one_more_decode(tmp_path, restart="on-failure") as (deployment, reply):
        deployment.dies("prefill-0", member="VLLM::EngineCore")
        await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
        assert deployment.orders == [("stop", "prefill-0"), ("start", "prefill-0")]
        deployment.obey("start", "decode-1")
        assert (await reply).message == "started decode-1; ready"
        assert (deployment.state.phase, deployment.phases()) == ("ready", {"ready"})


async def test_so_is_one_that_falls_silent(tmp_path: Path) -> None:
    async with one_more_decode(tmp_path, restart="on-failure", unresponsive_seconds=0.05) as (deployment, reply):
        deployment.is_silent("prefill-0")
        await deployment.until(lambda: ("start", "prefill-0") in deployment.orders)
        await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
        deployment.obey("start", "decode-1")
        assert (await reply).message == "started decode-1; ready"


async def test_one_that_is_not_restarted_is_started_by_the_next_up(tmp_path: Path) -> None:
    async with one_more_decode(tmp_path, prefills=2) as (deployment, reply):
        deployment.dies("prefill-0", member="VLLM::EngineCore")
        await deployment.until(lambda: ("stop", "prefill-0") in deployment.orders)
        deployment.obey("start", "decode-1")
        assert (await reply).message == "started decode-1; degraded: prefill-0 does not serve"
        assert (await deployment.up(plan(prefills=2, decodes=2))).message == "started prefill-0; ready"


async def test_the_last_one_of_its_role_does_not_end_what_the_next_one_is_on_its_way_to(tmp_path: Path) -> None:
    async with one_more_decode(tmp_path) as (deployment, reply):
        deployment.dies("decode-0")
        await deployment.until(lambda: ("stop", "decode-0") in deployment.orders)
        deployment.obey("start", "decode-1")
        assert (await reply).exit_code == 0
        assert (await deployment.up(plan(decodes=2))).message == "started decode-0; ready"


async def test_who_waits_is_told_the_death_that_ends_the_deployment(tmp_path: Path) -> None:
    async with one_more_decode(tmp_path) as (deployment, reply):
        deployment.dies("prefill-0")
        told = await reply
        assert told.exit_code == ServeError.exit_code
        assert "prefill-0@localhost" in told.message
        await deployment.over()
        assert isinstance(deployment.error, ServeError)
        assert deployment.error.where == "prefill-0@localhost"


async def test_who_waits_is_told_the_node_that_was_lost(tmp_path: Path) -> None:
    async with one_more_decode(tmp_path, nodes=2) as (deployment, reply):
        deployment.is_lost("host1")
        assert "node host1 is lost while serving, and with it decode-0" in (await reply).message
        await deployment.over()
        assert isinstance(deployment.error, ServeError)


async def test_the_proxy_is_told_which_workers_there_are_and_is_not_started_again(tmp_path: Path) -> None:
    async with one_more_decode(tmp_path) as (deployment, reply):
        told = [message for message in deployment.told if "workers" in message][-1]
        assert [worker["name"] for worker in told["workers"]] == ["prefill-0", "decode-0", "decode-1"]
        assert told["states"] == {"prefill-0": "ready", "decode-0": "ready", "decode-1": "starting"}
        deployment.obey("start", "decode-1")
        assert (await reply).message == "started decode-1; ready"
        assert {"worker": "decode-1", "state": "ready"} in deployment.told
        assert deployment.orders_of("proxy") == []


ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def sized(prefills: int = 2, decodes: int = 2, *, ports: dict[str, int] | None = None, **arguments: Any) -> Plan:
    """Return a plan of so many engines; `arguments` of all of them."""
    args = {name.replace("_", "-"): value for name, value in arguments.items()}
    roles = {"prefill": {"instances": prefills}, "decode": {"instances": decodes}}
    return adapted(kit.plan(kit.recipe(roles, {"engine": {"args": args}, "ports": ports or {}})))


def flag_of(plan: Plan, name: str, flag: str) -> str | None:
    argv = plan.process(name).argv
    return argv[argv.index(flag) + 1] if flag in argv else None


def routed(deployment: Played) -> list[dict[str, str]]:
    """What the proxy was told of each worker, after each of its changes."""
    states: dict[str, str] = {}
    seen = []
    for event in deployment.events:
        if event["event"] == "route":
            states[event["name"]] = event["routing"]
            seen.append(dict(states))
    return seen


def count_ready(states: dict[str, str], role: str) -> int:
    return sum(state == "ready" for name, state in states.items() if name.startswith(role))


async def test_engines_are_replaced_one_at_a_time_a_role(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, sized()) as deployment:
        deployment.events.clear()
        reply = await deployment.up(sized(max_num_seqs=7), replace=True)
        assert reply.message == f"restarted {', '.join(ENGINES)}; ready"
        drained = [states for states in routed(deployment) if set(states) >= set(ENGINES)]
        assert all(count_ready(states, role) for states in drained for role in ("prefill", "decode"))
        for name in ENGINES:
            assert deployment.orders_of(name) == ["stop", "start"]
            assert flag_of(deployment.run_dir.read_plan(), name, "--max-num-seqs") == "7"
        assert not deployment.state.change


async def test_one_that_fails_returns_to_its_former_command_and_the_next_up_goes_on(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, sized()) as deployment:
        new = sized(max_num_seqs=7)
        deployment.held.add(("start", "decode-0"))
        reply = deployment.up(new, replace=True)
        await deployment.until(lambda: ("start", "decode-0") in deployment.orders)
        deployment.held.clear()
        deployment.dies("decode-0")
        failed = await reply
        assert failed.exit_code == StartError.exit_code
        assert "decode-0@localhost" in failed.message
        assert deployment.phases() == {"ready"}
        stands = deployment.run_dir.read_plan()
        assert [flag_of(stands, name, "--max-num-seqs") for name in ("decode-0", "decode-1")] == [None, None]
        assert "decode-0" in deployment.state.change
        assert (await deployment.up(new, replace=True)).exit_code == 0
        assert all(flag_of(deployment.run_dir.read_plan(), name, "--max-num-seqs") == "7" for name in ENGINES)


async def test_engines_that_cannot_exchange_kv_never_get_requests_together(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, sized()) as deployment:
        deployment.events.clear()
        reply = await deployment.up(sized(block_size=64), replace=True)
        assert reply.message == f"restarted {', '.join(ENGINES)}; ready"
        first, second = ("prefill-0", "decode-0"), ("prefill-1", "decode-1")
        starts = [name for verb, name in deployment.orders if verb == "start"]
        assert set(starts[:2]) == set(first)
        new: set[str] = set()
        states = dict.fromkeys(ENGINES, "ready")
        for event in deployment.events:
            if event["event"] == "start":
                new.add(event["name"])
            if event["event"] == "route":
                states[event["name"]] = event["routing"]
                ready = {name for name, state in states.items() if state == "ready"}
                assert not (ready & new and ready - new), f"{ready} get requests, {new} are new"
        assert new == set(first + second)


async def test_a_generation_that_fails_leaves_the_former_one_serving(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, sized()) as deployment:
        deployment.held.add(("start", "decode-0"))
        reply = deployment.up(sized(block_size=64), replace=True)
        await deployment.until(lambda: ("start", "decode-0") in deployment.orders)
        deployment.held.clear()
        deployment.dies("decode-0")
        assert (await reply).exit_code == StartError.exit_code
        assert deployment.phases() == {"ready"}
        stands = deployment.run_dir.read_plan()
        assert {flag_of(stands, name, "--block-size") for name in ENGINES} == {None}


async def test_what_goes_is_drained_before_it_is_stopped(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, sized()) as deployment:
        deployment.events.clear()
        busy = '{"workers": [{"name": "decode-1", "in_flight": 1}]}'
        deployment.answers["/workers"] = Answered(id=0, status=200, body=busy)
        deployment.asked.clear()
        reply = deployment.up(sized(2, 1), replace=True)
        await deployment.until(lambda: any("/workers" in url for url in deployment.asked))
        assert routed(deployment)[-1] == {"decode-1": "draining"}
        assert not deployment.orders
        deployment.answers.clear()
        assert (await reply).exit_code == 0
        assert ("stop", "decode-1") in deployment.orders
        assert "decode-1" not in deployment.state.processes


async def test_changes_and_restarts_wait_for_each_other(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, sized()) as deployment:
        deployment.held.add(("stop", "prefill-0"))
        change = deployment.up(sized(max_num_seqs=7), replace=True)
        await deployment.until(lambda: ("stop", "prefill-0") in deployment.orders)
        restart = deployment.ask(Restart(name="decode-1"))
        await deployment.looks()
        assert not restart.done()
        deployment.obey("stop", "prefill-0")
        assert (await change).exit_code == 0
        assert (await restart).exit_code == 0
        assert deployment.orders_of("decode-1").count("start") == 2


@pytest.mark.parametrize("busy", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("prefill", [21100, 21200], ids=["exchange", "one takes the other's"])
async def test_instances_that_get_what_another_role_holds(tmp_path: Path, busy: str, prefill: int) -> None:
    """The roles change side by side: whoever is drained for the other one must still be started."""
    async with serving_deployment(tmp_path, sized(1, 1, ports={"prefill": 21000, "decode": 21100})) as deployment:
        page = {"workers": [{"name": busy, "in_flight": 1, "state": "draining"}]}
        deployment.answers["/workers"] = Answered(id=0, status=200, body=json.dumps(page))
        deployment.asked.clear()
        reply = deployment.up(sized(1, 1, ports={"prefill": prefill, "decode": 21000}), replace=True)
        await deployment.until(lambda: any("/workers" in url for url in deployment.asked))
        await deployment.looks()
        deployment.answers.clear()
        assert (await reply).message == "restarted prefill-0, decode-0; ready"
        assert deployment.orders.index(("stop", "prefill-0")) < deployment.orders.index(("start", "decode-0"))


def gpus(**prefill: Any) -> Plan:
    """Two prefills on hosts of four devices each, and a decode; `prefill`: their parallelism."""
    role = {"instances": 2, "parallel": prefill}
    return adapted(kit.plan(kit.recipe(kit.on_gpus(), {"prefill": role}), *kit.hosts(4, 4, 4)), restart="on-failure")


@pytest.mark.parametrize(
    ("before", "after"),
    [({"tp": 2, "nodes": 2}, {"tp": 2}), ({"tp": 2}, {"tp": 2, "nodes": 2})],
    ids=["fewer processes", "more processes"],
)
async def test_an_instance_that_gets_another_number_of_processes_is_replaced_once(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    async with serving_deployment(tmp_path, gpus(**before)) as deployment:
        assert (await deployment.up(gpus(**after), replace=True)).exit_code == 0
        assert deployment.phases() == {"ready"}
        for name in ("prefill-0", "prefill-1"):
            assert deployment.orders_of(name) == ["stop", "start"]


async def test_a_proxy_that_fails_returns_to_its_former_command(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, sized()) as deployment:
        deployment.failing["proxy"] = 1
        assert (await deployment.up(sized(ports={"proxy": 8099}), replace=True)).exit_code == StartError.exit_code
        assert deployment.phases() == {"ready"}
        assert deployment.run_dir.read_plan().proxy.port == sized().proxy.port


async def test_a_cache_server_that_fails_returns_to_its_former_command(tmp_path: Path) -> None:
    def cached(size: int) -> Plan:
        return adapted(kit.plan(kit.recipe(kit.aggregated(instances=2), {"lmcache": {"l1_size_gb": size}})))

    async with serving_deployment(tmp_path, cached(1)) as deployment:
        deployment.failing["lmcache-0"] = 1
        assert (await deployment.up(cached(2), replace=True)).exit_code == StartError.exit_code
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert flag_of(deployment.run_dir.read_plan(), "lmcache-0", "--l1-size-gb") == "1"


# What an `up` that failed leaves: engines that serve, and recoveries that go on


def dies_loading(deployment: Played, name: str) -> None:
    deployment.says(Died(name=name, pid=8, code=1, how="exited", seconds=1, while_starting=True))


async def test_of_two_that_start_side_by_side_the_one_that_lives_serves(tmp_path: Path) -> None:
    one, three = plan(decodes=1), plan(decodes=3)
    async with serving_deployment(tmp_path, one) as deployment:
        deployment.held |= {("start", "decode-1"), ("start", "decode-2")}
        reply = deployment.up(three)
        await deployment.until(lambda: ("start", "decode-2") in deployment.orders)
        dies_loading(deployment, "decode-2")
        await deployment.until(lambda: ("stop", "decode-2") in deployment.orders)
        deployment.obey_all()
        assert (await reply).exit_code == StartError.exit_code
        assert (deployment.state.phase, deployment.phase("decode-1")) == ("degraded", "ready")
        assert (await deployment.up(three)).message == "started decode-2; ready"
        assert (deployment.state.phase, deployment.phases()) == ("ready", {"ready"})


async def an_up_that_fails(deployment: Played) -> None:
    """To one decode more, which dies as it loads."""
    deployment.held.add(("start", "decode-1"))
    reply = deployment.up(plan(decodes=2, restart="on-failure"))
    await deployment.until(lambda: ("start", "decode-1") in deployment.orders)
    dies_loading(deployment, "decode-1")
    assert (await reply).exit_code == StartError.exit_code
    assert not deployment.is_over


async def test_an_engine_whose_proof_it_has_interrupted_is_proven_and_returns(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(restart="on-failure")) as deployment:
        deployment.answers["/v1/completions"] = REFUSED
        deployment.dies("prefill-0")
        await deployment.until(lambda: deployment.state.processes["prefill-0"].note == "to be proven")
        await an_up_that_fails(deployment)
        assert deployment.phase("prefill-0") == "degraded"
        deployment.answers.clear()
        await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
        assert deployment.orders.count(("start", "prefill-0")) == 1


async def test_one_that_still_loaded_is_proven_when_it_is_ready(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(restart="on-failure")) as deployment:
        deployment.held.add(("start", "prefill-0"))
        deployment.dies("prefill-0")
        await deployment.until(lambda: ("start", "prefill-0") in deployment.orders)
        await an_up_that_fails(deployment)
        deployment.obey("start", "prefill-0")
        await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
        assert any(event["event"] == "canary" and event["name"] == "prefill-0" for event in deployment.events)


async def test_a_process_that_moves_is_on_its_new_node(tmp_path: Path) -> None:
    """Else the loss of the old one would take it along, and that of the new one would not."""
    one, two = plan(decodes=1), plan(decodes=1, nodes=2)
    async with serving_deployment(tmp_path, one) as deployment:
        fleet = deployment.fleet
        fleet.adopt(two)
        nodes = {process.name: process.node for process in two.processes}
        assert {name: state.node for name, state in deployment.state.processes.items()} == nodes
        fleet.adopt(one)
