"""Each proof fails when what it claims is not so, and says why; what cannot be shown here is not proven."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import pytest

from pdserve.errors import NotProvenError, VerifyError
from pdserve.recipe.model import Timeouts, Verify
from pdserve.verify import Proof, Report, Status
from tests.proxy.deployment import KEY, MODEL
from tests.tables import each_row
from tests.verify.deployment import Deployment, FakeEngine, proof

pytestmark = pytest.mark.process


def after(name: str, act: Callable[[], object]) -> Callable[[Proof], None]:
    """Does something to the deployment once a proof is done."""

    def heard(done: Proof) -> None:
        if done.name == name:
            act()

    return heard


EXACT = Verify(output="exact")
LOGPROBS = Verify(output="logprobs")


class TestOutput:
    @pytest.mark.parametrize("how", [EXACT, LOGPROBS], ids=["exact", "logprobs"])
    def test_decode_that_works_on_other_kv_is_detected(self, deployment: Deployment, how: Verify) -> None:
        report = deployment.up(faults={"decode": {"wrong_kv": 1}}, verify=how).verify()
        output = proof(report, "output")
        assert output.status == "failed"
        assert how is LOGPROBS or "prompt 0: output token 0 is " in output.reason
        assert "logs/decode-0.log" in output.reason
        assert report.exit_code == VerifyError.exit_code
        # Nothing else can tell: the transfer itself went well.
        assert proof(report, "transfer").status == "proven"

    def test_a_model_that_ignores_its_context_proves_nothing(self, deployment: Deployment) -> None:
        dummy: dict[str, object] = {"dummy_weights": 1}
        report = deployment.up(faults={"prefill": dummy, "decode": dummy}).verify()
        output = proof(report, "output")
        assert output.status == "failed"
        assert "does not change the answer" in output.reason

    def test_a_reference_that_was_served_from_a_cache_proves_nothing(self, deployment: Deployment) -> None:
        report = deployment.up(cached=False, faults={"prefill": {"ignore_salt": 1}}).verify()
        output = proof(report, "output")
        assert output.status == "failed"
        assert "from a cache" in output.reason


class TestTransfer:
    def test_decode_that_computes_the_prompt_itself_is_detected(self, deployment: Deployment) -> None:
        timeouts = Timeouts(transfer_abort_seconds=2)
        report = deployment.up(cached=False, faults={"decode": {"recomputes": 1}}, timeouts=timeouts).verify()
        transfer = proof(report, "transfer")
        assert transfer.status == "failed"
        assert "received 0 of 1238 prompt tokens and computed 1238 itself" in transfer.reason
        assert proof(report, "output").status == "proven", "its answers are right all the same"
        clean = proof(report, "clean")
        assert clean.status == "failed"
        assert "prefill-0 (0 unfinished" in clean.reason
        assert "no decode fetches" in clean.reason

    def test_engines_that_do_not_report_cached_tokens_are_proven_all_the_same(self, deployment: Deployment) -> None:
        assert proof(deployment.up(flags=()).verify(), "transfer").status == "proven"


class TestLmcache:
    def test_a_cache_that_keeps_nothing_is_detected(
        self, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pdserve.verify.cache._STORE_SECONDS", 0.3)
        stored = proof(deployment.up(lmcache={"loses": 1}).verify(), "stored")
        assert stored.status == "failed"
        assert "stored 0 of 4 chunks" in stored.reason
        assert "logs/lmcache-0.log" in stored.reason

    def test_a_prompt_that_is_computed_again_was_not_reloaded(
        self, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pdserve.verify.cache._READ_SECONDS", 0.3)
        deployment.up()
        report = deployment.verify(after("output", deployment.engines["prefill-0"].forget_external))
        reload = proof(report, "reload")
        assert reload.status == "failed"
        assert reload.numbers["tokens loaded"] == 0

    def test_other_kv_than_was_stored_is_detected(self, deployment: Deployment) -> None:
        decode = deployment.up().engines["decode-0"]
        report = deployment.verify(after("output", lambda: decode.script(wrong_kv=1)))
        reload = proof(report, "reload")
        assert reload.status == "failed"
        assert "other KV" in reload.reason
        assert reload.numbers["same tokens"] is False

    def test_without_the_reset_endpoint_stored_is_proven_and_reload_is_not(self, deployment: Deployment) -> None:
        report = deployment.up(cache_reset_endpoint=False).verify()
        assert proof(report, "stored").status == "proven"
        assert proof(report, "reload").status == "not-proven"
        assert report.exit_code == NotProvenError.exit_code
        with pytest.raises(NotProvenError, match="reload"):
            report.raise_for_status()


class TestClean:
    def test_a_request_that_outlives_its_client_is_detected(self, deployment: Deployment) -> None:
        lingers: dict[str, dict[str, object]] = {"decode": {"token_seconds": 0.05, "lingers": 1}}
        deployment.up(cached=False, faults=lingers, timeouts=Timeouts(transfer_abort_seconds=2))
        clean = proof(deployment.verify(), "clean")
        assert clean.status == "failed"
        assert "decode-0 (2 unfinished" in clean.reason

    def test_beside_others_requests_it_stays_open(self, deployment: Deployment) -> None:
        decode = deployment.up().engines["decode-0"]
        with socket.create_connection(("127.0.0.1", decode.port)) as other:
            report = deployment.verify(after("reload", lambda: keep_running(other, decode)))
        clean = proof(report, "clean")
        assert clean.status == "not-proven"
        assert "decode-0 also serve" in clean.reason


class TestRequests:
    def test_refused_requests_fail_and_leave_the_rest_open(self, deployment: Deployment) -> None:
        report = deployment.up(faults={"decode": {"decode_status": 500}}).verify()
        assert proof(report, "requests").status == "failed"
        assert "500" in proof(report, "requests").reason
        rest = {proof.status for proof in report.proofs if proof.name not in ("endpoints", "requests")}
        assert rest == {"not-proven"}
        assert report.exit_code == VerifyError.exit_code
        with pytest.raises(VerifyError, match="requests: failed"):
            report.raise_for_status()

    def test_answers_that_are_broken_off_are_no_answers(self, deployment: Deployment) -> None:
        """Prefill answers one token to the proxy, and decode ends at once."""
        report = deployment.up(faults={"decode": {"eos": 2}}).verify()
        assert proof(report, "requests").status == "failed"
        assert "619 prompt tokens and 0 answer tokens" in proof(report, "requests").reason
        assert proof(report, "output").status == "not-proven"

    def test_an_engine_that_hangs_ends_the_wait(self, deployment: Deployment) -> None:
        report = deployment.up(faults={"decode": {"hold": "first"}}, canary_seconds=0.5).verify()
        assert "not answered within 0.5 s" in proof(report, "requests").reason

    def test_a_model_too_short_for_two_chunks_leaves_everything_open(self, deployment: Deployment) -> None:
        flags = ("--enable-prompt-tokens-details", "--max-model-len", "512")
        report = deployment.up(flags=flags).verify()
        assert "the model's limit is 512" in proof(report, "requests").reason
        assert report.exit_code == NotProvenError.exit_code


class TestEndpoints:
    def test_another_key_a_proxy_that_is_not_there_and_a_dead_engine(self, deployment: Deployment) -> None:
        self._nothing_was_sent(deployment.up().verify(key="another"), "401", deployment)
        whole = deployment.plan
        elsewhere = whole.proxy.model_copy(update={"port": 9})
        deployment.plan = whole.model_copy(update={"proxy": elsewhere})
        self._nothing_was_sent(deployment.verify(), "proxy", deployment)
        deployment.plan = whole
        deployment.engines["decode-0"].end()
        self._nothing_was_sent(deployment.verify(), "decode-0", deployment)

    def test_an_unhealthy_lmcache(self, deployment: Deployment) -> None:
        self._nothing_was_sent(deployment.up(lmcache={"unhealthy": 1}).verify(), "engine not initialized", deployment)

    def test_an_engine_that_serves_another_model(self, deployment: Deployment) -> None:
        report = deployment.up(faults={"decode": {"model": "other"}}).verify()
        self._nothing_was_sent(report, f"serves other, not {MODEL}", deployment)

    def _nothing_was_sent(self, report: Report, reason: str, deployment: Deployment) -> None:
        assert proof(report, "endpoints").status == "failed"
        assert reason in proof(report, "endpoints").reason
        assert {proof.status for proof in report.proofs[1:]} == {"not-proven"}
        assert deployment.engines["prefill-0"].requests() == []


def keep_running(connection: socket.socket, engine: FakeEngine) -> None:
    """A request of another client that does not end."""
    engine.script(token_seconds=0.05)
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 5000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    engine.http.get("/fake/wait?running=1")


# --- what a report says to programs and to the shell


def report(*statuses: Status) -> Report:
    proofs = [
        Proof(name=f"proof-{i}", claim="", status=status, reason=f"reason {i}") for i, status in enumerate(statuses)
    ]
    return Report(deployment="tiny", proofs=tuple(proofs))


@each_row("statuses, code", [
    (("proven", "proven"), 0), (("proven", "not-proven"), 7), (("failed", "proven"), 6), (("not-proven", "failed"), 6),
])  # fmt: skip
def test_a_failed_proof_outweighs_an_open_one(statuses: tuple[Status, ...], code: int) -> None:
    assert report(*statuses).exit_code == report(*statuses).to_json()["exit_code"] == code


def test_the_error_names_the_proofs_and_their_reasons() -> None:
    with pytest.raises(VerifyError) as caught:
        report("proven", "failed", "not-proven").raise_for_status()
    assert not isinstance(caught.value, NotProvenError)
    text = caught.value.render()
    assert "tiny: proof-1: failed" in text
    assert ("reason 1" in text, "reason 2" in text) == (True, False)
