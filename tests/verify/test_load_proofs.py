"""Proofs of a load by the counters that they rest on: what the counters cannot show is not proven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from pdserve.observe.metrics import EngineSnapshot
from pdserve.verify.load import proofs
from pdserve.verify.load.schedule import Ending, LoadOptions, LoadRequest
from pdserve.verify.load.traffic import Ended, RequestOutcome, SentWindow, Traffic
from pdserve.verify.report import Outcome
from pdserve.verify.target import Target
from pdserve.verify.trials import Counters
from tests.bench.evidence import lmcache_server, plan, process
from tests.verify.deployment import asked

PROXY = plan().processes[0].model_copy(update={"name": "proxy", "role": "proxy"})


def request(number: int, tokens: int, ended: Ended = "answered", ending: Ending = "whole") -> RequestOutcome:
    planned = LoadRequest(number=number, group=0, prompt=(1,) * tokens, ending=ending, leaves_after=0.1, compared=False)
    return RequestOutcome(planned, ended)


def read(received: int, computed: int) -> Counters:
    tokens = {"local_compute": computed, "local_cache_hit": 0, "external_kv_transfer": received}
    return Counters({"decode-0": EngineSnapshot("http://e", prompt_tokens=tokens)}, ())


class TestAnswers:
    def proved(self, failovers: int | None, **changes: Any) -> tuple[Outcome, str]:
        target = Target(plan(processes=(*plan().processes, PROXY), **changes), httpx.AsyncClient(), "key")
        window = SentWindow(0, (request(0, 272),), read(0, 0), 1.0)
        outcome = proofs.prove_answers(target, Traffic((window,), failovers, None, False), LoadOptions())
        return outcome, proofs.answers_claim(target)

    def test_second_attempts_that_were_not_counted_are_not_none(self) -> None:
        outcome, claim = self.proved(None)
        assert "second attempt" in claim
        assert (outcome.status, outcome.goes_on) == ("not-proven", True)
        assert "could not be read" in outcome.reason

    def test_of_vllm_router_nothing_is_claimed_of_them(self) -> None:
        outcome, claim = self.proved(None, proxy_kind="vllm-router")
        assert outcome.status == "proven"
        assert claim == "Every request under load whose client stayed was answered whole."


class TestTransfer:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proofs, "_COUNT_SECONDS", 0.0)

    def proved(
        self, windows: Sequence[tuple[Sequence[RequestOutcome], Counters]], received: int, computed: int
    ) -> Outcome:
        """`windows`: requests, and the counters at the begin; then those at the end of all."""
        page = "".join(
            f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {count}\n'
            for source, count in (("local_compute", computed), ("external_kv_transfer", received))
        )
        sent = tuple(SentWindow(number, tuple(served), at, 1.0) for number, (served, at) in enumerate(windows))
        traffic = Traffic(sent, 0, None, False)
        return asked(
            lambda request: httpx.Response(200, text=page), lambda target: proofs.prove_transfer(target, traffic)
        )

    @pytest.mark.parametrize(("requests", "tokens", "lost"), [(200, 272, 1), (50, 80, 1), (50, 32, 3)])
    def test_a_whole_prompt_is_not_hidden_by_the_tokens_that_are_always_computed(
        self, requests: int, tokens: int, lost: int
    ) -> None:
        served = [request(number, tokens) for number in range(requests)]
        outcome = self.proved([(served, read(0, 0))], (requests - lost) * tokens, lost * tokens)
        assert outcome.status == "not-proven"
        assert "a smaller --window shows which" in outcome.reason
        assert f"{lost * tokens}, a prompt has {tokens}" in outcome.reason

    @pytest.mark.parametrize("computed", [0, 50, 70])
    def test_a_token_of_each_prompt_and_some_requests_of_verify_itself_are_no_prompt(self, computed: int) -> None:
        served = [request(number, 272) for number in range(50)]
        assert self.proved([(served, read(0, 0))], 50 * 272 - min(computed, 50), computed).status == "proven"

    def test_what_left_requests_received_is_not_what_the_others_received(self) -> None:
        """Half of them left after their first chunk: decode has counted their prompts too."""
        left = [request(number, 272, "cancelled", "left-after-first-chunk") for number in range(4)]
        served = [*left, *(request(number, 272) for number in range(4, 8))]
        assert self.proved([(served, read(0, 0))], 8 * 272, 0).status == "proven"
        outcome = self.proved([(served, read(0, 0))], 7 * 272, 0)
        assert outcome.status == "failed"
        assert f"of {8 * 272} prompt tokens decode received {7 * 272}" in outcome.reason

    def test_a_request_that_left_before_its_first_byte_may_have_got_to_decode_or_not(self) -> None:
        served = [request(0, 272), request(1, 300, "cancelled", "left-before-first-byte")]
        assert self.proved([(served, read(0, 0))], 272, 0).status == "proven"
        assert self.proved([(served, read(0, 0))], 572, 0).status == "proven"

    def test_a_long_load_does_not_hide_a_prompt_that_no_decode_has_counted(self) -> None:
        served = [request(number, 272) for number in range(300)]
        assert self.proved([(served, read(0, 0))], 299 * 272, 0).status == "failed"


class TestClean:
    """Of two LMCache servers."""

    IDLE = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.0\n"

    @pytest.fixture(autouse=True)
    def eager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proofs, "_POLL_SECONDS", 0.0)

    def proved(self, *servers: Sequence[int | str | None]) -> Outcome:
        """`servers`: the locks that each reports, one time after the other and the last for good. "500": no answer;
        None: no such count."""
        reports = {f"http://127.0.0.1:{port}": list(locks) for port, locks in enumerate(servers, start=8080)}

        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/metrics":
                return httpx.Response(200, text=self.IDLE)
            if request.url.path == "/status":
                locks = reports[str(request.url.copy_with(path="/")).rstrip("/")]
                return self.status(locks.pop(0) if len(locks) > 1 else locks[0])
            return httpx.Response(200, json={"choices": [{"token_ids": [1]}], "usage": {"prompt_tokens": 1}})

        several = tuple(
            lmcache_server(http_url=url, process=f"lmcache-{number}", engines=("prefill-0",))
            for number, url in enumerate(reports)
        )
        processes = (*plan().processes, *(process(server.process, "lmcache") for server in several))
        at = plan(processes=processes, lmcache=several)
        idle = {w.name: EngineSnapshot(w.url, running=0, waiting=0, kv_cache_usage=0.0) for w in at.proxy.workers}
        return asked(answer, lambda target: proofs.prove_clean(target, idle), at)

    def status(self, locks: int | str | None) -> httpx.Response:
        if locks == "500":
            return httpx.Response(500)
        l1 = {"total_object_count": 1, "memory_used_bytes": 1, "memory_total_bytes": 2, "read_locked_count": locks}
        return httpx.Response(200, json={"is_healthy": True, "storage_manager": {"l1_manager": l1}})

    def test_every_server_holds_none(self) -> None:
        assert self.proved([0], [3, 0]).status == "proven"

    @pytest.mark.parametrize("unknown", ["500", None, "x"])
    def test_a_server_that_does_not_say_is_not_one_that_holds_none(
        self, unknown: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(proofs, "_UNLOCK_SECONDS", 0.0)
        outcome = self.proved([0], [unknown])
        assert outcome.status == "not-proven"
        assert outcome.numbers["chunks locked in LMCache"] is None
        assert "not every LMCache server reports" in outcome.reason

    def test_locks_that_were_seen_fail_whatever_the_others_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proofs, "_UNLOCK_SECONDS", 0.0)
        outcome = self.proved([2], ["500"])
        assert outcome.status == "failed"
        assert "still holds 2 chunks" in outcome.reason
