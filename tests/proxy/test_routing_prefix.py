"""prefix_aware: who was sent the beginning of a prompt gets the rest of the conversation."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.config.routing import LoadSettings
from pdserve.pd.config.routing import PrefixAwareSettings as PrefixSettings
from pdserve.pd.routing import block_hash
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.block_hash import SECRET, digest_without_xxhash
from pdserve.pd.routing.build import make
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.chain import FINE_BYTES, ROOT, Chain, GrowingChain
from pdserve.pd.routing.policies import PrefixAware, RecentBlocks
from pdserve.roles import EngineRole
from tests.proxy.candidates import Worker, everywhere, workers
from tests.proxy.deployment import Deployment
from tests.tables import each_row

ROLES: list[EngineRole] = ["prefill", "decode", "aggregated"]


def ask(prompt: bytes) -> RoutingRequest:
    return RoutingRequest(prompt=prompt, estimate=len(prompt) // 4)


def prefix_aware(role: EngineRole = "prefill", **settings: float) -> PrefixAware:
    burden = Burden(role, LoadSettings(), Random(1))
    return PrefixAware(burden, PrefixSettings(**settings))  # type: ignore[arg-type]  # each is an int or a float


@each_row("role", ROLES)
def test_a_conversation_stays_where_it_began(role: EngineRole) -> None:
    policy = make(everywhere("prefix_aware"), role, Random(1))
    pool = workers(4)
    prompts = [bytes(f"conversation {number} ", "ascii") * 60 for number in range(8)]
    homes = []
    for prompt in prompts:
        first = policy.choose(pool, ask(prompt))
        assert first.why == "no_match"
        policy.routed(first.worker, ask(prompt))
        homes.append(first.worker)
    for turn in range(1, 4):
        for prompt, home in zip(prompts, homes, strict=True):
            longer = ask(prompt + b"and then some more text " * 20 * turn)
            choice = policy.choose(pool, longer)
            assert (choice.worker, choice.why) == (home, "match")
            policy.routed(choice.worker, longer)


def test_a_system_prompt_that_all_share_does_not_draw_all_sessions() -> None:
    """Below min_match_ratio of the prompt it belongs to no worker."""
    policy, pool = prefix_aware(), workers(2)
    policy.routed(pool[0], ask(b"s" * 1024 + b"1" * 4096))
    chosen = [policy.choose(pool, ask(b"s" * 1024 + bytes([65 + n]) * 4096)) for n in range(10)]
    assert {choice.why for choice in chosen} == {"no_match"}
    assert {choice.worker.name for choice in chosen} == {"worker-0", "worker-1"}


def test_an_overloaded_prefill_loses_the_prompt_that_it_holds() -> None:
    """Once waiting there costs more tokens than its cache saves, and slack_tokens."""
    policy, (holder, idle) = prefix_aware(), workers(2)
    prompt = ask(b"p" * 4096)
    policy.routed(holder, prompt)
    holder.prompt_tokens = 4096 + 1024
    assert policy.choose([holder, idle], prompt).why == "match"
    holder.prompt_tokens += 1
    choice = policy.choose([holder, idle], prompt)
    assert (choice.worker, choice.why) == (idle, "overloaded")


def test_an_overloaded_decode_loses_the_prompt_that_it_holds() -> None:
    policy, (holder, other) = prefix_aware("decode"), workers(2)
    prompt = ask(b"p" * 4096)
    policy.routed(holder, prompt)
    holder.requests, other.requests = 8 + 15, 10
    assert policy.choose([holder, other], prompt).worker is holder
    holder.requests += 1
    choice = policy.choose([holder, other], prompt)
    assert (choice.worker, choice.why) == (other, "overloaded")
    holder.requests, holder.kv_usage = 1, 0.95
    assert policy.choose([holder, other], prompt).why == "overloaded"
    other.kv_usage = 0.96
    assert policy.choose([holder, other], prompt).why == "match", "the other is no better"


def test_of_equal_holders_the_least_loaded_and_one_that_is_forgotten_holds_nothing() -> None:
    policy, (first, other, empty) = prefix_aware(), workers(3)
    prompt = ask(b"p" * 4096)
    for worker in (first, other):
        policy.routed(worker, prompt)
    first.prompt_tokens = 10
    choice = policy.choose([first, other, empty], prompt)
    assert (choice.worker, choice.why) == (other, "match")
    policy.forget(other.name)
    assert policy.matched(other, prompt) == 0
    assert policy.choose([first, other, empty], prompt).worker is first


def test_a_prompt_shorter_than_a_block_matches_no_worker() -> None:
    policy, pool = prefix_aware(), workers(2)
    policy.routed(pool[0], ask(b"hello"))
    assert policy.choose(pool, ask(b"hello")).why == "no_match"
    assert policy.choose(pool, ask(b"")).why == "no_match"


def test_ends_are_forgotten_before_beginnings() -> None:
    policy, (worker,) = prefix_aware(max_blocks=8, block_bytes=16), workers(1)
    policy.routed(worker, ask(b"a" * 16 * 6))
    policy.routed(worker, ask(b"b" * 16 * 4))
    assert policy.matched(worker, ask(b"a" * 16 * 6)) == 4 * 16 // 4
    assert policy.matched(worker, ask(b"b" * 16 * 4)) == 4 * 16 // 4


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=40),
    most=st.integers(1, 30),
)
def test_recent_blocks_have_none_without_those_before_it(prompts: list[list[int]], most: int) -> None:
    """And the last prompt, as much of it as fits into a half. A block is named by all up to it."""
    recent = RecentBlocks(most)
    seen: dict[int, list[int]] = {}
    for prompt in prompts:
        names = [hash(tuple(prompt[: end + 1])) for end in range(len(prompt))]
        seen |= {name: names[:place] for place, name in enumerate(names)}
        recent.use(names)
        assert all(name in recent for name in names[: max(1, most // 2)])
        assert len(recent) == sum(name in recent for name in seen) <= most
        assert all(before in recent for name, those in seen.items() if name in recent for before in those)


texts = st.binary(max_size=200) | st.text("ab", max_size=200).map(str.encode)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["w0", "w1"]), texts), max_size=30), asked=texts, block=st.integers(1, 9)
)
def test_it_is_a_longest_common_prefix_in_whole_blocks(
    steps: list[tuple[str, bytes]], asked: bytes, block: int
) -> None:
    """As long as nothing was forgotten."""
    policy = prefix_aware(block_bytes=block)
    for name, prompt in steps:
        policy.routed(Worker(name), ask(prompt))
    for name in ("w0", "w1"):
        longest = max((common(prompt, asked, block) for who, prompt in steps if who == name), default=0)
        estimate = 1_000 * len(asked)
        assert policy.matched(Worker(name), RoutingRequest(prompt=asked, estimate=estimate)) == 1_000 * longest


def common(first: bytes, other: bytes, block: int) -> int:
    blocks = 0
    while (end := (blocks + 1) * block) <= min(len(first), len(other)) and first[:end] == other[:end]:
        blocks += 1
    return blocks * block


@given(data=st.binary(max_size=2000), size=st.integers(1, 20), asks=st.lists(st.integers(0, 300), max_size=5))
def test_a_chain_is_the_same_in_whatever_steps_it_is_asked_for(data: bytes, size: int, asks: list[int]) -> None:
    whole = Chain(data, size).first(len(data))
    assert len(whole) == len(data) // size
    stepwise = Chain(data, size)
    for count in asks:
        assert stepwise.first(count) == whole[:count]
        assert stepwise.held(set(whole[:count])) >= min(count, len(whole))
    assert stepwise.held(frozenset(whole)) == len(whole)


lengths = st.integers(0, 20_000) | st.integers(0, 300)


@given(seed=st.integers(0, 9), sent=lengths, more=lengths, size=st.integers(1, 300))
def test_what_goes_on_is_known_to_the_size_of_a_block(seed: int, sent: int, more: int, size: int) -> None:
    data = Random(seed).randbytes(sent + more)
    known = frozenset(GrowingChain(data[:sent], size).names)
    assert GrowingChain(data, size).held(known) == sent // size * size
    assert GrowingChain(data[:sent], size).held(known) == sent // size * size


@given(seed=st.integers(0, 9), same=lengths, ends=st.tuples(lengths, lengths), size=st.integers(1, 300))
def test_where_two_part_is_known_to_an_eighth(seed: int, same: int, ends: tuple[int, int], size: int) -> None:
    data, one, other = (Random(seed + number).randbytes(length) for number, length in enumerate((same, *ends)))
    chain = GrowingChain(data + b"1" + one, size)
    held = chain.held(frozenset(GrowingChain(data + b"2" + other, size).names))
    assert same - max(size, same // 8) < held <= same
    assert held >= min(same, FINE_BYTES - size) // size * size, "in the beginning all blocks are small"


@given(seed=st.integers(0, 9), sent=lengths, less=lengths, size=st.integers(1, 300))
def test_a_shorter_one_is_known_to_an_eighth(seed: int, sent: int, less: int, size: int) -> None:
    data = Random(seed).randbytes(sent)
    shorter = data[: max(0, sent - less)]
    held = GrowingChain(shorter, size).held(frozenset(GrowingChain(data, size).names))
    assert len(shorter) - max(size, len(shorter) // 8) < held <= len(shorter)


def test_a_long_prompt_has_few_blocks() -> None:
    data = Random(4).randbytes(1_000_000)
    assert [len(GrowingChain(data[:length], 256).names) for length in (1024, 100_000, 1_000_000)] == [4, 54, 81]


def test_a_long_conversation_is_known_to_its_end() -> None:
    policy, (worker,) = prefix_aware(), workers(1)
    prompt = Random(4).randbytes(1_000_000)
    policy.routed(worker, ask(prompt))
    longer = ask(prompt + b"and more" * 1000)
    assert 1_000_000 - 4096 < 4 * policy.matched(worker, longer) <= 1_000_000
    assert policy.blocks < 500


# --- how a block of a prompt gets its name, with xxhash and without


Digest = Callable[[bytes, int, int, int], int]

SMALL = b"You are a helpful assistant."
LARGE = SMALL * 100


def digest(data: bytes, begin: int, end: int, before: int) -> int:
    return block_hash.digest(data, memoryview(data), begin, end, before)


WITHOUT = """
import sys
sys.modules["xxhash"] = None
from pdserve.pd.routing.block_hash import digest, digest_without_xxhash
text = b"You are a helpful assistant." * 100
assert digest(text, memoryview(text), 7, 2000, 3) == digest_without_xxhash(text, 7, 2000, 3)
"""


@pytest.mark.process
def test_without_it_python_hashes() -> None:
    """In a process of its own: what a module has at its beginning stays, where it is compiled."""
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


@each_row("name_of", [digest, digest_without_xxhash])
@each_row("text", [SMALL, LARGE])
def test_a_name_depends_on_each_byte_and_on_what_is_before_wherever_they_are(text: bytes, name_of: Digest) -> None:
    name = name_of(text, 0, len(text), SECRET)
    assert name_of(b"{" + text + b"}", 1, 1 + len(text), SECRET) == name
    assert name not in (name_of(text[:-1] + b"!", 0, len(text), SECRET), name_of(text, 0, len(text), name))


def test_the_names_of_a_prompt_begin_with_the_secret() -> None:
    assert GrowingChain(LARGE, 256).names[0] == digest(LARGE, 0, 256, SECRET) != digest(LARGE, 0, 256, ROOT)


# --- a prompt with another cache_salt is another prompt to prefix-aware routing: engines share no KV between them


PROMPT = "The quick brown fox jumps over the lazy dog. " * 40
LONG = "s" * 5000


def reasons(deployment: Deployment) -> Mapping[str, int]:
    """Why prefills were chosen, and how often."""
    page = deployment.proxy.http.get("/metrics").text
    line = r'^pdserve_proxy_routing_decisions_total\{(?=[^}]*role="prefill")[^}]*why="(\w+)"[^}]*\} (\d+)'
    return {why: int(float(count)) for why, count in re.findall(line, page, re.MULTILINE)}


def test_only_the_same_prompt_with_the_same_salt_matches(deployment: Deployment) -> None:
    deployment.up(prefills=2, routing={"prefill": {"kind": "prefix_aware"}})
    seen: list[str] = []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": LONG + "1"}, {"cache_salt": LONG + "2"}):
        for _ in range(2):
            before = reasons(deployment)
            assert deployment.complete(PROMPT, **salt).status_code == 200
            now = reasons(deployment)
            seen += [why for why, count in now.items() if count > before.get(why, 0)]
    assert seen == ["no_match", "match"] * 5
    assert deployment.complete(PROMPT, cache_salt=None).status_code == 200
    assert reasons(deployment) == {"no_match": 5, "match": 6}, "what is no text is no salt"
