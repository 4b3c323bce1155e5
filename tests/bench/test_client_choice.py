"""Which client sends what, and what each is given: command line, configuration, environment. No secret is in the first
two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from pdserve.bench.clients import AiperfClient, ClientRun, VllmClient, client_of
from pdserve.bench.workload import AGENTIC, Load, RequestTrace, Workload, read_trace
from pdserve.cli import bench
from pdserve.errors import PreflightError
from tests.bench.evidence import plan
from tests.bench.kit import AGENTIC_SESSIONS, AGENTIC_TURNS
from tests.tables import each_row

KEY = "sk-very-secret"
FIXED = Workload(input_tokens=300, output_tokens=5)
TRACE = Workload(trace=AGENTIC)
FOUR = Load(requests=40, concurrency=4)


def trace(sessions: int | None = None) -> RequestTrace:
    return read_trace(AGENTIC, output_tokens=128, sessions=sessions)


def run(folder: Path, workload: Workload = TRACE, load: Load = FOUR, **changes: Any) -> ClientRun:
    values: dict[str, Any] = {"plan": plan(), "salt": "salt-1", "seed": 7, "folder": folder, "name": "one"}
    return ClientRun(workload=workload, load=load, **(values | changes))


def told(folder: Path, client: AiperfClient, asked: ClientRun) -> dict[str, Any]:
    """The configuration that AIPerf is given."""
    try:
        argv = client.prepare(asked)
    finally:
        client.clean(asked)
    assert argv[:-1] == [client.program, "-I", "-m", "aiperf", "profile", "--config"]
    settings: dict[str, Any] = json.loads(Path(argv[-1]).read_text())
    return settings


@each_row("workload, load, client", [
    (FIXED, FOUR, "vllm"), (TRACE, FOUR, "aiperf"),
    (FIXED.model_copy(update={"client": "aiperf"}), FOUR, "aiperf"),
    (FIXED, FOUR.model_copy(update={"seconds": 5.0}), "aiperf"),
])  # fmt: skip
def test_aiperf_is_the_client_only_where_it_is_needed_or_chosen(workload: Workload, load: Load, client: str) -> None:
    assert workload.client_for(load) == client


@each_row("typed, load, text", [
    ({"client": "guidellm"}, {}, "'guidellm' is no client"),
    ({"trace": AGENTIC}, {"requests": 9}, "a trace has its own requests"),
    ({"trace": AGENTIC}, {"concurrencies": "9"}, "8 sessions are never 9 at a time"),
    ({"client": "vllm"}, {"seconds": 5.0}, "vllm bench serve has none"),
    ({}, {"grace_seconds": 5.0}, "it is the time after --duration"),
    ({"trace": AGENTIC, "input_tokens": 3}, {}, "a trace has its own prompts"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(typed: dict[str, Any], load: dict[str, Any], text: str) -> None:
    every = {"client": None, "input_tokens": None, "output_tokens": None, "trace": None}
    loads: dict[str, Any] = {"concurrencies": "1", "rates": None, "requests": None}
    with pytest.raises(typer.BadParameter, match=text):
        bench.work(bench.workload(**(every | typed)), **(loads | load))


def test_a_trace_has_as_many_requests_as_its_sessions_and_its_digest_is_kept() -> None:
    asked = bench.workload(client=None, input_tokens=None, output_tokens=None, trace=AGENTIC, sessions=3)
    workload, (load,), read = bench.work(asked, "3", None, None)
    assert read is not None
    assert (load.requests, workload.trace_digest) == (3 * AGENTIC_TURNS, read.digest)


def test_fixed_lengths_are_text_completions_whose_requests_are_all_different(tmp_path: Path) -> None:
    settings = told(tmp_path, AiperfClient("python", "/m"), run(tmp_path, FIXED))["benchmark"]
    assert settings["endpoint"]["type"] == "completions"
    assert settings["dataset"]["entries"] == 40
    assert settings["dataset"]["prompts"]["isl"] == {"mean": 300, "stddev": 0}
    assert settings["profiling"] == {"type": "concurrency", "concurrency": 4, "requests": 40}


def test_a_trace_is_replayed_by_sessions_with_a_salt_and_the_header_of_the_session(tmp_path: Path) -> None:
    settings = told(tmp_path, AiperfClient("python", "/m", trace()), run(tmp_path))["benchmark"]
    endpoint = settings["endpoint"]
    assert (endpoint["type"], endpoint["sessionHeader"]) == ("chat", "X-Session-ID")
    assert endpoint["extra"] == {"ignore_eos": True, "temperature": 0, "cache_salt": "salt-1"}
    assert settings["profiling"] == {"type": "concurrency", "concurrency": 4, "sessions": AGENTIC_SESSIONS}
    assert settings["dataset"]["format"] == "mooncake_trace"
    lines = Path(settings["dataset"]["path"]).read_text().splitlines()
    assert len(lines) == AGENTIC_SESSIONS * AGENTIC_TURNS


def test_a_warm_up_takes_the_first_sessions_that_have_its_requests(tmp_path: Path) -> None:
    asked = run(tmp_path, load=Load(requests=AGENTIC_TURNS + 1, concurrency=1), warmup=True)
    settings = told(tmp_path, AiperfClient("p", "/m", trace()), asked)["benchmark"]
    assert settings["profiling"]["sessions"] == 2
    assert len(Path(settings["dataset"]["path"]).read_text().splitlines()) == 2 * AGENTIC_TURNS


def test_a_rate_is_poisson_and_a_time_has_its_grace(tmp_path: Path) -> None:
    timed = Load(requests=9, rate=2.5, seconds=60)
    settings = told(tmp_path, AiperfClient("p", "/m"), run(tmp_path, FIXED, timed))["benchmark"]
    assert settings["profiling"] == {"type": "poisson", "rate": 2.5, "requests": 9, "duration": 60, "gracePeriod": 30.0}


@each_row("client", [AiperfClient("p", "/m", trace(2)), VllmClient("p", "/m")])
def test_the_key_is_in_the_environment_and_nowhere_else(tmp_path: Path, client: AiperfClient | VllmClient) -> None:
    asked = run(tmp_path, TRACE if isinstance(client, AiperfClient) else FIXED)
    environ = {"http_proxy": "http://proxy", "PDSERVE_PATCHES": "x", "HOME": "/h", "PYTHONPATH": "/ours"}
    environment = client.environment(asked, environ, KEY)
    argv = client.prepare(asked)
    client.clean(asked)
    assert environment["OPENAI_API_KEY"] == KEY
    assert KEY not in " ".join(argv)
    assert not [file for file in tmp_path.iterdir() if KEY in file.read_text()]
    assert "http_proxy" not in environment
    assert environment["HOME"] == "/h"


def test_aiperf_gets_none_of_our_packages_and_is_not_told_to_be_offline(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours", "HF_HUB_OFFLINE": "1"}
    environment = AiperfClient("p", "/m").environment(run(tmp_path), environ, KEY)
    assert not environ.keys() & environment.keys()


def test_what_aiperf_leaves_in_the_temporary_folder_is_removed(tmp_path: Path) -> None:
    """Its cache of prompts in the user's folder is turned off."""
    client, asked = AiperfClient("p", "/m"), run(tmp_path, FIXED)
    client.prepare(asked)
    environment = client.environment(asked, {}, KEY)
    assert environment["AIPERF_DATASET_MMAP_CACHE_ENABLED"] == "false"
    folder = Path(environment["TMPDIR"])
    assert folder.stat().st_mode & 0o077 == 0
    (folder / "prompts").write_text("secret")
    client.clean(asked)
    assert not folder.exists()


def test_without_its_environment_aiperf_is_refused_with_the_fix(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(PreflightError, match="is not installed") as error:
        client_of(plan(), TRACE, FOUR, trace(), environ, python=None, tokenizer=None)
    assert "pdserve bench --setup" in str(error.value.todo)
    assert isinstance(client_of(plan(), TRACE, FOUR, trace(), environ, python="/p", tokenizer=None), AiperfClient)


def test_the_folder_of_a_model_is_an_id_of_a_hub_that_aiperf_has_for_itself(tmp_path: Path) -> None:
    """Its workers take a folder for an id, and refuse it (0.13.0)."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    client, asked = AiperfClient("p", str(model), trace()), run(tmp_path)
    settings = json.loads(Path(client.prepare(asked)[-1]).read_text())
    environment = client.environment(asked, {"HF_HUB_CACHE": "/theirs"}, KEY)
    hub = Path(environment["HF_HUB_CACHE"])
    entry = hub / f"models--{settings['benchmark']['tokenizer']['name'].replace('/', '--')}"
    commit = (entry / "refs" / "main").read_text()
    assert (entry / "snapshots" / commit / "tokenizer.json").samefile(model / "tokenizer.json")
    assert environment["HF_HUB_OFFLINE"] == "1"
    client.clean(asked)
    assert not hub.exists()
    assert (model / "tokenizer.json").exists(), "the model itself is left alone"


def trusting(folder: Path) -> ClientRun:
    """The engines run the code of their model."""
    some = run(folder, name="trusting")
    argv = [p.model_copy(update={"argv": (*p.argv, "--trust-remote-code")}) for p in some.plan.processes]
    return replace(some, plan=some.plan.model_copy(update={"processes": tuple(argv)}))


def test_a_client_runs_the_code_of_a_model_where_the_engines_do(tmp_path: Path) -> None:
    """Where it is their model's: another tokenizer is of somebody else."""
    some, other = run(tmp_path), trusting(tmp_path)
    model = some.plan.model_path or some.plan.model
    for asked, tokenizer, trusts in ((some, model, False), (other, model, True), (other, "org/else", False)):
        settings = told(tmp_path, AiperfClient("p", tokenizer), asked)["benchmark"]["tokenizer"]
        assert settings.get("trustRemoteCode", False) is trusts
        fixed = replace(asked, workload=FIXED)
        assert ("--trust-remote-code" in VllmClient("p", tokenizer).prepare(fixed)) is trusts


def test_of_a_model_that_is_pinned_no_other_code_runs(tmp_path: Path) -> None:
    """vLLM's client takes no revision."""
    asked = trusting(tmp_path)
    pins = {"model": "org/model", "model_path": None, "revision": "0123abcd"}
    asked = replace(asked, plan=asked.plan.model_copy(update=pins))
    settings = told(tmp_path, AiperfClient("p", "org/model"), asked)["benchmark"]["tokenizer"]
    assert settings == {"name": "org/model", "revision": "0123abcd", "trustRemoteCode": True}
    other = told(tmp_path, AiperfClient("p", "org/else"), replace(asked, name="other"))["benchmark"]["tokenizer"]
    assert other == {"name": "org/else"}
    assert "--trust-remote-code" not in VllmClient("p", "org/model").prepare(replace(asked, workload=FIXED))
