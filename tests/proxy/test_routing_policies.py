"""What round_robin, least_loaded and power_of_two promise, and what all policies do."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.config.routing import ConditionalSettings, LoadSettings
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.build import kv_events_of, make
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.conditional import decide
from pdserve.pd.routing.policy import Policy
from pdserve.roles import EngineRole
from tests.proxy.candidates import POLICIES, PolicyName, Worker, everywhere, workers
from tests.tables import each_row

ROLES: list[EngineRole] = ["prefill", "decode", "aggregated"]
ASK = RoutingRequest(prompt=b'[{"role":"user","content":"hello"}]', tokens=[1, 2, 3], estimate=3)

loads = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9_000), st.floats(0, 1)), min_size=1, max_size=8).map(
    lambda drawn: [Worker(f"w{i}", *figures) for i, figures in enumerate(drawn)]
)


@each_row("policy", POLICIES)
@each_row("affinity", [False, True])
@given(candidates=loads, role=st.sampled_from(ROLES), session=st.none() | st.text(), seed=st.integers(0, 99))
def test_a_choice_is_a_candidate_with_a_known_reason(
    policy: PolicyName, affinity: bool, candidates: list[Worker], role: EngineRole, session: str | None, seed: int
) -> None:
    made = make(everywhere(policy, affinity=affinity), role, Random(seed))
    ask = RoutingRequest(prompt=b"x" * 600, tokens=[1] * 150, estimate=150, session=session)
    for _ in range(3):
        choice = made.choose(candidates, ask)
        assert choice.worker in candidates
        assert choice.why in made.reasons
        made.routed(choice.worker, ask)
        assert 0 <= made.matched(choice.worker, ask) <= ask.estimate
        made.forget(choice.worker.name)
        assert made.matched(choice.worker, ask) == 0


@each_row("policy", POLICIES)
@each_row("role", ROLES)
@each_row("count", [1, 2, 3, 8])
def test_at_rest_every_candidate_is_chosen_in_time(policy: PolicyName, role: EngineRole, count: int) -> None:
    made = make(everywhere(policy), role, Random(1))
    pool = workers(count)
    assert {made.choose(pool, ASK).worker.name for _ in range(40 * count)} == {worker.name for worker in pool}


@each_row("policy", POLICIES)
@each_row("prefills, decodes", [(1, 1), (2, 2), (4, 2), (2, 4), (3, 3), (4, 4), (6, 4)])
def test_at_rest_every_pair_has_its_turn(policy: PolicyName, prefills: int, decodes: int) -> None:
    """Two pools in step only ever form the pairs (0, 0) and (1, 1)."""
    random = Random(7)
    prefill, decode = make(everywhere(policy), "prefill", random), make(everywhere(policy), "decode", random)
    ps, ds = workers(prefills, "prefill"), workers(decodes, "decode")
    rounds = 60 * prefills * decodes
    pairs = Counter((prefill.choose(ps, ASK).worker.name, decode.choose(ds, ASK).worker.name) for _ in range(rounds))
    assert set(pairs) == {(p.name, d.name) for p, d in product(ps, ds)}


@each_row("role", ROLES)
@given(count=st.integers(1, 8), rounds=st.integers(1, 20))
def test_round_robin_gives_each_worker_one_turn_a_round(role: EngineRole, count: int, rounds: int) -> None:
    made = make(everywhere("round_robin"), role, Random(count))
    pool = workers(count)
    for _ in range(rounds):
        assert len({made.choose(pool, ASK).worker.name for _ in range(count)}) == count


@each_row("role", ROLES)
def test_who_was_away_does_not_get_the_turns_that_it_missed(role: EngineRole) -> None:
    made = make(everywhere("round_robin"), role, Random(3))
    pool = workers(3)
    made.choose(pool, ASK)
    for _ in range(100):
        made.choose(pool[:2], ASK)
    turns = Counter(made.choose(pool, ASK).worker.name for _ in range(30))
    assert max(turns.values()) - min(turns.values()) <= 2, "the count begins and ends within a round"


@given(candidates=loads)
def test_least_loaded_prefill_has_fewest_prompt_tokens(candidates: list[Worker]) -> None:
    choice = make(everywhere("least_loaded"), "prefill", Random(1)).choose(candidates, ASK)
    assert (choice.worker.prompt_tokens, choice.worker.requests) == min(
        (worker.prompt_tokens, worker.requests) for worker in candidates
    )


@given(candidates=loads)
def test_least_loaded_decode_has_fewest_streams_and_kv(candidates: list[Worker]) -> None:
    """A full KV cache counts as 32 streams."""
    choice = make(everywhere("least_loaded"), "decode", Random(1)).choose(candidates, ASK)
    assert choice.worker.requests + int(32 * choice.worker.kv_usage) == min(
        worker.requests + int(32 * worker.kv_usage) for worker in candidates
    )


@each_row("role", ROLES)
def test_a_burst_is_split_evenly(role: EngineRole) -> None:
    """24 requests over two workers are 12 and 12, not 13 and 11."""
    made = make(everywhere("least_loaded"), role, Random(5))
    pool = workers(2)
    for _ in range(24):
        chosen = made.choose(pool, ASK).worker
        chosen.requests += 1
        chosen.prompt_tokens += 100
    assert [worker.requests for worker in pool] == [12, 12]


@given(candidates=loads, role=st.sampled_from(ROLES), seed=st.integers(0, 20))
def test_power_of_two_never_takes_the_busiest(candidates: list[Worker], role: EngineRole, seed: int) -> None:
    for worker in candidates:
        worker.prompt_tokens, worker.requests = 10, 10
        worker.kv_usage = 0.0
    candidates[0].prompt_tokens = candidates[0].requests = 11
    made = make(everywhere("power_of_two"), role, Random(seed))
    chosen = {made.choose(candidates, ASK).worker.name for _ in range(30)}
    assert (candidates[0].name in chosen) == (len(candidates) == 1)


def test_power_of_two_is_not_least_loaded() -> None:
    """The least of eight is among two drawn in a quarter of all draws."""
    pool = [Worker(f"w{index}", requests=index, prompt_tokens=index) for index in range(8)]
    made = make(everywhere("power_of_two"), "decode", Random(2))
    turns = Counter(made.choose(pool, ASK).worker.name for _ in range(2000))
    assert 400 < turns["w0"] < 600
    assert set(turns) == {f"w{index}" for index in range(7)}


@each_row("policy", POLICIES)
@each_row("affinity", [False, True])
def test_a_policy_is_called_what_the_recipe_calls_it(policy: PolicyName, affinity: bool) -> None:
    made = make(everywhere(policy, affinity=affinity), "decode")
    assert made.name == policy
    assert made.needs_tokens == (policy == "kv_events")
    assert (kv_events_of(made) is not None) == (policy == "kv_events")


def test_the_bounds_of_a_burden() -> None:
    """Of equals the first is the calmest. Each bound is of the last load that is not too much."""
    pool = [Worker("a", requests=1), Worker("b"), Worker("c")]
    assert [Burden(role, LoadSettings(), Random(1)).calmest(pool) for role in ROLES] == [1, 1, 1]
    settings = LoadSettings(slack_tokens=100, slack_requests=8, slack_ratio=1.5, max_kv_usage=0.9)
    idle = Worker("idle", requests=2)
    wrong = []
    cases: list[tuple[EngineRole, int, int, float, float, bool]] = [
        ("aggregated", 0, 110, 0.0, 0.0, False),
        ("aggregated", 0, 111, 0.0, 0.0, True),
        ("prefill", 99, 110, 1.0, 0.0, False),
        ("prefill", 0, 111, 0.0, 0.0, True),
        ("decode", 11, 999, 0.0, 0.0, False),
        ("decode", 12, 0, 0.0, 0.0, True),
        ("aggregated", 12, 0, 0.0, 0.0, True),
        ("decode", 0, 0, 0.9, 0.89, True),
        ("decode", 0, 0, 0.9, 0.9, False),
        ("decode", 0, 0, 0.89, 0.0, False),
    ]
    for role, requests, tokens, kv, least_kv, busy in cases:
        idle.kv_usage = least_kv
        if Burden(role, settings, Random(1)).too_busy(Worker("w", requests, tokens, kv), idle, saved=10) != busy:
            wrong.append((role, requests, tokens, kv, least_kv))
    assert wrong == []


# --- session affinity: one session, one worker, as long as that is not too busy


def affinity(policy: PolicyName = "round_robin", role: EngineRole = "decode") -> Policy:
    return make(everywhere(policy, affinity=True), role, Random(1))


def ask(session: str | None, prompt: bytes = b"x" * 1024) -> RoutingRequest:
    return RoutingRequest(prompt=prompt, estimate=len(prompt) // 4, session=session)


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
    assert policy.choose(pool, ask(None)).why == "turn"


def test_only_sessions_of_a_worker_that_left_move() -> None:
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
        "from tests.proxy.test_routing_policies import *; print(*homes(affinity(), workers(5), 50).values(), sep=',')"
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


# --- conditional disaggregation: which prompts decode computes itself


def limits(min_prompt: int, max_missing: int) -> ConditionalSettings:
    """0: there is none."""
    return ConditionalSettings(min_prompt_tokens=min_prompt or None, max_missing_tokens=max_missing or None)


@each_row(
    "estimate, held, min_prompt, max_missing, way, why",
    [
        (10, 0, 0, 0, "disaggregate", "off"),
        (10, 10, 0, 0, "disaggregate", "off"),
        (99, 0, 100, 0, "decode-only", "short"),
        (100, 0, 100, 0, "disaggregate", "long"),
        (5000, 4500, 0, 500, "decode-only", "held"),
        (5000, 4499, 0, 500, "disaggregate", "long"),
        (400, 0, 0, 500, "disaggregate", "long"),  # nothing of it is held
        (400, 16, 0, 500, "decode-only", "held"),
        (50, 48, 100, 500, "decode-only", "short"),
        (5000, 5000, 100, 500, "decode-only", "held"),
    ],
)
def test_table(estimate: int, held: int, min_prompt: int, max_missing: int, way: str, why: str) -> None:
    decision = decide(estimate, held, limits(min_prompt, max_missing))
    assert (decision.way, decision.why) == (way, why)
