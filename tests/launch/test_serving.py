"""A deployment that serves: what is shown of it, what stays as it is, what comes back. All tests share one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.patches.registry import REGISTRY
from tests.launch import deployment as harness
from tests.launch.deployment import (
    BODY,
    PDSERVE,
    Deployment,
    assert_nothing_left,
    execute,
    home_in,
    pdserve,
    recipe,
    up,
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe(tmp_path_factory.mktemp("serving"), model__path="model")


@pytest.fixture(scope="module")
def serving(file: Path) -> Iterator[Deployment]:
    with home_in(file.parent) as home, up(file, home) as deployment:
        yield harness.serving(deployment)


def output_of(*arguments: str) -> str:
    """What a command prints; it must succeed."""
    code, output = pdserve(*arguments)
    assert code == 0, output
    return output


def shown(verb: str, file: Path, *words: str) -> dict[str, Any]:
    """What a verb says that `up` with these words would do, without the run."""
    code, output = pdserve(verb, file, *words, "--json", *(["--dry-run"] if verb == "up" else []))
    assert code == 0, output
    change: dict[str, Any] = json.loads(output[output.index("{\n") :])["change"]
    return {what: names for what, names in change.items() if what != "run"}


def pids(deployment: Deployment) -> dict[str, int]:
    """Of all that runs but the proxy, which is told of its workers by a new file."""
    processes = deployment.run.read_state().processes
    return {name: each.id.pid for name, each in processes.items() if name != "proxy" and each.id is not None}


def test_each_patch_is_shown_where_it_is_active(serving: Deployment) -> None:
    [event, *_] = serving.events("patched")
    assert "multiconnector-prom-metrics" in event["processes"]["prefill-0"]
    assert sorted(event["processes"]) == ["decode-0", "prefill-0"]
    rows = {row["name"]: row for row in json.loads(output_of("patches", "--json"))["patches"]}
    assert list(rows) == [patch.name for patch in REGISTRY]
    assert rows["multiconnector-prom-metrics"]["active"] == {"prefill-0": ["api-server", "engine-core", "worker"]}
    assert "active:  prefill-0: api-server, engine-core, worker" in output_of("patches")
    status = json.loads(output_of("status", "--json"))
    processes = status["processes"]["prefill-0"]["patch_processes"]
    assert [process["kind"] for process in processes] == ["api-server", "engine-core", "worker"]


def test_what_is_out_of_the_ordinary_is_shown_by_status(serving: Deployment) -> None:
    folder = serving.run.patches / "prefill-0"
    path = next(path for path in folder.iterdir() if "engine-core" in path.read_text())
    before = path.read_text()
    changes = {
        "allowed_unknown": ["multiconnector-prom-metrics"],
        "skipped": {"some-optional-patch": "vllm.x.y is none of the known ones"},
        "effects": {"multiconnector-prom-metrics": {"observations-dropped": 3}},
    }
    path.write_text(json.dumps(json.loads(before) | changes))
    try:
        output = output_of("status")
    finally:
        path.write_text(before)
    assert "applied to unknown upstream code, as the recipe allows: multiconnector-prom-metrics in prefill-0" in output
    assert "patch left out: some-optional-patch in prefill-0: vllm.x.y is none of the known ones" in output
    assert "patch effects of prefill-0: multiconnector-prom-metrics: observations-dropped 3" in output


def test_engines_and_cache_stay_when_another_comes_and_goes_and_that_is_shown_before(
    serving: Deployment, file: Path
) -> None:
    first = pids(serving)
    more = ("--set", "prefill.instances=2")
    said = shown("up", file, *more)
    assert said["start"] == ["prefill-1"]
    assert said["stop"] == []
    assert {"lmcache-0", "prefill-0", "decode-0"} <= {*said["stay"]}
    assert pdserve("up", file, *more)[0] == 0
    second = pids(serving)
    assert {name: second[name] for name in first} == first
    assert second.keys() - first.keys() == {"prefill-1"}
    assert shown("up", file)["stop"] == ["prefill-1"]
    assert "\n#   stop prefill-1\n" in pdserve("up", file, "--dry-run")[1]
    assert pdserve("up", file)[0] == 0
    assert pids(serving) == first
    assert "pdserve up would change nothing" in pdserve("up", file, "--dry-run")[1]


def test_what_needs_replace_is_shown_and_restarted_with_it_only(serving: Deployment, file: Path) -> None:
    other = ("--set", "decode.args.max-num-seqs=3")
    assert shown("up", file, *other)["restart"] == ["decode-0"]
    assert "#   restart decode-0: only with --replace" in pdserve("up", file, *other, "--dry-run")[1]
    assert "#   restart decode-0\n" in pdserve("up", file, *other, "--dry-run", "--replace")[1]
    before = serving.id_of("decode-0")
    code, output = pdserve("up", file, *other)
    assert (code, "decode-0 run(s) with another command" in output) == (8, True)
    assert serving.id_of("decode-0") == before
    output_of("up", str(file), *other, "--replace")
    assert serving.id_of("decode-0") != before
    output_of("up", str(file), "--replace")


def test_what_is_refused_leaves_all_as_it_is(serving: Deployment, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pids(serving), serving.id_of("proxy")
    monkeypatch.setenv("LATE_TOKEN", "value")
    code, output = pdserve("up", file, "--set", "decode.env.HF_TOKEN.secret=LATE_TOKEN", "--replace")
    assert (code, "LATE_TOKEN" in output) == (8, True), "a launcher knows the secrets of its start"
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        code, output = pdserve("up", file, "--set", f"ports.proxy={stranger.getsockname()[1]}")
    assert (code, "proxy needs port" in output) == (3, True)
    code, output = pdserve("run", file, "--", "true")
    assert (code, "fake is running already" in output) == (208, True)
    assert (pids(serving), serving.id_of("proxy")) == before
    assert serving.post("/v1/completions", BODY)[0] == 200


def test_up_without_a_recipe_is_no_change(serving: Deployment, file: Path) -> None:
    """From any folder: what is recorded names its model by its absolute path."""
    away = file.rename(file.with_suffix(".away"))
    try:
        assert execute(*PDSERVE, "up").stdout.endswith("already up\n")
    finally:
        away.rename(file)


def test_restart_by_name(serving: Deployment) -> None:
    for name in ("prefill-0", "lmcache-0"):
        before = serving.id_of(name)
        assert pdserve("restart", name) == (0, f"{name} is ready")
        assert serving.id_of(name) != before
        assert not before.alive()
    assert serving.post("/v1/completions", BODY)[0] == 200
    code, output = pdserve("restart", "prefill-7")
    assert code == 8
    assert "no process called 'prefill-7'" in output


@pytest.mark.ends_fixture
def test_down_from_another_terminal_ends_a_foreground_up(serving: Deployment, file: Path) -> None:
    assert pdserve("down") == (0, "fake: stopped")
    assert serving.command.finish() == 0
    assert_nothing_left(serving)
    assert "change" not in json.loads(pdserve("up", file, "--dry-run", "--json")[1])


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_without_a_deployment_all_patches_are_shown_all_the_same(json_: list[str], pdserve_home: Path) -> None:
    output = output_of("patches", *json_)
    assert all(patch.name in output for patch in REGISTRY)


def test_patches_of_a_deployment_that_does_not_exist_are_an_error(pdserve_home: Path) -> None:
    code, output = pdserve("patches", "nonsense")
    assert code == 8, output
