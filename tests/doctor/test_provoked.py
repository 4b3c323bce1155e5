"""Faults of real runs of `pdserve up` over fake engines, and what the doctor makes of the run directories."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from pdserve.run.directory import RunDir
from tests.doctor.kit import diagnosed, rules
from tests.launch.deployment import BODY, Deployment, assert_nothing_left, home_in, pdserve, read_json, recipe, up

pytestmark = pytest.mark.process

RESTART = {"policy": "on-failure", "max": 5, "backoff_seconds": 0.1, "backoff_max_seconds": 0.2}
TOO_LONG = (
    "(APIServer pid=7)   Value error, User-specified max_model_len (400000) is greater than the derived max_model_len "
    "(max_position_embeddings=8192.0)"
)
"""vllm 0.32.0, tests/fixtures/logs/vllm-model-len.txt."""


class Ended(NamedTuple):
    """A run that is over, and what the doctor said of it while it lived."""

    run: RunDir
    code: int
    said: str


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with home_in(tmp_path_factory.mktemp("doctor")) as home:
        yield home


@pytest.fixture(scope="module")
def troubled(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Everything that can go wrong while it serves, in one run: 1P2D with LMCache."""
    changes: dict[str, Any] = {
        "decode__instances": 2,
        "decode__restart": RESTART,
        "prefill__restart": RESTART,
        "proxy__admission": {"prefill": {"max_requests": 1, "queue_size": 0}},
    }
    file = recipe(tmp_path_factory.mktemp("troubled"), **changes)
    with up(file, home) as deployment:
        deployment.command.expect("serving fake at")
        _refused(deployment)
        _failed(deployment)
        for attempt in (1, 2):
            deployment.send_signal("decode-1", signal.SIGKILL)
            deployment.command.expect(f"decode-1     restart {attempt}")
            deployment.command.expect("deployment is ready")
        deployment.send_signal("lmcache-0", signal.SIGKILL)
        deployment.command.expect("lmcache-0    is down")
        deployment.command.expect("deployment is ready")
        code, said = pdserve("doctor", "--json")
        deployment.send_signal("launcher", signal.SIGKILL)
        deployment.command.finish()
        pdserve("down", "fake")
        assert_nothing_left(deployment)
        return Ended(deployment.run, code, said)


def _refused(deployment: Deployment) -> None:
    """A second request while the only place of the prefill pool is taken."""
    deployment.hold("prefill-0", "prefill")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(deployment.post, "/v1/completions", BODY)
        prefill = f"http://127.0.0.1:{deployment.run.read_plan().process('prefill-0').ports['http']}"
        httpx.get(f"{prefill}/fake/wait?waiting=1", timeout=120, trust_env=False).raise_for_status()
        refused = deployment.post("/v1/completions", BODY)
        deployment.hold("prefill-0", "")
        assert (refused[0], first.result()[0]) == (429, 200)


def _failed(deployment: Deployment) -> None:
    """No decode answers a request."""
    for decode in ("decode-0", "decode-1"):
        deployment.script(decode, decode_status=500)
    assert deployment.post("/v1/completions", BODY)[0] >= 500
    for decode in ("decode-0", "decode-1"):
        deployment.script(decode, decode_status=0)


# --- while it serves


@pytest.mark.parametrize(
    ("rule", "process", "words"),
    [
        ("process-died", "decode-1", "SIGKILL"),
        ("process-died", "lmcache-0", "SIGKILL"),
        ("restarts", "decode-1", "2 times"),
        ("cache-server-down", "lmcache-0", "prefill-0 got no requests"),
        ("pool-busy", "proxy", "the prefill pool was full, and 1 requests were refused"),
        ("requests-failed", "proxy", "answered with an error"),
    ],
)
def test_a_fault_while_serving_is_named_with_its_evidence(troubled: Ended, rule: str, process: str, words: str) -> None:
    seen = [each for each in diagnosed(troubled.run) if each.rule == rule and process in each.processes]
    assert any(words in each.cause for each in seen), seen
    assert all(each.evidence[0].source and each.evidence[0].at and each.todo for each in seen)


def test_nothing_else_is_named(troubled: Ended) -> None:
    provoked = {"process-died", "restarts", "cache-server-down", "pool-busy", "requests-failed", "launcher-lost"}
    assert rules(troubled.run) - provoked <= {"engine-left-routing", "node-lost"}


def test_a_deployment_that_lives_is_asked_too(troubled: Ended) -> None:
    document = read_json(troubled.said)
    assert (troubled.code, document["alive"], document["phase"]) == (10, True, "ready")
    assert {"process-died", "restarts", "pool-busy"} <= {each["rule"] for each in document["diagnoses"]}
    assert not document["unread"]


# --- while it starts


def test_a_start_that_fails_has_the_cause_of_the_log(home: Path, tmp_path: Path) -> None:
    env = {"FAKE_DIE_AT": "load", "FAKE_LAST_LINES": TOO_LONG}
    code, _ = pdserve("up", recipe(tmp_path, "refused", prefill__env=env))
    run = RunDir((home / "refused" / "current").resolve())
    [diagnosis] = diagnosed(run)
    assert code == 4
    assert (diagnosis.rule, diagnosis.processes) == ("process-died", ("prefill-0",))
    assert "max-model-len 400000 is more than the model's 8192" in diagnosis.cause
    assert "greater than the derived max_model_len" in diagnosis.evidence[1].text


# --- nothing is wrong


@pytest.mark.full
def test_a_run_without_a_fault_has_none_alive_and_afterwards(home: Path, tmp_path: Path) -> None:
    with up(recipe(tmp_path, "well"), home, name="well") as deployment:
        deployment.command.expect("serving fake at")
        assert deployment.post("/v1/completions", BODY)[0] == 200
        code, said = pdserve("doctor", "well")
        assert code == 0, said
        assert "no known cause" in said
        assert "the live figures" in said
    code, said = pdserve("doctor", str(deployment.run.path), "--json")
    assert code == 0, said
    assert json.loads(said)["diagnoses"] == []


@pytest.mark.parametrize("target", ["nothing", "./nothing", "/"])
def test_what_is_no_run_is_an_error_with_its_fix(home: Path, target: str) -> None:
    code, said = pdserve("doctor", target)
    assert code == 8
    assert "what to do:" in said
