"""A load of external KV that hangs is given up, and no other request gets its blocks before the transfer has ended."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import StartError
from pdserve.patches.patch import in_range
from pdserve.patches.scheduler import failed_group, load_timeout, ready_waiters_first, stale_completions
from pdserve.patches.scheduler.load_timeout import ATTRIBUTE, NAME, SETTING, LoadTimeout
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, all_hold, count, on

if IN_RELEASE:
    from tests.upstream.lmcache_engine import THEIRS, Engine, leaf, workloads
    from tests.upstream.scheduler_lab import Lab, mock

SECONDS = 3.0
PROMPT = 96
LOADED = {"mock": {"matched": 80}}
SAVED = {"mock": {"matched": 80, "delay_free": True}}
WORKLOADS = 15


class Bench:
    """A lab whose clock stands still until it is told to go on. Without the patch the clock moves nothing."""

    def __init__(self, **lab: Any) -> None:
        self.lab = Lab(**{"connector": mock(load_timeout_seconds=SECONDS), **lab})
        self.now = 100.0
        if (timeout := getattr(self.lab.scheduler, ATTRIBUTE, None)) is not None:
            timeout.clock = lambda: self.now
        self._free_at_start = self.lab.free_blocks
        self._before = {effect: count(NAME, effect) for effect in ("loads-given-up", "late-ends")}

    def hang(self, name: str = "a", params: dict[str, Any] = LOADED, **request: Any) -> list[int]:
        """A request whose load is started and does not end. The blocks that it has got for it."""
        self.lab.add(name, request.pop("tokens", PROMPT), params, **request)
        self.lab.step()
        return self.lab.blocks(name)

    def give_up(self, seconds: float = SECONDS) -> None:
        """Lets a step see the load, then time pass, then a step see that."""
        self.lab.step()
        self.now += seconds
        self.lab.step()

    def end(self, name: str = "a", **report: Any) -> None:
        """The transfer ends."""
        self.lab.step(finished_recving={name}, **report)

    def steps(self, limit: int = 40) -> int:
        """Steps until all requests are finished, at most `limit`."""
        for taken in range(limit):
            if not self.lab.busy:
                return taken
            self.lab.step()
        return limit

    def tokens(self, *names: str) -> list[int]:
        return [len(self.lab.outputs.get(name, [])) for name in names or ("a",)]

    def count(self, effect: str) -> float:
        return count(NAME, effect) - self._before[effect]

    @property
    def missing(self) -> int:
        """Blocks."""
        return self._free_at_start - self.lab.free_blocks


def quarantined() -> float:
    return count(NAME, "quarantined-blocks")


def apply(*, guard_first: bool) -> None:
    """The guard against stale completions wraps the same path."""
    ours = [load_timeout, ready_waiters_first, failed_group]
    for each in [stale_completions, *ours] if guard_first else [*ours, stale_completions]:
        if in_range(IN_RELEASE, each.PATCH.vllm):
            each.PATCH.apply()


def hanging() -> None:
    """It computes in fresh blocks; the old ones stay in quarantine until the connector reports the end."""
    bench = Bench()
    lab, old = bench.lab, bench.hang()
    bench.give_up(SECONDS - 0.1)
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"
    bench.now += 0.1
    lab.step()
    assert not set(old) & set(lab.blocks("a"))
    bench.steps()
    assert (lab.status("a"), bench.tokens(), bench.count("loads-given-up")) == ("GONE", [4], 1)
    assert lab.book.polls["a"] == 1, "the connector is not asked for the load again"
    assert quarantined() == bench.missing == 5
    hashed = [block for block in old if lab.pool.blocks[block].block_hash is not None]
    assert hashed == [], "what was never written is no cache hit"
    lab.step()
    assert lab.scheduler.has_requests(), "an engine that sleeps does not hear of the end"
    bench.end()
    assert (bench.count("late-ends"), quarantined(), bench.missing) == (1, 0, 0)
    assert any("a" in received for received, _ in lab.book.outputs), "the connector hears of it"
    assert not lab.scheduler.has_requests()


def shared_prefix() -> None:
    """The first two blocks are another's, who lives on: they stay its own, and are used."""
    bench, prefix = Bench(), list(range(32))
    lab = bench.lab
    lab.add("owner", prefix + list(range(500, 516)), max_tokens=30)
    lab.step()
    lab.step()
    old = bench.hang(tokens=prefix + list(range(700, 764)))
    owner = lab.blocks("owner")[:2]
    bench.give_up()
    new = lab.blocks("a")
    assert old[:2] == new[:2] == owner
    assert not set(old[2:]) & set(new)
    bench.end()
    assert [lab.pool.blocks[block].ref_cnt for block in owner] == [2, 2]
    bench.steps()
    assert (sum(bench.tokens("owner", "a")), bench.missing) == (34, 0)


def saving() -> None:
    """The request finishes, and its blocks are still being saved when the load ends."""
    bench = Bench()
    old = bench.hang(params=SAVED)
    bench.give_up()
    bench.steps()
    saved = bench.missing - len(old)
    bench.end()
    assert bench.missing == saved > 0
    bench.lab.step(finished_sending={"a"})
    assert (bench.missing, bench.lab.status("a")) == (0, "GONE")


def aborted_while_loading() -> None:
    """Nothing was given up; the ends of the load and of the save of an aborted request come in one step."""
    bench = Bench()
    bench.hang(params=SAVED)
    bench.lab.abort("a")
    bench.end(finished_sending={"a"})
    assert (bench.missing, bench.lab.status("a")) == (0, "GONE")


def reported_again_with_the_send() -> None:
    """The load of a request that has ended is reported again, together with the end of its send."""
    bench = Bench()
    bench.hang(params=SAVED)
    bench.end()
    bench.steps()
    assert bench.lab.status("a") == "FINISHED_LENGTH_CAPPED"
    bench.end(finished_sending={"a"})
    assert (bench.missing, bench.lab.status("a")) == (0, "GONE")


def failed() -> None:
    """The transfer ends with a failure that names its blocks, in one report or in two: no live request is hit."""
    for policy in ("fail", "recompute"):
        for together in (True, False):
            bench = Bench(load_failure_policy=policy)
            bench.lab.add("other", 40, max_tokens=30)
            old = set(bench.hang(max_tokens=20))
            bench.give_up()
            if not together:
                bench.lab.step(invalid_block_ids=old)
            bench.end(invalid_block_ids=old if together else ())
            bench.steps(80)
            assert (bench.tokens("a", "other"), bench.missing) == ([20, 30], 0), (policy, together)


def failed_by_request() -> None:
    """As vLLM >= 0.30 hears of it with several KV groups: by request."""
    if IN_RELEASE < "0.30":
        return
    bench = Bench(load_failure_policy="fail", sliding_window=32)
    bench.hang(max_tokens=20)
    bench.give_up()
    bench.end(failed_recving={"a"})
    bench.steps()
    assert (bench.tokens(), bench.missing) == ([20], 0)


def id_used_again() -> None:
    """A new request under the old id: it does not load while the old load is under way, but it does later."""
    bench = Bench()
    lab = bench.lab
    bench.hang()
    bench.give_up()
    lab.abort("a")
    lab.add("a", PROMPT, LOADED)
    lab.step()
    assert lab.status("a") == "RUNNING"
    bench.steps()
    bench.end()
    bench.hang()
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"
    bench.give_up()
    bench.steps()
    bench.end()
    assert (len(lab.book.loads), bench.count("loads-given-up"), bench.count("late-ends")) == (2, 2, 2)
    assert bench.missing == 0


def starved() -> None:
    """There is no room for fresh blocks until another request, whose KV has arrived, has run and gone."""
    bench = Bench(num_blocks=15)
    bench.hang("a")
    bench.hang("b")
    bench.end("b")  # it is ready in the step in which a is given up
    bench.now += SECONDS
    bench.steps()
    assert bench.tokens("a", "b") == [4, 4]
    bench.end()
    assert bench.missing == 0


def overlapped() -> None:
    """The AsyncScheduler, a step always under way while the next is scheduled."""
    bench = Bench(async_scheduling=True)
    lab = bench.lab
    bench.hang()
    lab.step()
    bench.now += SECONDS
    running = lab.schedule()
    for step in range(12):
        following = lab.schedule()
        lab.update(running, finished_recving={"a"} if step == 2 else ())
        running = following
    lab.update(running)
    assert (bench.tokens(), bench.missing) == ([4], 0)


CASES = (
    *(hanging, shared_prefix, saving, aborted_while_loading, reported_again_with_the_send, failed, failed_by_request),
    *(id_used_again, starved, overlapped),
)


@on(*ALL_VLLM_VERSIONS)
def test_given_up_with_the_patch_and_never_without(version: str) -> None:
    """Each version sees one order of the patches."""
    bench = Bench()
    bench.hang()
    bench.give_up()
    bench.steps()
    assert (bench.lab.status("a"), bench.tokens()) == ("WAITING_FOR_REMOTE_KVS", [0])
    apply(guard_first=ALL_VLLM_VERSIONS.index(version) % 2 == 0)
    all_hold(*CASES)


@on(*ALL_VLLM_VERSIONS)
def test_lmcache_stores_the_fresh_kv_and_keeps_no_lock(version: str) -> None:
    """The load hangs, is given up, and ends when the request is long finished and others use the memory. Then random
    workloads: clients leave, requests are preempted, transfers end late; every store and attention is checked."""
    assert late_load().lab.outputs == {}
    apply(guard_first=ALL_VLLM_VERSIONS.index(version) % 2 == 0)
    engine = late_load()
    assert (len(engine.lab.outputs["a"]), engine.ledger.lookups) == (3, 1)
    for index in range(4):
        engine.add(f"other-{index}", list(range(5000 * (index + 1), 5000 * (index + 1) + 150)))
    engine.step()
    engine.end("a")
    assert engine.run()
    assert (engine.ledger.locked, engine.connector.request_trackers, engine.lab.free_blocks) == (0, {}, 59)
    assert engine.stored > 0
    before = count(NAME, "loads-given-up")
    seen = workloads(WORKLOADS, bounded=False, hanging=0.35, load_timeout_seconds=SECONDS)
    assert (seen["wrong"], seen["verdicts"], quarantined()) == ([], {"done": WORKLOADS}, 0)
    assert seen["loads"] > count(NAME, "loads-given-up") - before >= WORKLOADS // 2
    assert seen["preempted"] > 0


def late_load() -> Any:
    engine = Engine(leaf(THEIRS, load_timeout_seconds=SECONDS), num_blocks=60, batch=64)
    prompt = list(range(1000, 1300))
    engine.ledger.store(prompt, 0, 256)
    engine.hanging.add("a")
    engine.add("a", prompt, max_tokens=3)
    for _ in range(22):
        engine.step()
    return engine


def test_a_limit_that_is_none_is_refused() -> None:
    for seconds in ("0", -1, "nan", "inf"):
        with pytest.raises(StartError, match=SETTING):
            LoadTimeout(None, float(seconds))
