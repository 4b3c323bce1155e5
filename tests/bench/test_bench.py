"""`pdserve bench` over fake engines and fake clients: a healthy deployment is VALID, each fault of it is INVALID."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pdserve.system import procfs
from pdserve.system.process import MARKER
from pdserve.system.procfs import ProcessId
from tests.bench.kit import bench, reasons, serving_at, stand_in
from tests.launch.deployment import Command, Deployment, pdserve, recipe, until, up
from tests.sizing.kit import CONFIG

pytestmark = pytest.mark.process

LENGTHS = ("--isl", "600", "--osl", "4")
FEW = ("--requests", "6", "--concurrency", "2", "--repeats", "1", "--warmup", "0", *LENGTHS)
TRACED = ("--trace", "agentic-tiny", "--concurrency", "2", "--repeats", "1", "--warmup", "0")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with serving_at(tmp_path_factory.mktemp("bench"), 0.02) as deployment:
        model = deployment.run.read_plan().model_path
        assert model is not None
        (Path(model) / "config.json").write_text(json.dumps(CONFIG))  # fakes do not read it; the planner does
        yield deployment


@pytest.fixture
def python(tmp_path: Path) -> str:
    """What stands for the engines' interpreter: it runs the fake client."""
    return stand_in(tmp_path, "bench_client.py")


@pytest.fixture
def aiperf(tmp_path: Path) -> str:
    """What stands for the interpreter of AIPerf's environment."""
    return stand_in(tmp_path, "aiperf_client.py")


def clients(folder: Path) -> list[ProcessId]:
    """The fake clients of benchmarks in this folder that run."""
    ours = tuple(f"bench-{path.name}/".encode() for path in folder.glob("*"))
    named = procfs.environment_values(MARKER)
    return procfs.identities(pid for pid, name in named.items() if name.startswith(ours))


def test_a_healthy_deployment_is_valid_and_the_result_has_what_was_measured(serving: Deployment, python: str) -> None:
    loads = ("--concurrency", "1,2", "--warmup", "2", "--slo", "ttft=60000,itl=60000")
    code, result, output = bench("--python", python, *FEW, *loads)
    assert (code, reasons(result)) == (0, set()), output
    assert [each["load"]["concurrency"] for each in result["measurements"]] == [1, 2]
    first = result["measurements"][0]
    assert (first["figures"]["input_tokens"], first["figures"]["output_tokens"]) == (3600, 24)
    assert first["figures"]["good_share"] == 1.0
    assert first["window"]["prefill"]["computed"] == 3600, "warm-ups are outside of the window, and nothing was cached"
    assert first["window"]["decode"]["received"] == 3600
    assert first["window"]["lmcache"]["written"] == 6 * (600 // 256)
    assert result["provenance"]["recipe"].startswith("schema")
    assert result["provenance"]["versions"]["pdserve"]
    planned = result["provenance"]["planned"].keys()
    assert {"prefill: KV of a token and rank", "decode: KV of a token and rank"} <= planned
    folder = Path(result["folder"])
    assert json.loads((folder / "result.json").read_text())["workload"]["slo"] == {"ttft": 60000.0, "itl": 60000.0}
    assert (folder / first["raw"]).exists()
    history = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {"prefill-0", "decode-0"} <= {event.get("name") for event in history if event["event"] == "ready"}
    assert serving.run.read_key() not in (folder / "result.json").read_text() + (folder / first["log"]).read_text()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [({"decode_status": 500}, {"completed", "errors"}), ({"drop_after": 2}, {"output-length"})],
    ids=["every-request-fails", "streams-are-cut"],
)
def test_failures_are_invalid(serving: Deployment, python: str, fault: dict[str, int], expected: set[str]) -> None:
    serving.script("decode-0", **fault)
    try:
        code, result, output = bench("--python", python, *FEW)
    finally:
        serving.script("decode-0", **dict.fromkeys(fault, 0))
    assert (code, reasons(result)) == (9, expected), output
    assert "error: fake: 1 of 1 measurements are INVALID" in output


@pytest.mark.parametrize(
    ("fault", "reason"), [("die", "client"), ("other-tokenizer", "prompt-length")], ids=["client-dies", "tokenizer"]
)
def test_a_client_that_fails_or_asks_something_else_makes_it_invalid(
    serving: Deployment, python: str, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_CLIENT", fault)
    code, result, output = bench("--python", python, *FEW)
    assert code == 9, output
    assert reason in reasons(result)


def test_a_client_that_hangs_is_stopped(serving: Deployment, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CLIENT", "hang")
    code, _, output = bench("--python", python, *FEW, "--limit", "2")
    assert code == 9, output
    assert "was stopped after 2 s (--limit)" in output


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["int", "term", "hup"]
)
def test_a_signal_that_ends_it_stops_the_client_too(
    serving: Deployment, python: str, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, code: int
) -> None:
    monkeypatch.setenv("FAKE_CLIENT", "hang")
    folder = serving.run.path.parent / "bench"
    command = Command("bench", "--python", python, *FEW)
    until(lambda: bool(clients(folder)))
    (client,) = clients(folder)
    command.popen.send_signal(signum)
    assert command.finish() == code, command.output
    assert not client.alive()


def test_an_interpreter_that_is_not_there_is_refused_with_the_fix(serving: Deployment) -> None:
    code, output = pdserve("bench", "--python", "/nowhere/python", *FEW)
    assert code == 3
    assert "the client cannot be started" in output
    assert "--python" in output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--concurrency", "1,two"), 2, "'two' is no number above 0"),
        (("--concurrency", "8", "--requests", "7"), 2, "7 requests are never 8 at a time"),
        (("--concurrency", "1"), 8, "pdserve up"),
    ],
    ids=["a wrong option", "options that contradict", "a deployment that does not run"],
)
def test_what_cannot_be_measured_is_refused(
    pdserve_home: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    ended, output = pdserve("bench", *arguments)
    assert ended == code
    assert text in " ".join(output.replace("│", " ").split())


def test_a_death_is_invalid(tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TOKEN_SECONDS", "0.2")
    with up(recipe(tmp_path, decode__instances=2), pdserve_home) as deployment:
        deployment.command.expect("serving fake")
        command = Command("bench", "--json", "--python", python, *FEW)
        folder = pdserve_home / "fake" / "bench"
        until(lambda: any(folder.glob("*/*.log")))
        deployment.send_signal("decode-1", signal.SIGKILL)
        assert command.finish() == 9, command.output
        assert "processes: decode-1 died" in command.output


# --- traces, which AIPerf replays


def test_a_trace_keeps_its_sessions_and_both_its_hits(serving: Deployment, aiperf: str) -> None:
    code, result, output = bench("--python", aiperf, *TRACED, "--sessions", "3")
    assert (code, reasons(result)) == (0, set()), output
    assert result["provenance"]["client"] == "AIPerf 0.13.0"
    assert result["provenance"]["versions"]["aiperf"] == "0.13.0"
    assert result["workload"]["trace_digest"] == result["trace"]["digest"]
    (one,) = result["measurements"]
    assert one["load"]["requests"] == one["figures"]["completed"] == 15
    window = one["window"]["prefill"]
    hits = window["local_hits"] + window["received"]
    assert hits / (hits + window["computed"]) == pytest.approx(result["trace"]["prefix_hit"], abs=0.1)
    assert not one["verdict"]["unchecked"]
    folder = Path(result["folder"])
    assert (folder / one["raw"]).read_text().count("\n") == 15
    assert not [file for file in folder.iterdir() if file.is_file() and serving.run.read_key() in file.read_text()]
    log = "".join(file.read_text() for file in serving.run.logs.glob("proxy*"))
    assert log.count("/v1/chat/completions") >= 15


@pytest.mark.full
def test_each_repeat_of_a_trace_is_as_cold_as_the_first_and_the_proxy_gets_its_sessions(
    serving: Deployment, aiperf: str
) -> None:
    repeated = ("--sessions", "2", "--repeats", "2", "--warmup", "5", "--session-header", "X-Session-ID")
    code, result, output = bench("--python", aiperf, *TRACED, *repeated)
    assert (code, reasons(result)) == (0, set()), output
    first, second = (each["window"]["prefill"]["computed"] for each in result["measurements"])
    assert first == pytest.approx(second, rel=0.1)
    plan = serving.run.read_plan()
    decode = next(worker.url for worker in plan.proxy.workers if worker.name == "decode-0")
    headers = {"Authorization": f"Bearer {serving.run.read_key()}"}
    sent = httpx.get(f"{decode}/fake/requests", headers=headers, trust_env=False).json()[-10:]
    assert len({request["headers"].get("x-session-id") for request in sent}) == 2
