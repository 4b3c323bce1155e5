"""`load-reload`, by the counters around a prompt that was sent alone: whose prefix came back, and what is not known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from pdserve.errors import NotProvenError
from pdserve.plan.model import Plan
from pdserve.verify.load import proofs, traffic
from pdserve.verify.load.schedule import GROUPS, Schedule
from pdserve.verify.load.traffic import Came, Prefixes, PrefixReload, RequestOutcome, SentWindow, Traffic
from pdserve.verify.report import Outcome
from pdserve.verify.target import Target
from pdserve.verify.trials import Counters
from tests.bench.evidence import plan, with_connector
from tests.tables import each_row

SCHEDULE = Schedule(
    pool=tuple(range(100, 1100)), chunk=256, longest=1500, model_limit=2000, window=16, sample=0.25, seed=0
)
PREFIXES = [len(SCHEDULE.prefix(group)) for group in range(GROUPS)]
NOTHING = httpx.AsyncClient()


def several(of: Plan, *, beside_one_server: bool = False, ranks: int = 1) -> Plan:
    """Two engines that compute prompts; with LMCache a server beside each, or one for both."""
    (process,) = [process for process in of.processes if process.role != "decode"]
    (worker,) = [worker for worker in of.proxy.workers if worker.role != "decode"]
    second = process.model_copy(update={"name": "second"})
    workers = [
        worker.model_copy(update={"ranks": ranks}),
        worker.model_copy(update={"name": "second", "url": "http://127.0.0.1:9", "ranks": ranks}),
    ]
    servers = of.lmcache
    if servers and beside_one_server:
        servers = (servers[0].model_copy(update={"engines": (process.name, "second")}),)
    elif servers:
        servers += (servers[0].model_copy(update={"process": "lmcache-1", "engines": ("second",)}),)
    proxy = of.proxy.model_copy(update={"workers": tuple(workers)})
    return of.model_copy(update={"proxy": proxy, "processes": (*of.processes, second), "lmcache": servers})


class Engines:
    """The counters of engines, by address. `counts`: they count where tokens came from; `block`: what they report."""

    def __init__(self, of: Plan, *, counts: bool = True, block: int | None = 16) -> None:
        self._counts, self._block = counts, block
        self._addresses = {worker.name: httpx.URL(worker.url).port for worker in of.proxy.workers}
        self._tokens: dict[int | None, list[int]] = {port: [70_000, 50_000] for port in self._addresses.values()}

    def count(self, engine: str, prompt: int, loaded: int) -> None:
        of = self._tokens[self._addresses[engine]]
        of[0] += prompt - loaded
        of[1] += loaded

    def __call__(self, request: httpx.Request) -> httpx.Response:
        computed, loaded = self._tokens[request.url.port]
        page = "" if self._block is None else f'vllm:cache_config_info{{block_size="{self._block}"}} 1\n'
        if self._counts:
            page += (
                f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {computed}\n'
                f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {loaded}\n'
            )
        return httpx.Response(200, text=page)


class Asked:
    """Prompts of groups that are sent alone, one after the other."""

    def __init__(self, of: Plan, **engines: Any) -> None:
        self.engines = Engines(of, **engines)
        self._client = httpx.AsyncClient(transport=httpx.MockTransport(self.engines))
        self.prefixes = Prefixes(Target(of, self._client, "key"), SCHEDULE)

    def ask(
        self,
        group: int,
        loaded: int,
        *,
        engine: str = "prefill-0",
        others: Sequence[tuple[str, int, int]] = (),
        counted: bool = True,
    ) -> PrefixReload:
        """`others`: engine, prompt tokens and loaded ones of another client's request meanwhile."""
        planned = SCHEDULE.planned(16 + group)

        async def asked() -> PrefixReload:
            before = await self.prefixes.read()
            if counted:
                self.engines.count(engine, len(planned.prompt), loaded)
            for other in others:
                self.engines.count(*other)
            return await self.prefixes.look(planned, before)

        return asyncio.run(asked())

    def came(self, group: int, loaded: int, **more: Any) -> Came:
        return self.ask(group, loaded, **more).came


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_COUNT_SECONDS", 0.0)
    monkeypatch.setattr(traffic, "_POLL_SECONDS", 0.0)


class TestOnePlace:
    def test_a_prefix_that_was_there_before_comes_back_or_is_lost(self) -> None:
        asked = Asked(plan())
        for group, tokens in enumerate(PREFIXES):
            assert asked.came(group, 0) == "new"
            assert asked.came(group, tokens) == "back"
            assert asked.came(group, tokens - 256) == "lost"

    def test_two_engines_beside_one_server(self) -> None:
        asked = Asked(several(plan(), beside_one_server=True))
        asked.ask(0, 0)
        assert asked.came(0, 0, engine="second") == "lost"
        assert asked.came(0, 256, engine="second") == "back"

    def test_a_cap_on_what_is_loaded(self) -> None:
        asked = Asked(plan(max_tokens_per_load=300))
        asked.ask(1, 0)
        assert asked.came(1, 256) == "back"
        assert asked.came(1, 0) == "lost"

    def test_a_minimum_of_what_is_loaded(self) -> None:
        asked = Asked(plan(min_load_tokens=512))
        assert [asked.came(group, 0) for group in range(GROUPS)] == ["too-short", "new", "too-short", "new"]

    @pytest.mark.parametrize("connector", ["MooncakeStoreConnector", "OffloadingConnector"])
    @pytest.mark.parametrize(("block", "tokens"), [(16, 512), (96, 480), (1024, 0)])
    def test_without_lmcache_it_is_whole_blocks(self, connector: str, block: int, tokens: int) -> None:
        asked = Asked(with_connector(connector), block=block)
        asked.ask(1, 0, engine="aggregated-0")
        assert asked.ask(1, tokens, engine="aggregated-0").came == ("back" if tokens else "too-short")
        if tokens:
            assert asked.ask(1, tokens - 1, engine="aggregated-0").came == "lost"

    @pytest.mark.parametrize(("threshold", "came"), [(0, "lost"), (1, "lost"), (2, "new")])
    def test_what_is_offloaded_only_when_it_is_seen_again_may_not_be_there(self, threshold: int, came: str) -> None:
        """Blocks of 16 are offloaded 20 together."""
        more = {"blocks_per_chunk": 20, "store_threshold": threshold}
        argv = ("vllm", f"--kv-transfer-config={json.dumps({'kv_connector_extra_config': more})}")
        of = with_connector("OffloadingConnector")
        asked = Asked(of.model_copy(update={"processes": (of.processes[0].model_copy(update={"argv": argv}),)}))
        assert asked.ask(0, 0, engine="aggregated-0").wanted == 0
        assert asked.ask(1, 0, engine="aggregated-0").wanted == 320
        assert asked.came(1, 0, engine="aggregated-0") == came
        assert asked.came(1, 320, engine="aggregated-0") == "back"


class TestSeveralPlaces:
    @pytest.mark.parametrize("of", [plan(), with_connector("OffloadingConnector")])
    def test_an_engine_that_never_had_a_prefix_has_lost_nothing(self, of: Plan) -> None:
        first = of.proxy.workers[0].name
        asked = Asked(several(of))
        asked.ask(0, 0, engine=first)
        assert asked.came(0, 0, engine="second") == "new"
        assert asked.came(0, 0, engine="second") == "lost"
        assert asked.came(0, 256, engine=first) == "back"
        assert asked.came(2, 0, engine=first) == "new"

    def test_ranks_that_offload_do_not_share_what_they_keep(self) -> None:
        asked = Asked(several(with_connector("OffloadingConnector"), ranks=2))
        asked.ask(0, 0, engine="aggregated-0")
        assert asked.came(0, 0, engine="aggregated-0") == "new"
        assert asked.came(0, 256, engine="aggregated-0") == "back"


@each_row("loaded, others, came", [
    (0, [("prefill-0", 600, 512)], "disturbed"),
    (512, [("prefill-0", 1, 0), ("prefill-0", 1, 0)], "back"),  # as those that `verify` itself sends to idle engines
    (512, [("prefill-0", 300, 256)], "back"),  # more than the prefix and what they can have loaded
])  # fmt: skip
def test_what_other_clients_load_meanwhile_does_not_stand_for_a_prefix(
    loaded: int, others: Sequence[tuple[str, int, int]], came: str
) -> None:
    asked = Asked(plan())
    asked.ask(1, 0)
    assert asked.came(1, loaded, others=others) == came


def test_what_no_engine_counts_is_not_known() -> None:
    assert Asked(plan(), counts=False).came(0, 256) == "uncounted"
    assert Asked(plan()).came(0, 0, counted=False) == "uncounted", "it went to decode alone"
    unknown_blocks = Asked(with_connector("MooncakeStoreConnector"), block=None)
    assert unknown_blocks.came(0, 256, engine="aggregated-0") == "uncounted"


def reloads(first: int, came: Sequence[Came]) -> tuple[PrefixReload, ...]:
    return tuple(
        PrefixReload(first + group, group, f"s-load-{group}", 256, 256 if each == "back" else 0, "prefill-0", each)
        for group, each in enumerate(came)
    )


ALL_BACK: tuple[Came, ...] = ("back", "back", "back", "back")


class TestProof:
    def proved(
        self, *windows: Sequence[Came], not_cleared: NotProvenError | None = None, failed: int | None = None, **of: Any
    ) -> Outcome:
        """`windows`: what came after each clearing. The first window is before them. `failed`: a request."""
        sent = []
        for number, came in enumerate([None, *windows]):
            served = [
                RequestOutcome(SCHEDULE.planned(each), "failed" if each == failed else "answered")
                for each in range(16 * number, 16 * number + 16)
            ]
            looked = None if came is None else reloads(16 * number, came)
            sent.append(SentWindow(16 * number, tuple(served), Counters({}, ()), 1.0, looked))
        server = plan().processes[0].model_copy(update={"name": "lmcache-0", "log": "logs/lmcache-0.log"})
        values = {"processes": (*plan().processes, server)} | of
        target, traffic = Target(plan(**values), NOTHING, "key"), Traffic(tuple(sent), 0, not_cleared, False)
        return asyncio.run(proofs.prove_reload(target, traffic))

    def test_all_came_back(self) -> None:
        outcome = self.proved(ALL_BACK, ALL_BACK)
        assert outcome.status == "proven"
        assert outcome.numbers == {
            "times cleared": 2,
            "prefixes expected": 8,
            "prefixes loaded": 8,
            "tokens expected": 8 * 256,
            "tokens loaded": 8 * 256,
        }

    @pytest.mark.parametrize("group", range(GROUPS))
    def test_one_of_them_is_lost_once(self, group: int) -> None:
        came = [*ALL_BACK]
        came[group] = "lost"
        outcome = self.proved(ALL_BACK, came, ALL_BACK)
        assert outcome.status == "failed"
        assert f"requests 32-47: group {group} (cache_salt s-load-{group}): 0 of 256 tokens by prefill-0" in (
            outcome.reason
        )
        assert outcome.reason.endswith("see logs/lmcache-0.log, log")

    def test_a_loss_is_told_whatever_else_is_not_known(self) -> None:
        broken = NotProvenError("the prefix cache could not be cleared")
        assert self.proved(("disturbed", "uncounted", "lost"), not_cleared=broken).status == "failed"

    def test_caches_that_could_not_be_cleared(self) -> None:
        with pytest.raises(NotProvenError):
            self.proved(ALL_BACK, not_cleared=NotProvenError("the prefix cache could not be cleared"))

    @pytest.mark.parametrize(
        ("came", "reason"),
        [
            (("back", "disturbed", "back", "back"), "others were served meanwhile"),
            (("back", "uncounted", "back", "back"), "have not counted a prompt in time"),
            (("back", "back", "new", "back"), "the prefixes of group 2 were asked for only where"),
        ],
    )
    def test_what_is_not_known_of_one_is_not_proven(self, came: Sequence[Came], reason: str) -> None:
        outcome = self.proved(came)
        assert outcome.status == "not-proven"
        assert reason in outcome.reason

    def test_prefixes_that_are_too_short(self) -> None:
        assert self.proved(("too-short", "back", "too-short", "back")).status == "proven"
        outcome = self.proved(("too-short", "too-short", "too-short", "too-short"), min_load_tokens=1024)
        assert "below min_load_tokens (1024) are computed, as all of these" in outcome.reason

    def test_a_request_that_had_to_reload_and_failed(self) -> None:
        outcome = self.proved(("back", "back"), ALL_BACK, failed=18)
        assert outcome.status == "not-proven"
        assert "had to reload a prefix were not answered: 18" in outcome.reason

    def test_no_window_after_a_clearing(self) -> None:
        assert "a smaller --window" in self.proved().reason
