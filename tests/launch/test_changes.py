"""`up` on a deployment that serves, with agents that a test plays: what it changes, in which order, what dies then."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve import launcher
from pdserve.errors import ServeError, StartError, StateError
from pdserve.launch.launch_record import save_change
from pdserve.plan.model import Plan
from pdserve.reach.protocol import Answered
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Apply, Reply, Restart
from tests.launch.played import Played, adapted, plan, played
from tests.plan import kit

pytestmark = pytest.mark.usefixtures("pdserve_home")


def up(to: Plan) -> Apply:
    return Apply(plan=to, recipe="name: another")


async def starting_one_more(deployment: Played, to: Plan) -> asyncio.Task[Reply]:
    """An `up` that has ordered the start of decode-1, which takes until the test lets it be ready."""
    await deployment.serving()
    deployment.held.add(("start", "decode-1"))
    reply = deployment.ask(up(to))
    await deployment.until(lambda: ("start", "decode-1") in deployment.orders)
    deployment.orders.clear()
    return reply


def test_an_engine_that_dies_meanwhile_is_restarted_as_the_recipe_sets(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes, restart="on-failure") for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.dies("prefill-0", member="VLLM::EngineCore")
            await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
            assert deployment.orders == [("stop", "prefill-0"), ("start", "prefill-0")]
            deployment.obey("start", "decode-1")
            assert (await reply).message == "started decode-1; ready"
            assert (deployment.state.phase, deployment.phases()) == ("ready", {"ready"})

    asyncio.run(scenario())


def test_one_that_is_not_restarted_is_started_by_the_next_up(tmp_path: Path) -> None:
    one, two = (plan(prefills=2, decodes=decodes) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.dies("prefill-0", member="VLLM::EngineCore")
            await deployment.until(lambda: ("stop", "prefill-0") in deployment.orders)
            deployment.obey("start", "decode-1")
            assert (await reply).message == "started decode-1; degraded: prefill-0 does not serve"
            assert (await deployment.ask(up(two))).message == "started prefill-0; ready"

    asyncio.run(scenario())


def test_the_last_one_of_its_role_does_not_end_what_the_next_one_is_on_its_way_to(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.dies("decode-0")
            await deployment.until(lambda: ("stop", "decode-0") in deployment.orders)
            deployment.obey("start", "decode-1")
            assert (await reply).exit_code == 0
            assert (await deployment.ask(up(two))).message == "started decode-0; ready"

    asyncio.run(scenario())


def test_who_waits_is_told_the_death_that_ends_the_deployment(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.dies("prefill-0")
            told = await reply
            assert told.exit_code == ServeError.exit_code
            assert "prefill-0@localhost" in told.message
            await deployment.over()
            assert isinstance(deployment.error, ServeError)
            assert deployment.error.where == "prefill-0@localhost"

    asyncio.run(scenario())


def test_who_waits_is_told_the_node_that_was_lost(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes, nodes=2) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.is_lost("host1")
            assert "node host1 is lost while serving, and with it decode-0" in (await reply).message
            await deployment.over()
            assert isinstance(deployment.error, ServeError)

    asyncio.run(scenario())


def test_an_engine_that_dies_before_it_is_stopped_for_a_smaller_plan_is_not_missed(tmp_path: Path) -> None:
    more, fewer = plan(prefills=2, decodes=2), plan()

    async def scenario() -> None:
        async with played(tmp_path, more) as deployment:
            await deployment.serving()
            deployment.held.add(("stop", "decode-1"))
            reply = deployment.ask(Apply(plan=fewer, recipe="name: another", replace=True))
            await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
            deployment.dies("prefill-1")
            deployment.obey("stop", "decode-1")
            assert (await reply).exit_code == 0
            assert set(deployment.state.processes) == {"prefill-0", "decode-0", "proxy"}

    asyncio.run(scenario())


def test_the_proxy_is_told_which_workers_there_are_and_is_not_started_again(tmp_path: Path) -> None:
    one, two = plan(), plan(decodes=2)

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            told = [message for message in deployment.told if "workers" in message][-1]
            assert [worker["name"] for worker in told["workers"]] == ["prefill-0", "decode-0", "decode-1"]
            assert told["states"] == {"prefill-0": "ready", "decode-0": "ready", "decode-1": "starting"}
            deployment.obey("start", "decode-1")
            assert (await reply).message == "started decode-1; ready"
            assert {"worker": "decode-1", "state": "ready"} in deployment.told
            assert [verb for verb, name in deployment.orders if name == "proxy"] == []

    asyncio.run(scenario())


ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def two_of_each(**arguments: Any) -> Plan:
    """2P2D; `arguments` of all engines."""
    args = {name.replace("_", "-"): value for name, value in arguments.items()}
    roles = {"prefill": {"instances": 2}, "decode": {"instances": 2}}
    return adapted(kit.plan(kit.recipe(roles, {"engine": {"args": args}})))


def up_with_replace(to: Plan) -> Apply:
    return Apply(plan=to, recipe="name: another", replace=True)


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


def serving(states: dict[str, str], role: str) -> int:
    return sum(state == "ready" for name, state in states.items() if name.startswith(role))


def test_engines_are_replaced_one_at_a_time_a_role(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, two_of_each()) as deployment:
            await deployment.serving()
            deployment.events.clear()
            reply = await deployment.ask(up_with_replace(two_of_each(max_num_seqs=7)))
            assert reply.message == f"restarted {', '.join(ENGINES)}; ready"
            drained = [states for states in routed(deployment) if set(states) >= set(ENGINES)]
            assert all(serving(states, role) for states in drained for role in ("prefill", "decode"))
            for name in ENGINES:
                assert [verb for verb, whose in deployment.orders if whose == name] == ["stop", "start"]
                assert flag_of(deployment.run_dir.read_plan(), name, "--max-num-seqs") == "7"
            assert not deployment.state.change

    asyncio.run(scenario())


def test_one_that_fails_returns_to_its_former_command_and_the_next_up_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, two_of_each()) as deployment:
            await deployment.serving()
            new = two_of_each(max_num_seqs=7)
            deployment.held.add(("start", "decode-0"))
            reply = deployment.ask(up_with_replace(new))
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
            assert (await deployment.ask(up_with_replace(new))).exit_code == 0
            assert all(flag_of(deployment.run_dir.read_plan(), name, "--max-num-seqs") == "7" for name in ENGINES)

    asyncio.run(scenario())


def test_engines_that_cannot_exchange_kv_never_get_requests_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, two_of_each()) as deployment:
            await deployment.serving()
            deployment.events.clear()
            reply = await deployment.ask(up_with_replace(two_of_each(block_size=64)))
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

    asyncio.run(scenario())


def test_a_generation_that_fails_leaves_the_former_one_serving(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, two_of_each()) as deployment:
            await deployment.serving()
            deployment.held.add(("start", "decode-0"))
            reply = deployment.ask(up_with_replace(two_of_each(block_size=64)))
            await deployment.until(lambda: ("start", "decode-0") in deployment.orders)
            deployment.held.clear()
            deployment.dies("decode-0")
            assert (await reply).exit_code == StartError.exit_code
            assert deployment.phases() == {"ready"}
            stands = deployment.run_dir.read_plan()
            assert {flag_of(stands, name, "--block-size") for name in ENGINES} == {None}

    asyncio.run(scenario())


def test_what_goes_is_drained_before_it_is_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, two_of_each()) as deployment:
            await deployment.serving()
            deployment.events.clear()
            busy = '{"workers": [{"name": "decode-1", "in_flight": 1}]}'
            deployment.answers["/workers"] = Answered(id=0, status=200, body=busy)
            deployment.asked.clear()
            reply = deployment.ask(up_with_replace(adapted(kit.plan(kit.recipe({"prefill": {"instances": 2}})))))
            await deployment.until(lambda: any("/workers" in url for url in deployment.asked))
            assert routed(deployment)[-1] == {"decode-1": "draining"}
            assert not deployment.orders
            deployment.answers.clear()
            assert (await reply).exit_code == 0
            assert ("stop", "decode-1") in deployment.orders
            assert "decode-1" not in deployment.state.processes

    asyncio.run(scenario())


def test_changes_and_restarts_wait_for_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, two_of_each()) as deployment:
            await deployment.serving()
            deployment.held.add(("stop", "prefill-0"))
            change = deployment.ask(up_with_replace(two_of_each(max_num_seqs=7)))
            await deployment.until(lambda: ("stop", "prefill-0") in deployment.orders)
            restart = deployment.ask(Restart(name="decode-1"))
            await deployment.looks()
            assert not restart.done()
            deployment.obey("stop", "prefill-0")
            assert (await change).exit_code == 0
            assert (await restart).exit_code == 0
            assert [verb for verb, name in deployment.orders if name == "decode-1"].count("start") == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("busy", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("prefill", [21100, 21200], ids=["exchange", "one takes the other's"])
def test_instances_that_get_what_another_role_holds(tmp_path: Path, busy: str, prefill: int) -> None:
    """The roles change side by side: whoever is drained for the other one must still be started."""

    def on_ports(prefill: int, decode: int) -> Plan:
        return adapted(kit.plan(kit.recipe({"ports": {"prefill": prefill, "decode": decode}})))

    async def scenario() -> None:
        async with played(tmp_path, on_ports(21000, 21100)) as deployment:
            await deployment.serving()
            page = {"workers": [{"name": busy, "in_flight": 1, "state": "draining"}]}
            deployment.answers["/workers"] = Answered(id=0, status=200, body=json.dumps(page))
            deployment.asked.clear()
            reply = deployment.ask(up_with_replace(on_ports(prefill, 21000)))
            await deployment.until(lambda: any("/workers" in url for url in deployment.asked))
            await deployment.looks()
            deployment.answers.clear()
            assert (await reply).message == "restarted prefill-0, decode-0; ready"
            assert deployment.orders.index(("stop", "prefill-0")) < deployment.orders.index(("start", "decode-0"))

    asyncio.run(scenario())


def gpus(**prefill: Any) -> Plan:
    """Two prefills on hosts of four devices each, and a decode; `prefill`: their parallelism."""
    role = {"instances": 2, "parallel": prefill}
    return adapted(kit.plan(kit.recipe(kit.on_gpus(), {"prefill": role}), *kit.hosts(4, 4, 4)), restart="on-failure")


@pytest.mark.parametrize(
    ("before", "after"),
    [({"tp": 2, "nodes": 2}, {"tp": 2}), ({"tp": 2}, {"tp": 2, "nodes": 2})],
    ids=["fewer processes", "more processes"],
)
def test_an_instance_that_gets_another_number_of_processes_is_replaced_once(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with played(tmp_path, gpus(**before)) as deployment:
            await deployment.serving()
            assert (await deployment.ask(up_with_replace(gpus(**after)))).exit_code == 0
            assert deployment.phases() == {"ready"}
            for name in ("prefill-0", "prefill-1"):
                assert [verb for verb, whose in deployment.orders if whose == name] == ["stop", "start"]

    asyncio.run(scenario())


def test_a_proxy_that_fails_returns_to_its_former_command(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, two_of_each()) as deployment:
            await deployment.serving()
            deployment.failing["proxy"] = 1
            moved = adapted(
                kit.plan(
                    kit.recipe(
                        {"prefill": {"instances": 2}, "decode": {"instances": 2}, "ports": {"proxy": 8099}},
                    )
                )
            )
            assert (await deployment.ask(up_with_replace(moved))).exit_code == StartError.exit_code
            assert deployment.phases() == {"ready"}
            assert deployment.run_dir.read_plan().proxy.port == two_of_each().proxy.port

    asyncio.run(scenario())


@pytest.mark.parametrize("change", [{"max_num_seqs": 7}, {"block_size": 64}], ids=["limits", "generation"])
def test_a_record_that_cannot_be_written_ends_the_change_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:
    saved = 0

    def save(run: RunDir, plan: Plan, recipe: str | None) -> None:
        nonlocal saved
        saved += 1
        if saved == 2:
            raise StateError("no space left")
        save_change(run, plan, recipe)

    async def scenario() -> None:
        async with played(tmp_path, two_of_each()) as deployment:
            await deployment.serving()
            monkeypatch.setattr(launcher, "save_change", save)
            assert "no space left" in (await deployment.ask(up_with_replace(two_of_each(**change)))).message
            assert deployment.phases() == {"ready"}
            assert (await deployment.ask(up_with_replace(two_of_each(**change)))).exit_code == 0

    asyncio.run(scenario())


def test_engines_serve_on_without_the_cache_that_is_removed_while_it_is_down(tmp_path: Path) -> None:
    cached = adapted(kit.plan(kit.recipe(kit.aggregated(instances=2))))
    plain = adapted(
        kit.plan(
            kit.recipe({"mode": "aggregated", "prefill": None, "decode": None, "aggregated": {"instances": 2}}),
        )
    )

    async def scenario() -> None:
        async with played(tmp_path, cached) as deployment:
            await deployment.serving()
            deployment.held.add(("start", "lmcache-0"))
            deployment.dies("lmcache-0")
            await deployment.until(lambda: ("start", "lmcache-0") in deployment.orders)
            assert (await deployment.ask(up_with_replace(plain))).exit_code == 0
            assert deployment.phases() == {"ready"}

    asyncio.run(scenario())


def test_a_cache_server_that_fails_returns_to_its_former_command(tmp_path: Path) -> None:
    def cached(size: int) -> Plan:
        return adapted(kit.plan(kit.recipe(kit.aggregated(instances=2), {"lmcache": {"l1_size_gb": size}})))

    async def scenario() -> None:
        async with played(tmp_path, cached(1)) as deployment:
            await deployment.serving()
            deployment.failing["lmcache-0"] = 1
            assert (await deployment.ask(up_with_replace(cached(2)))).exit_code == StartError.exit_code
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert flag_of(deployment.run_dir.read_plan(), "lmcache-0", "--l1-size-gb") == "1"

    asyncio.run(scenario())


def test_what_an_interrupted_change_of_generation_has_held_serves_again(tmp_path: Path) -> None:
    """Three prefills stay three: the third one was to go with a change whose second half has failed."""

    def of(prefills: int, **arguments: Any) -> Plan:
        args = {name.replace("_", "-"): value for name, value in arguments.items()}
        roles = {"prefill": {"instances": prefills}, "decode": {"instances": 2}}
        return adapted(kit.plan(kit.recipe(roles, {"engine": {"args": args}})))

    async def scenario() -> None:
        async with played(tmp_path, of(3)) as deployment:
            await deployment.serving()
            deployment.failing["decode-1"] = 1
            assert (await deployment.ask(up_with_replace(of(2, block_size=64)))).exit_code == StartError.exit_code
            assert (await deployment.ask(up_with_replace(of(3)))).exit_code == 0
            assert deployment.phases() == {"ready"}

    asyncio.run(scenario())


def test_what_was_stopped_to_make_room_is_back_after_a_failure(tmp_path: Path) -> None:
    """prefill-0 is to get decode-1's port, and dies."""

    def on_ports(prefill: int, decode: int) -> Plan:
        roles = {"prefill": {"instances": 2}, "decode": {"instances": 2}}
        return adapted(kit.plan(kit.recipe(roles, {"ports": {"prefill": prefill, "decode": decode}})))

    async def scenario() -> None:
        async with played(tmp_path, on_ports(21000, 21100)) as deployment:
            await deployment.serving()
            deployment.failing["prefill-0"] = 1
            assert (await deployment.ask(up_with_replace(on_ports(21101, 21200)))).exit_code == StartError.exit_code
            assert deployment.phases() == {"ready"}

    asyncio.run(scenario())
