"""What goes wrong while a deployment starts, its setup commands included: named at once, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.deployment import Deployment, assert_nothing_left, pdserve, read_json, recipe, up

pytestmark = pytest.mark.process

LOADING = {"FAKE_READY_AFTER": "300"}


def failed(deployment: Deployment) -> str:
    """The output of a start that failed with exit code 4 and left nothing."""
    assert deployment.command.finish() == 4, deployment.command.output
    assert_nothing_left(deployment)
    assert not deployment.events("up")
    return deployment.command.output


def test_a_healthy_start_serves_and_ctrl_c_leaves_nothing(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        status, answer = deployment.post("/v1/completions", {"model": "fake", "prompt": "one two", "max_tokens": 4})
        assert (status, len(answer["choices"])) == (200, 1)
        assert deployment.started()[0] == "lmcache-0"
        assert sorted(deployment.started()) == ["decode-0", "lmcache-0", "prefill-0", "proxy"]
        deployment.command.interrupt()
        assert deployment.command.finish() == 0
        stopped = [event["name"] for event in deployment.events("stopped")]
        assert stopped == ["proxy", "decode-0", "prefill-0", "lmcache-0"]
        assert_nothing_left(deployment)


# LMCache first, and nothing else when it fails --------------------------------------------------------------------


def only_lmcache_was_started(deployment: Deployment) -> bool:
    return deployment.started() == ["lmcache-0"]


def test_lmcache_that_dies_stops_everything_before_an_engine_starts(tmp_path: Path, pdserve_home: Path) -> None:
    last_lines = "\\n".join(f"line {number}" for number in range(100))
    env = {"FAKE_LMCACHE_DIE_AT": "start", "FAKE_LMCACHE_EXIT_CODE": "3", "FAKE_LMCACHE_LAST_LINES": last_lines}
    with up(recipe(tmp_path, lmcache__env=env), pdserve_home) as deployment:
        output = failed(deployment)
        assert only_lmcache_was_started(deployment)
        assert deployment.state().processes["lmcache-0"].note == "exited with code 3"
        assert not deployment.events("agent_gone"), "an agent that leaves after its work is no news"
        code, shown = pdserve("status")
        assert (code, "open without key" in shown) == (5, False)
    assert "lmcache (PID" in output
    assert "agent of" not in output
    lines = [line for line in output.splitlines() if "| line " in line]
    assert len(lines) == 80, "the last 80 lines of its own log"
    assert lines[-1].endswith("line 99")


def test_lmcache_killed_while_starting(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path, lmcache__env={"FAKE_LMCACHE_READY_AFTER": "300"}), pdserve_home) as deployment:
        deployment.command.expect("lmcache-0    starting")
        deployment.send_signal("lmcache-0", signal.SIGKILL)
        assert "killed by SIGKILL" in failed(deployment)
        assert only_lmcache_was_started(deployment)


def test_lmcache_that_never_answers_is_late(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path, lmcache__env={"FAKE_LMCACHE_HANG": "1"}, timeouts__lmcache_seconds=1)
    with up(file, pdserve_home) as deployment:
        output = failed(deployment)
        assert only_lmcache_was_started(deployment)
        late = deployment.events("late")[0]
        assert "Python stack of" in (deployment.run.path / late["diagnostics"]).read_text()
    assert "alive but not ready after" in output


def test_engines_that_do_not_attach_fail_the_start(tmp_path: Path, pdserve_home: Path) -> None:
    """Healthy engines that would serve without the cache, silently."""
    file = recipe(tmp_path, lmcache__env={"FAKE_LMCACHE_REGISTERED": "0"}, timeouts__attach_seconds=3)
    with up(file, pdserve_home) as deployment:
        assert "should be registered at lmcache-0, 0 are registered" in failed(deployment)


# Ports --------------------------------------------------------------------------------------------------------------


def test_a_port_held_by_a_stranger_is_found_before_anything_starts(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    port = yaml.safe_load(file.read_text())["ports"]["lmcache"]
    with socket.create_server(("127.0.0.1", port)):
        code, output = pdserve("up", file)
    assert code == 3
    assert f"lmcache-0 needs port {port}" in output
    assert f"PID {os.getpid()}" in output
    assert not pdserve_home.exists(), "nothing was recorded, because nothing was started"


# Engines ------------------------------------------------------------------------------------------------------------


def test_prefill_killed_while_loading(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path, prefill__env=LOADING), pdserve_home) as deployment:
        deployment.command.expect("prefill-0    starting")
        deployment.command.expect("decode-0     ready")
        deployment.send_signal("prefill-0", signal.SIGKILL)
        output = failed(deployment)
        died = deployment.events("died")[0]
        assert (died["name"], died["code"], died["while_starting"]) == ("prefill-0", -9, True)
        assert not deployment.events("late"), "a death is seen before any limit"
    assert "prefill-0@" in output


def test_a_proxy_that_crashes_on_import_is_seen_while_the_engines_load(tmp_path: Path, pdserve_home: Path) -> None:
    broken = [sys.executable, "-c", "import a_package_that_is_not_there"]
    file = recipe(tmp_path, proxy__command=broken, prefill__env=LOADING, decode__env=LOADING)
    with up(file, pdserve_home) as deployment:
        output = failed(deployment)
        assert deployment.events("died")[0]["name"] == "proxy"
        assert {event["name"] for event in deployment.events("ready")} == {"lmcache-0"}
    assert "No module named 'a_package_that_is_not_there'" in output


def test_a_canary_that_does_not_come_back_fails_the_start(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path, decode__env={"FAKE_DECODE_STATUS": "500"})
    with up(file, pdserve_home) as deployment:
        assert "one token through the proxy did not come back" in failed(deployment)


# Ctrl-C, anywhere ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "changes", "signum"),
    [
        ("lmcache-0    starting", {"lmcache__env": {"FAKE_LMCACHE_READY_AFTER": "300"}}, signal.SIGTERM),
        ("decode-0     ready", {"prefill__env": LOADING}, signal.SIGINT),
        ("LMCache: lmcache-0 has", {"decode__env": {"FAKE_HOLD": "first"}}, signal.SIGINT),
    ],
    ids=["LMCache starts", "engines load", "canary runs"],
)
def test_interrupted(
    tmp_path: Path, pdserve_home: Path, stage: str, changes: dict[str, Any], signum: signal.Signals
) -> None:
    with up(recipe(tmp_path, **changes), pdserve_home) as deployment:
        deployment.command.expect(stage)
        deployment.command.popen.send_signal(signum)
        assert deployment.command.finish() == 130
        assert_nothing_left(deployment)
        assert deployment.state().phase == "stopped"


# Patches are proven, not assumed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unpatched", "evidence"),
    [
        ("all", "1 api-server process(es) must report their patches, 0 did"),
        ("EngineCore", "engine-core (pid"),
    ],
)
def test_an_engine_that_is_healthy_without_its_patches_does_not_serve(
    unpatched: str, evidence: str, tmp_path: Path, pdserve_home: Path
) -> None:
    with up(recipe(tmp_path, prefill__env={"FAKE_UNPATCHED": unpatched}), pdserve_home) as deployment:
        output = failed(deployment)
        assert "prefill-0@" in output
        assert "not every process of it runs with its patches" in output
        assert evidence in output
        assert "multiconnector-prom-metrics" in output or unpatched == "all"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_commands_of_the_setup_run_in_order_before_all_else(tmp_path: Path, pdserve_home: Path) -> None:
    setup: list[object] = [
        python("print('first')"),
        f"{sys.executable} -c 'import os; print(os.environ[\"SHARED\"])'",
    ]
    file = recipe(tmp_path, setup=setup, engine__env={"SHARED": "second", "VLLM_CPU_KVCACHE_SPACE": 1})
    code, output = pdserve("up", file, "--dry-run")
    assert (code, "run_setup_1()" in output) == (0, True)
    with up(file, pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        history = [(event["event"], event.get("name")) for event in deployment.events()]
        order = [("ready", "setup-0"), ("start", "setup-1"), ("ready", "setup-1"), ("start", "lmcache-0")]
        assert [history.index(event) for event in order] == sorted(history.index(event) for event in order)
        assert pdserve("logs", "setup-0")[1].endswith("first")
        assert pdserve("logs", "setup-1")[1].endswith("second")
        code, output = pdserve("status", "--json")
        shown = read_json(output)
        assert (code, shown["phase"], shown["processes"]["setup-1"]["phase"]) == (0, "ready", "done")
        code, output = pdserve("restart", "setup-0")
        assert (code, "nothing to do while engines run" in output) == (8, True)
        [ready] = deployment.events("up")
        assert ready["setup_seconds"] > 0
        deployment.command.interrupt()
        assert deployment.command.finish() == 0
        assert_nothing_left(deployment)
        ended = deployment.state().processes
        assert all(ended[name].died_at for name in ("setup-1", "decode-0")), "by which `down` tells strangers apart"


def test_one_that_fails_ends_the_start_with_its_log(tmp_path: Path, pdserve_home: Path) -> None:
    setup = [python("import sys; print('no such mirror'); sys.exit(3)"), python("print('never')")]
    with up(recipe(tmp_path, setup=setup), pdserve_home) as deployment:
        assert deployment.command.finish() == 4
        assert deployment.started() == ["setup-0"]
        output = deployment.command.output
    node = deployment.run.read_plan().process("setup-0").node
    assert f"setup-0@{node}: setup (PID" in output
    assert "exited with code 3" in output
    assert "likely cause: a command of the recipe's setup failed" in output
    assert "| no such mirror" in output


def test_a_later_one_may_be_installed_by_an_earlier_one(tmp_path: Path, pdserve_home: Path) -> None:
    """If it is not, that ends the start."""
    file = tmp_path / "tool"
    install = (
        f"import pathlib; f = pathlib.Path({str(file)!r}); f.write_text('#!/bin/sh\\necho runs\\n'); f.chmod(0o755)"
    )
    with up(recipe(tmp_path, setup=[python(install), str(file), "no-such-program"]), pdserve_home) as deployment:
        assert deployment.command.finish() == 4
        assert deployment.started() == ["setup-0", "setup-1", "setup-2"]
        assert "could not be executed: [Errno 2]" in deployment.command.output
    assert pdserve("logs", "setup-1")[1].endswith("runs")


def test_one_that_takes_too_long_ends_the_start_and_is_ended(tmp_path: Path, pdserve_home: Path) -> None:
    setup = [python("import signal; signal.pause()")]
    with up(recipe(tmp_path, setup=setup, timeouts__setup_seconds=0.5), pdserve_home) as deployment:
        assert deployment.command.finish() == 4
        assert "setup is alive but not ready after" in deployment.command.output
        assert "timeouts.setup_seconds" in deployment.command.output
        assert_nothing_left(deployment)
