"""`pdserve bench` over fake engines and a fake client: a healthy deployment is VALID, each fault of it is INVALID."""

from __future__ import annotations

import json
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.system import procfs
from pdserve.system.process import MARKER
from pdserve.system.procfs import ProcessId
from tests.bench.kit import serving_at, stand_in
from tests.launch.deployment import Command, Deployment, pdserve, recipe, up
from tests.sizing.kit import CONFIG

pytestmark = pytest.mark.process

LENGTHS = ("--isl", "600", "--osl", "4")
FEW = ("--requests", "6", "--concurrency", "2", "--repeats", "1", "--warmup", "0", *LENGTHS)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with serving_at(tmp_path_factory.mktemp("bench"), 0.01) as deployment:
        model = deployment.run.read_plan().model_path
        assert model is not None
        (Path(model) / "config.json").write_text(json.dumps(CONFIG))  # fakes do not read it; the planner does
        yield deployment


@pytest.fixture
def python(tmp_path: Path) -> str:
    """What stands for the engines' interpreter: it runs the fake client."""
    return stand_in(tmp_path, "bench_client.py")


def bench(python: str, *arguments: str) -> tuple[int, Any, str]:
    """Exit code, result, and all that was printed."""
    code, output = pdserve("bench", "--json", "--python", python, *(arguments or FEW))
    result, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))  # an error follows
    return code, result, output


def reasons(result: Any) -> set[str]:
    return {reason["check"] for each in result["measurements"] for reason in each["verdict"]["reasons"]}


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.05)


def clients(folder: Path) -> list[ProcessId]:
    """The fake clients of benchmarks in this folder that run."""
    ours = tuple(f"bench-{path.name}/".encode() for path in folder.glob("*"))
    named = procfs.environment_values(MARKER)
    return procfs.identities(pid for pid, name in named.items() if name.startswith(ours))


def scripted(deployment: Deployment, name: str, **faults: object) -> None:
    plan = deployment.run.read_plan()
    url = next(worker.url for worker in plan.proxy.workers if worker.name == name)
    httpx.post(f"{url}/fake/script", json=faults, trust_env=False).raise_for_status()


def test_a_healthy_deployment_is_valid_and_the_result_has_what_was_measured(serving: Deployment, python: str) -> None:
    code, result, output = bench(
        python,
        "--requests",
        "6",
        "--concurrency",
        "1,2",
        "--repeats",
        "1",
        "--warmup",
        "2",
        *LENGTHS,
        "--slo",
        "ttft=60000,itl=60000",
    )
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
    assert {"prefill: KV of a token and rank", "decode: KV of a token and rank"} <= result["provenance"][
        "planned"
    ].keys()
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
    scripted(serving, "decode-0", **fault)
    try:
        code, result, output = bench(python)
    finally:
        scripted(serving, "decode-0", **dict.fromkeys(fault, 0))
    assert (code, reasons(result)) == (9, expected), output
    assert "error: fake: 1 of 1 measurements are INVALID" in output


@pytest.mark.parametrize(
    ("fault", "reason"), [("die", "client"), ("other-tokenizer", "prompt-length")], ids=["client-dies", "tokenizer"]
)
def test_a_client_that_fails_or_asks_something_else_makes_it_invalid(
    serving: Deployment, python: str, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_CLIENT", fault)
    code, result, output = bench(python)
    assert code == 9, output
    assert reason in reasons(result)


def test_a_client_that_hangs_is_stopped(serving: Deployment, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CLIENT", "hang")
    code, _, output = bench(python, *FEW, "--limit", "2")
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
    wait_until(lambda: bool(clients(folder)))
    (client,) = clients(folder)
    command.popen.send_signal(signum)
    assert command.finish() == code, command.output
    assert not client.alive()


def test_the_site_proxy_is_not_used(serving: Deployment, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    code, _, output = bench(python)
    assert code == 0, output


def test_an_interpreter_that_is_not_there_is_refused_with_the_fix(serving: Deployment) -> None:
    code, output = pdserve("bench", "--python", "/nowhere/python", *FEW)
    assert code == 3
    assert "the client cannot be started" in output
    assert "--python" in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--concurrency 1,4,8"),
        (("--concurrency", "1,two"), "'two' is no number above 0"),
        (("--concurrency", "1.5"), "1.5 is no whole number"),
        (("--rate", "0"), "'0' is no number above 0"),
        (("--concurrency", "1", "--slo", "latency=3"), "no limit"),
        (("--concurrency", "8", "--requests", "7"), "7 requests are never 8 at a time"),
    ],
)
def test_a_wrong_option_is_refused(pdserve_home: Path, arguments: tuple[str, ...], text: str) -> None:
    code, output = pdserve("bench", *arguments)
    assert code == 2
    assert text in " ".join(output.replace("│", " ").split())


def test_a_deployment_that_does_not_run_is_refused(pdserve_home: Path) -> None:
    code, output = pdserve("bench", "--concurrency", "1")
    assert code == 8
    assert "pdserve up" in output


def test_a_death_is_invalid(tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TOKEN_SECONDS", "0.2")
    with up(recipe(tmp_path, decode__instances=2), pdserve_home) as deployment:
        deployment.command.expect("serving fake")
        command = Command("bench", "--json", "--python", python, *FEW)
        folder = pdserve_home / "fake" / "bench"
        wait_until(lambda: any(folder.glob("*/*.log")))
        deployment.send_signal("decode-1", signal.SIGKILL)
        assert command.finish() == 9, command.output
        assert "processes: decode-1 died" in command.output
