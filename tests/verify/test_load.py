"""`verify --load` over a deployment of fakes: what is sound is proven, each fault fails the proof that is for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import typer

from pdserve.cli.prove import load_options
from pdserve.errors import NotProvenError, VerifyError
from pdserve.observe.metrics import view_client
from pdserve.recipe.model import Verify
from pdserve.verify.load import LoadOptions, LoadReport, run_load
from pdserve.verify.load.traffic import OnWindow
from tests.proxy.deployment import KEY
from tests.verify.deployment import Deployment, proof

pytestmark = pytest.mark.process

SMALL = LoadOptions(concurrency=4, requests=48, window=16, sample=0.5, longest_prompt=600)
PROOFS = ["endpoints", "load-answers", "load-transfer", "load-reload", "load-clean", "load-output"]


def load(deployment: Deployment, settings: LoadOptions = SMALL, on_window: OnWindow | None = None) -> LoadReport:
    async def run() -> LoadReport:
        async with view_client() as client:
            return await run_load(deployment.plan, settings, engine_key=KEY, client=client, on_window=on_window)

    return asyncio.run(run())


def reasons(report: LoadReport) -> str:
    """Of all that is not proven."""
    return "\n".join(f"{each.name}: {each.reason} {each.numbers}" for each in report.proofs if each.status != "proven")


def after_window(number: int, act: Callable[[], object]) -> OnWindow:
    """Does something to the deployment once so many windows were sent."""
    seen: list[object] = []

    def sent(window: object) -> None:
        seen.append(window)
        if len(seen) == number:
            act()

    return sent


class TestProven:
    def test_a_sound_deployment(self, deployment: Deployment) -> None:
        report = load(deployment.up())
        assert {proof.name: proof.status for proof in report.proofs} == dict.fromkeys(PROOFS, "proven"), report
        assert report.exit_code == 0
        answers = proof(report, "load-answers").numbers
        assert (answers["requests"], answers["failed"], answers["second attempts"]) == (48, 0, 0)
        assert isinstance(answers["cancelled"], int)
        assert answers["cancelled"] > 0
        reload = proof(report, "load-reload").numbers
        # Two groups share one chunk, two share two; the caches are cleared before the second and the third window.
        assert (reload["times cleared"], reload["tokens expected"]) == (2, 2 * 6 * 256)
        assert (reload["prefixes expected"], reload["prefixes loaded"], reload["tokens loaded"]) == (8, 8, 2 * 6 * 256)
        transfer = proof(report, "load-transfer").numbers
        assert transfer["computed on decode"] == 0
        output = proof(report, "load-output").numbers
        assert output["share that differs"] == 0
        assert output["control: difference"] != 0

    @pytest.mark.parametrize("connector", ["MooncakeStoreConnector", "OffloadingConnector"])
    def test_another_cache(self, deployment: Deployment, connector: str) -> None:
        report = load(deployment.up(cached=False, beside=connector))
        assert report.exit_code == 0, reasons(report)
        reload = proof(report, "load-reload")
        assert (reload.numbers["prefixes expected"], reload.numbers["prefixes loaded"]) == (8, 8)
        assert reload.claim.endswith("prefix was loaded again.")

    def test_engines_that_offload_each_to_memory_of_its_own(self, deployment: Deployment) -> None:
        """The proxy may choose the one that never had a prefix: it has lost nothing."""
        report = load(deployment.up(aggregated=2, cached=False, beside="OffloadingConnector"))
        assert report.exit_code == 0, reasons(report)
        reload = proof(report, "load-reload")
        assert reload.claim.endswith("wherever it was known to be kept.")
        assert reload.numbers["prefixes loaded"] == reload.numbers["prefixes expected"]


class TestFaults:
    @pytest.mark.parametrize("how", ["exact", "logprobs"])
    def test_a_decode_that_goes_wrong_in_the_middle(self, deployment: Deployment, how: str) -> None:
        decode = deployment.up(verify=Verify.model_validate({"output": how})).engines["decode-0"]
        report = load(deployment, on_window=after_window(1, lambda: decode.script(wrong_kv=1)))
        output = proof(report, "load-output")
        assert output.status == "failed"
        assert report.exit_code == VerifyError.exit_code
        first, second, third = report.windows
        assert (first.different, second.different, third.different) == (0, second.compared, third.compared)
        assert "requests 16-31: " in output.reason
        assert "requests 0-15" not in output.reason
        assert "logs/decode-0.log" in output.reason
        # No other proof sees it: all went well but for the bytes.
        assert {entry.status for entry in report.proofs if entry.name != "load-output"} == {"proven"}

    def test_a_decode_that_computes_prompts_itself(self, deployment: Deployment) -> None:
        report = load(deployment.up(cached=False, faults={"decode": {"recomputes": 1}}))
        transfer = proof(report, "load-transfer")
        assert transfer.status == "failed"
        assert transfer.numbers["received by decode"] == 0
        assert "requests 0-15: " in transfer.reason
        assert proof(report, "load-output").status == "proven"

    def test_a_transfer_that_fails(self, deployment: Deployment) -> None:
        decode = deployment.up().engines["decode-0"]
        report = load(deployment, on_window=after_window(1, lambda: decode.script(kv_fails=1)))
        answers = proof(report, "load-answers")
        assert answers.status == "failed"
        assert "requests 16-31: " in answers.reason
        assert "the load ended there" in answers.reason
        assert [window.first for window in report.windows] == [0, 16]
        assert proof(report, "load-output").status == "not-proven"

    def test_a_cache_that_forgets_a_single_prefix(self, deployment: Deployment) -> None:
        """In a window of the usual size the tails of prompts that come once more are loaded too: they are more tokens
        than the prefix, and do not make up for it."""
        usual, group = LoadOptions(requests=100, sample=0.0), 1
        prefill = deployment.up().engines["prefill-0"]
        report = load(deployment, usual, after_window(1, lambda: prefill.forget_salt(f"-load-{group}")))
        reload = proof(report, "load-reload")
        assert reload.status == "failed"
        assert f"(requests 50-99: group {group} (cache_salt pdserve-verify-" in reload.reason
        assert f"-load-{group}): 0 of 512 tokens by prefill-0):" in reload.reason
        assert reload.reason.endswith("see logs/lmcache-0.log, logs/prefill-0.log")
        assert (reload.numbers["prefixes expected"], reload.numbers["prefixes loaded"]) == (4, 3)
        assert {entry.name for entry in report.proofs if entry.status != "proven"} == {"load-reload"}, reasons(report)

    def test_locks_that_leak_in_lmcache(self, deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pdserve.verify.load.proofs._UNLOCK_SECONDS", 0.3)
        clean = proof(load(deployment.up(lmcache={"locked": 3})), "load-clean")
        assert clean.status == "failed"
        assert "LMCache still holds 3 chunks" in clean.reason


class TestOpen:
    def test_without_the_reset_endpoint_reloads_are_not_proven(self, deployment: Deployment) -> None:
        report = load(deployment.up(cache_reset_endpoint=False))
        assert proof(report, "load-reload").status == "not-proven"
        assert report.exit_code == NotProvenError.exit_code

    def test_a_load_without_a_request_proves_nothing(self, deployment: Deployment) -> None:
        report = load(deployment.up(), LoadOptions(requests=None, seconds=0.0, window=8, longest_prompt=600))
        assert "nothing was sent" in proof(report, "load-answers").reason
        assert {entry.status for entry in report.proofs[1:]} == {"not-proven"}


class TestOptions:
    def test_options_of_a_load_need_it(self) -> None:
        with pytest.raises(typer.BadParameter, match="--longest-prompt, --seed: only with --load"):
            load_options({"requests": None, "longest_prompt": 100, "seed": 1}, load=False)

    def test_a_time_alone_has_no_number(self) -> None:
        assert load_options({"requests": None, "seconds": 5.0}, load=True) == LoadOptions(requests=None, seconds=5.0)
