"""Session affinity: one session, one worker, as long as that is not too busy."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.routing.ask import Ask
from pdserve.pd.routing.build import make
from pdserve.pd.routing.policy import Policy
from pdserve.roles import EngineRole
from tests.proxy.candidates import PolicyName, Worker, everywhere, workers


def affinity(policy: PolicyName = "round_robin", role: EngineRole = "decode") -> Policy:
    return make(everywhere(policy, affinity=True), role, Random(1))


def ask(session: str | None, prompt: bytes = b"x" * 1024) -> Ask:
    return Ask(prompt=prompt, estimate=len(prompt) // 4, session=session)


def homes(policy: Policy, pool: list[Worker], sessions: int = 400) -> dict[str, str]:
    return {f"s{n}": policy.choose(pool, ask(f"s{n}")).worker.name for n in range(sessions)}


@given(session=st.text(), order=st.permutations(range(5)))
def test_a_session_stays(session: str, order: list[int]) -> None:
    pool = workers(5)
    home = affinity().choose(pool, ask(session)).worker
    policy = affinity()
    for _ in range(3):
        choice = policy.choose([pool[index] for index in order], ask(session))
        assert (choice.worker, choice.why) == (home, "session")


def test_without_a_session_the_inner_policy_decides() -> None:
    chosen = [affinity().choose(workers(3), ask(None)) for _ in range(3)]
    assert {choice.why for choice in chosen} == {"turn"}


def test_sessions_are_spread() -> None:
    turns = Counter(homes(affinity(), workers(4)).values())
    assert len(turns) == 4
    assert min(turns.values()) > 60, turns


def test_only_the_sessions_of_a_worker_that_left_move_and_they_come_back() -> None:
    policy, pool = affinity(), workers(4)
    before = homes(policy, pool)
    without = homes(policy, pool[1:])
    assert {s for s in before if before[s] != without[s]} == {s for s in before if before[s] == pool[0].name}
    assert len({without[s] for s in before if before[s] == pool[0].name}) == 3, "spread over all that are left"
    assert homes(policy, pool) == before


def test_a_busy_home_is_left_for_the_same_other_until_it_is_calm() -> None:
    policy, pool = affinity(), workers(4)
    home = policy.choose(pool, ask("s")).worker
    home.requests = 9
    spilled = [policy.choose(pool, ask("s")) for _ in range(5)]
    assert {choice.why for choice in spilled} == {"session_spilled"}
    assert len({choice.worker.name for choice in spilled}) == 1
    assert spilled[0].worker is not home
    home.requests = 8
    assert policy.choose(pool, ask("s")).worker is home


def test_a_hot_session_alone_cannot_overload_a_worker() -> None:
    policy, pool = affinity(), workers(4)
    for _ in range(100):
        policy.choose(pool, ask("the only one")).worker.requests += 1
    calmest, busiest = min(w.requests for w in pool), max(w.requests for w in pool)
    assert busiest <= 1.5 * calmest + 8 + 1


def test_the_inner_policy_learns_where_sessions_went() -> None:
    policy, pool = affinity("prefix_aware", "prefill"), workers(4)
    prompt = b"conversation " * 100
    home = policy.choose(pool, ask("s", prompt)).worker
    policy.routed(home, ask("s", prompt))
    assert policy.matched(home, ask(None, prompt)) > 0
    assert policy.choose(pool, ask(None, prompt)).worker is home
    policy.forget(home.name)
    assert policy.matched(home, ask(None, prompt)) == 0


@pytest.mark.process
def test_every_proxy_process_agrees() -> None:
    code = (
        "from tests.proxy.test_routing_affinity import *; print(*homes(affinity(), workers(5), 50).values(), sep=',')"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert answers == {",".join(homes(affinity(), workers(5), 50).values()) + "\n"}
