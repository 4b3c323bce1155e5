"""A sound deployment is proven, in every shape."""

from __future__ import annotations

import json

import pytest

from pdserve.recipe.model import Verify
from pdserve.verify import Report
from tests.proxy.deployment import KEY
from tests.verify.deployment import Deployment, proof

pytestmark = pytest.mark.process


def statuses(report: Report) -> dict[str, str]:
    return {proof.name: proof.status for proof in report.proofs}


def numbers(report: Report, name: str) -> dict[str, object]:
    return dict(proof(report, name).numbers)


def test_one_prefill_and_one_decode_are_proven_as_often_as_it_is_asked(deployment: Deployment) -> None:
    heard: list[str] = []
    first = deployment.up().verify(on_proof=lambda proof: heard.append(proof.name))
    proofs = ["endpoints", "requests", "transfer", "stored", "output", "reload", "clean"]
    assert statuses(first) == dict.fromkeys(proofs, "proven"), first
    assert heard == proofs
    text = json.dumps(first.to_json())
    assert json.loads(text)["exit_code"] == 0
    assert KEY not in text
    again = deployment.verify()
    assert again.exit_code == 0, "what the first has stored is not loaded"
    again.raise_for_status()


def test_the_numbers_are_those_of_prompts_of_two_chunks_and_a_tail(deployment: Deployment) -> None:
    report = deployment.up().verify()
    assert numbers(report, "transfer") == {
        "prompts": 2,
        "prompt tokens": 619,
        "prefill-0: tokens computed": 2 * 619,
        "decode-0: tokens received": 2 * 619,
        "received by decode": 1238,
        "computed on decode": 0,
    }
    stored = numbers(report, "stored")
    assert (stored["chunks expected"], stored["chunks stored"], stored["counted by"]) == (4, 4, "cache_salt")
    output = numbers(report, "output")
    assert (output["equal answers"], output["output tokens"]) == (2, 16)
    reload = numbers(report, "reload")
    assert (reload["tokens loaded"], reload["chunks read from LMCache"], reload["same tokens"]) == (512, 2, True)
    clean = numbers(report, "clean")
    assert clean["cancelled after first chunk"] is True


def test_every_leg_has_a_salt_of_its_own(deployment: Deployment) -> None:
    deployment.up().verify()
    prefill, decode = deployment.engines["prefill-0"], deployment.engines["decode-0"]
    through = {request["body"]["cache_salt"] for request in decode.requests()}
    alone = {
        request["body"]["cache_salt"] for request in prefill.requests() if not request["body"].get("kv_transfer_params")
    }
    assert through & alone == {salt for salt in through if salt.endswith("nudge")}


def test_teacher_forced_logprobs(deployment: Deployment) -> None:
    report = deployment.up(verify=Verify(output="logprobs", logprob_tolerance=0.3)).verify()
    assert report.exit_code == 0, report
    output = numbers(report, "output")
    assert output["max |logprob difference|"] == 0
    control = output["control: max |difference|"]
    assert isinstance(control, float)
    assert control > 0.3


def test_two_of_each_role_are_all_reached(deployment: Deployment) -> None:
    report = deployment.up(prefills=2, decodes=2).verify()
    assert report.exit_code == 0, report
    shares = {key: value for key, value in numbers(report, "transfer").items() if ": tokens " in key}
    assert shares == {
        "prefill-0: tokens computed": 2 * 619,
        "prefill-1: tokens computed": 2 * 619,
        "decode-0: tokens received": 2 * 619,
        "decode-1: tokens received": 2 * 619,
    }


def test_without_lmcache_there_is_no_proof_of_it(deployment: Deployment) -> None:
    report = deployment.up(cached=False).verify()
    assert statuses(report) == dict.fromkeys(["endpoints", "requests", "transfer", "output", "clean"], "proven"), report


def test_aggregated_engines_transfer_nothing(deployment: Deployment) -> None:
    report = deployment.up(aggregated=2).verify()
    assert statuses(report) == dict.fromkeys(
        ["endpoints", "requests", "stored", "output", "reload", "clean"], "proven"
    ), report


# --- KV that engines keep without LMCache: a Mooncake store, and vLLM's own offloading


STORE, OFFLOAD = "MooncakeStoreConnector", "OffloadingConnector"


def test_a_store_is_proven_by_what_its_engines_stored_and_loaded(deployment: Deployment) -> None:
    report = deployment.up(cached=False, beside=STORE).verify()
    assert report.exit_code == 0, report
    assert [entry.name for entry in report.proofs] == [
        *("endpoints", "requests", "transfer", "pool-stored", "output", "pool-reload", "clean")
    ]
    # Two prompts of 619 tokens, in the fake's blocks of 256.
    stored, reloaded = proof(report, "pool-stored").numbers, proof(report, "pool-reload").numbers
    assert (stored["blocks expected"], stored["keys stored"], stored["keys failed"]) == (4, 4, 0)
    assert (reloaded["tokens loaded"], reloaded["keys loaded"], reloaded["same tokens"]) == (512, 2, True)


def test_a_store_that_takes_nothing_is_a_failure(deployment: Deployment) -> None:
    report = deployment.up(cached=False, beside=STORE, faults={"prefill": {"store_fails": 1}}).verify()
    assert proof(report, "pool-stored").status == "failed"
    assert "0 keys were stored and 4 failed; see logs/prefill-0" in proof(report, "pool-stored").reason
    assert proof(report, "pool-reload").status == "failed"
    assert "was computed again instead of being reloaded" in proof(report, "pool-reload").reason


def test_offloading_is_proven_by_its_reload(deployment: Deployment) -> None:
    report = deployment.up(aggregated=1, cached=False, beside=OFFLOAD).verify()
    assert report.exit_code == 0, report
    numbers = proof(report, "offload-reload").numbers
    assert (numbers["tokens loaded"], numbers["same tokens"]) == (512, True)
