"""What round_robin, least_loaded and power_of_two promise, and what all policies do."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RecipeError
from pdserve.pd.config.routing import LoadSettings, RoutingSettings
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.build import kv_events_of, make
from pdserve.pd.routing.burden import Burden
from pdserve.roles import EngineRole
from tests.proxy.candidates import POLICIES, PolicyName, Worker, everywhere, workers
from tests.proxy.rows import each

ROLES: list[EngineRole] = ["prefill", "decode", "aggregated"]
ASK = RoutingRequest(prompt=b'[{"role":"user","content":"hello"}]', tokens=[1, 2, 3], estimate=3)

loads = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9_000), st.floats(0, 1)), min_size=1, max_size=8).map(
    lambda drawn: [Worker(f"w{i}", *figures) for i, figures in enumerate(drawn)]
)


@each("policy", POLICIES)
@each("affinity", [False, True])
@given(candidates=loads, role=st.sampled_from(ROLES), session=st.none() | st.text(), seed=st.integers(0, 99))
def test_a_choice_is_one_of_the_candidates_and_has_a_reason_of_the_policy(
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


@each("policy", POLICIES)
@each("role", ROLES)
@each("count", [1, 2, 3, 8])
def test_at_rest_every_candidate_is_chosen_in_time(policy: PolicyName, role: EngineRole, count: int) -> None:
    made = make(everywhere(policy), role, Random(1))
    pool = workers(count)
    assert {made.choose(pool, ASK).worker.name for _ in range(40 * count)} == {worker.name for worker in pool}


@each("policy", POLICIES)
@each("prefills, decodes", [(1, 1), (2, 2), (4, 2), (2, 4), (3, 3), (4, 4), (6, 4)])
def test_at_rest_every_pair_has_its_turn(policy: PolicyName, prefills: int, decodes: int) -> None:
    """Two pools in step only ever form the pairs (0, 0) and (1, 1)."""
    random = Random(7)
    prefill, decode = make(everywhere(policy), "prefill", random), make(everywhere(policy), "decode", random)
    ps, ds = workers(prefills, "prefill"), workers(decodes, "decode")
    rounds = 60 * prefills * decodes
    pairs = Counter((prefill.choose(ps, ASK).worker.name, decode.choose(ds, ASK).worker.name) for _ in range(rounds))
    assert set(pairs) == {(p.name, d.name) for p, d in product(ps, ds)}


@each("role", ROLES)
@given(count=st.integers(1, 8), rounds=st.integers(1, 20))
def test_round_robin_gives_each_worker_one_turn_a_round(role: EngineRole, count: int, rounds: int) -> None:
    made = make(everywhere("round_robin"), role, Random(count))
    pool = workers(count)
    for _ in range(rounds):
        assert len({made.choose(pool, ASK).worker.name for _ in range(count)}) == count


def test_round_robin_of_prefill_keeps_one_order() -> None:
    made = make(everywhere("round_robin"), "prefill", Random(1))
    assert [made.choose(workers(3), ASK).worker.name[-1] for _ in range(7)] == list("0120120")


@each("role", ROLES)
def test_who_was_away_does_not_get_the_turns_that_it_missed(role: EngineRole) -> None:
    made = make(everywhere("round_robin"), role, Random(3))
    pool = workers(3)
    made.choose(pool, ASK)
    for _ in range(100):
        made.choose(pool[:2], ASK)
    turns = Counter(made.choose(pool, ASK).worker.name for _ in range(30))
    assert max(turns.values()) - min(turns.values()) <= 2, "the count begins and ends within a round"


@given(candidates=loads)
def test_least_loaded_prefill_has_fewest_prompt_tokens_then_fewest_requests(candidates: list[Worker]) -> None:
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


def test_decode_with_a_fuller_cache_gets_fewer_streams() -> None:
    full, empty = Worker("full", requests=4, kv_usage=0.9), Worker("empty", requests=20, kv_usage=0.1)
    assert make(everywhere("least_loaded"), "decode").choose([full, empty], ASK).worker is empty


@each("role", ROLES)
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
def test_power_of_two_never_takes_the_one_that_is_busier_than_all_others(
    candidates: list[Worker], role: EngineRole, seed: int
) -> None:
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


@each("policy", POLICIES)
@each("affinity", [False, True])
def test_a_policy_is_called_what_the_recipe_calls_it(policy: PolicyName, affinity: bool) -> None:
    made = make(everywhere(policy, affinity=affinity), "decode")
    assert made.name == policy
    assert made.needs_tokens == (policy == "kv_events")
    assert (kv_events_of(made) is not None) == (policy == "kv_events")


def test_an_unknown_policy_is_an_error_that_names_those_that_exist() -> None:
    unknown = RoutingSettings().model_copy(update={"decode": LoadSettings()})
    with pytest.raises(RecipeError) as caught:
        make(unknown, "decode")
    assert caught.value.where == "proxy.routing.decode"
    assert caught.value.todo == f"write one of {', '.join(POLICIES)}"


def test_the_bounds_of_a_burden() -> None:
    """Of equals the first is the calmest. Each bound is of the last load that is not too much."""
    pool = [Worker("a", requests=1), Worker("b"), Worker("c")]
    assert [Burden(role, LoadSettings(), Random(1)).calmest(pool) for role in ROLES] == [1, 1, 1]
    settings = LoadSettings(slack_tokens=100, slack_requests=8, slack_ratio=1.5, max_kv_usage=0.9)
    idle = Worker("idle", requests=2)
    wrong = []
    for role, requests, tokens, kv, least_kv, busy in (
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
    ):
        idle.kv_usage = least_kv
        if Burden(role, settings, Random(1)).too_busy(Worker("w", requests, tokens, kv), idle, saved=10) != busy:
            wrong.append((role, requests, tokens, kv, least_kv))
    assert wrong == []
