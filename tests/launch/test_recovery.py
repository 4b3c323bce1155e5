"""Recoveries of a serving deployment whose engines do what the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.errors import ServeError, StateError
from pdserve.launch.fleet import ANSWER_SECONDS, PendingStops
from pdserve.launcher import UnendingLoop
from pdserve.plan.model import Plan
from pdserve.reach.protocol import Answered
from pdserve.run.inbox import Restart
from tests.launch.played import REFUSED, Played, adapted, plan, plan_with_cache, serving_deployment
from tests.launch.records import no_room
from tests.plan import kit

pytestmark = pytest.mark.usefixtures("pdserve_home")

ENGINE = "aggregated-0"
BROKEN = Answered(id=0, status=500, body="broken")


async def to_be_restarted(deployment: Played) -> None:
    """Its cache server has died and is back; the engine fails its canary, and is being started again for that."""
    deployment.answers["/v1/completions"] = BROKEN
    deployment.held.add(("start", ENGINE))
    deployment.dies("lmcache-0")
    await deployment.until(lambda: ("start", ENGINE) in deployment.orders)
    deployment.answers.clear()


async def test_an_engine_that_is_restarted_for_its_cache_server_comes_back(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan_with_cache()) as deployment:
        await to_be_restarted(deployment)
        deployment.obey("start", ENGINE)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders_of("lmcache-0") == ["stop", "start"]
        assert deployment.orders_of(ENGINE) == ["stop", "start"]


async def test_one_that_dies_in_that_restart_is_recovered_once(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan_with_cache(restart="on-failure")) as deployment:
        await to_be_restarted(deployment)
        deployment.held.clear()
        deployment.dies(ENGINE)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        orders = deployment.orders_of(ENGINE)
        assert orders.count("start") == 2
        assert orders[-1] == "start"


async def test_a_restart_that_the_loss_of_its_node_interrupts_is_answered(tmp_path: Path) -> None:
    planned = plan(decodes=2, nodes=2).model_copy(update={"on_node_loss": "degrade"})
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.held.add(("stop", "decode-0"))
        restart = deployment.ask(Restart(name="decode-0"))
        await deployment.until(lambda: ("stop", "decode-0") in deployment.orders)
        deployment.is_lost("host1")
        reply = await restart
        assert reply.exit_code == StateError.exit_code
        assert "the restart of decode-0 was interrupted" in reply.message


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("/status", Answered(id=0, status=200, body="{}")), ("/v1/completions", REFUSED)],
    ids=["attachment", "canary"],
)
async def test_an_engine_that_dies_before_it_is_proven_is_not_waited_for(
    tmp_path: Path, asked: str, answer: Answered
) -> None:
    """The proof itself would take an hour."""
    planned = plan_with_cache(attach_seconds=3600, canary_seconds=3600)
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.answers[asked] = answer
        restart = deployment.ask(Restart(name=ENGINE))
        await deployment.until(lambda: ("start", ENGINE) in deployment.orders)
        deployment.asked.clear()
        await deployment.until(lambda: any(asked in url for url in deployment.asked))
        deployment.dies(ENGINE)
        assert "did not come back: exited" in (await restart).message


async def test_one_that_dies_before_it_has_returned_to_its_cache_is_not_waited_for(tmp_path: Path) -> None:
    planned = plan_with_cache(restart="on-failure", attach_seconds=3600)
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.answers["/status"] = Answered(id=0, status=200, body="{}")
        deployment.asked.clear()
        deployment.dies("lmcache-0")
        await deployment.until(lambda: any("/status" in url for url in deployment.asked))
        deployment.dies(ENGINE)
        await deployment.until(lambda: ("start", ENGINE) in deployment.orders)
        deployment.answers.clear()
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders_of(ENGINE) == ["stop", "start"]


async def test_a_disk_that_is_full_for_a_moment_stops_nothing_and_the_record_catches_up(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(decodes=2)) as deployment:
        with no_room(0):
            deployment.dies("decode-1")
            await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
        await deployment.until(lambda: deployment.run_dir.read_state().processes["decode-1"].phase == "dead")
        assert deployment.state.phase == "degraded"


async def test_vllm_router_is_restarted_after_a_prefill_once_no_engine_is_dead(tmp_path: Path) -> None:
    """It has to know the new engine's id; and beside a dead engine it would wait for that one, and end."""
    roles = {"prefill": {"connector": kit.MOONCAKE}, "decode": {"connector": kit.MOONCAKE, "instances": 2}}
    planned = adapted(kit.plan(kit.recipe({"proxy": {"kind": "vllm-router"}}, roles)))
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.dies("decode-1")
        await deployment.until(lambda: deployment.phase("decode-1") == "dead")
        assert (await deployment.ask(Restart(name="prefill-0"))).exit_code == 0
        assert deployment.orders_of("proxy") == []
        assert (await deployment.ask(Restart(name="decode-1"))).exit_code == 0
        await deployment.until(lambda: deployment.orders_of("proxy") == ["stop", "start"])
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert (await deployment.ask(Restart(name="decode-0"))).exit_code == 0
        await deployment.looks()
        assert deployment.orders_of("proxy") == ["stop", "start"]


@pytest.mark.parametrize("steps", range(12))
async def test_a_death_that_comes_as_its_recovery_ends_begins_another_one(tmp_path: Path, steps: int) -> None:
    """Whatever of the recovery was done in the steps of the event loop between the two."""
    async with serving_deployment(tmp_path, plan()) as deployment:
        deployment.held.add(("start", "proxy"))
        deployment.dies("proxy")
        await deployment.until(lambda: ("start", "proxy") in deployment.orders)
        deployment.obey("start", "proxy")
        for _ in range(steps):
            await asyncio.sleep(0)
        deployment.dies("proxy")
        await deployment.until(lambda: deployment.orders_of("proxy").count("start") == 2)
        await deployment.until(lambda: deployment.phases() == {"ready"})


# A process is started only when its last life was stopped, whoever had begun to stop it -------------------------------


async def test_up_starts_a_dead_engine_when_what_was_left_of_it_is_gone(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(decodes=2)) as deployment:
        deployment.held.add(("stop", "decode-1"))
        deployment.dies("decode-1")
        await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
        reply = deployment.up(deployment.plan)
        await deployment.until(lambda: deployment.state.change == "under way")
        await deployment.looks()
        deployment.obey("stop", "decode-1")
        assert (await reply).message == "started decode-1; ready"
        assert deployment.orders == [("stop", "decode-1"), ("start", "decode-1")]
        assert deployment.state.phase == "ready"


async def test_up_finds_an_engine_that_a_restart_was_stopping_back(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(decodes=2)) as deployment:
        deployment.held.add(("stop", "decode-1"))
        restart = deployment.ask(Restart(name="decode-1"))
        await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
        reply = deployment.up(deployment.plan)
        await deployment.looks()
        deployment.obey("stop", "decode-1")
        assert (await restart).exit_code == 0
        assert (await reply).message == "already up"
        assert deployment.orders == [("stop", "decode-1"), ("start", "decode-1")]
        assert deployment.phases() == {"ready"}


def test_a_stop_is_ordered_again_if_it_is_to_be_over_sooner_or_its_agent_has_failed_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("pdserve.launch.fleet.time.monotonic", lambda: now)
    left = PendingStops()
    assert left.order_stop("decode-0", "here", 60, "stopped")
    assert not left.order_stop("decode-0", "here", 60, "stopped")
    assert left.order_stop("decode-0", "here", 30, "stopped")
    now = 131.0 + ANSWER_SECONDS
    assert left.order_stop("decode-0", "here", 30, "stopped")


def test_what_was_ordered_to_stop_twice_is_left_until_both_orders_are_answered() -> None:
    left = PendingStops()
    left.started("decode-0", "here")
    left.order_stop("decode-0", "here", 60, "dead")
    left.order_stop("decode-0", "here", 0, "stopped")
    assert left.stopped("decode-0") == "dead"
    assert "decode-0" in left
    assert left.stopped("decode-0") == "dead"
    assert "decode-0" not in left


def test_on_a_node_that_is_lost_nothing_is_waited_for() -> None:
    left = PendingStops()
    for name, node in (("decode-0", "lost"), ("decode-1", "here")):
        left.started(name, node)
        left.order_stop(name, node, 60, "stopped")
    left.lost("lost")
    assert ("decode-0" in left, left.is_stopping("decode-0")) == (False, False)
    assert ("decode-1" in left, left.is_stopping("decode-1")) == (True, True)


async def test_an_engine_that_no_kill_ends_is_started_again_when_it_is_gone(tmp_path: Path) -> None:
    """It waits for its device, which a second life would find taken."""
    async with serving_deployment(tmp_path, plan(decodes=2)) as deployment:
        deployment.unending.add("decode-1")
        deployment.dies("decode-1")
        await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
        assert "was not started: its last life was not stopped" in (await deployment.up(deployment.plan)).message
        assert ("start", "decode-1") not in deployment.orders
        deployment.unending.clear()
        assert (await deployment.up(deployment.plan)).exit_code == 0
        assert deployment.phases() == {"ready"}


# A loop that takes requests outlives each of its steps, and its log says what a step has raised


def torn() -> None:
    raise ValueError("embedded null byte")


def test_a_step_that_fails_is_logged_once_and_the_next_one_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[str] = []

    async def steps() -> None:
        loop = UnendingLoop()
        for step in (torn, torn, lambda: taken.append("next")):
            await loop.step(step)

    asyncio.run(steps())
    assert taken == ["next"]
    assert capsys.readouterr().err.count("ValueError: embedded null byte") == 1


# Instances that are several processes, over nodes or with a server for each rank, live and die as one


LEADER, FOLLOWER, RANK = "prefill-0", "prefill-0-node1", "prefill-0-rank1"


async def test_a_member_that_dies_while_the_others_load_ends_the_wait_for_them(tmp_path: Path) -> None:
    """The leader waits for its follower, for as long as an engine may take to load."""
    over_nodes = {"prefill": {"instances": 2, "parallel": {"nodes": 2, "tp": 2}}}
    planned = adapted(kit.plan(kit.recipe(kit.on_gpus(2, 1), over_nodes), *kit.hosts(2, 2, 2)), restart="on-failure")
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.held.add(("start", LEADER))
        deployment.dies(LEADER)
        await deployment.until(lambda: ("start", FOLLOWER) in deployment.orders)
        await deployment.until(lambda: deployment.phase(FOLLOWER) == "ready")
        deployment.orders.clear()
        deployment.held.add(("stop", LEADER))
        deployment.dies(FOLLOWER)
        await deployment.until(lambda: ("stop", LEADER) in deployment.orders)
        assert deployment.state.processes[LEADER].note == f"{FOLLOWER} exited"
        deployment.obey_all()
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders.count(("start", FOLLOWER)) == 1


def ranks(restart: str) -> Plan:
    """A prefill of two ranks with a server each, and one decode."""
    prefill = {"parallel": {"dp": 2, "load_balancing": "external"}}
    return adapted(kit.plan(kit.recipe(kit.on_gpus(), {"prefill": prefill}), *kit.hosts(4)), restart=restart)


def routing(deployment: Played, name: str) -> list[str]:
    """What the proxy was told of a worker."""
    return [event["routing"] for event in deployment.events if event["event"] == "route" and event["name"] == name]


async def test_a_rank_that_dies_takes_its_instance_out_and_all_of_it_comes_back(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, ranks("on-failure")) as deployment:
        deployment.dies(RANK)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        for name in (LEADER, RANK):
            assert deployment.orders_of(name) == ["stop", "start"]
            assert routing(deployment, name)[-3:] == ["dead", "starting", "ready"]


async def test_a_restart_or_the_death_of_one_rank_is_that_of_its_instance(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, ranks("never")) as deployment:
        assert (await deployment.ask(Restart(name=RANK))).exit_code == 0
        for name in (LEADER, RANK):
            assert deployment.orders_of(name) == ["stop", "start"]
            assert routing(deployment, name)[-3:] == ["draining", "starting", "ready"]
        deployment.dies(RANK)
        await deployment.over()
        assert isinstance(deployment.error, ServeError)
        assert deployment.error.where == f"{RANK}@host0"
