"""The commands of a recipe's setup are done before anything else starts, and a failure of one ends the start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.deployment import assert_nothing_left, pdserve, read_json, recipe, up
from tests.launch.test_lifecycle import change

pytestmark = pytest.mark.process


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_they_run_in_order_before_the_engines_and_have_logs(tmp_path: Path, pdserve_home: Path) -> None:
    setup = [python("print('first')"), f"{sys.executable} -c 'import os; print(os.environ[\"SHARED\"])'"]
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
        assert code == 8
        assert "nothing to do while engines run" in output
        [ready] = deployment.events("up")
        assert ready["setup_seconds"] > 0
        deployment.command.interrupt()
        assert deployment.command.finish() == 0
        assert_nothing_left(deployment)


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


def test_a_first_one_that_does_not_exist_is_refused(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("up", recipe(tmp_path, setup=["no-such-program x"]))
    assert code == 3
    assert "no-such-program is not an executable program" in output
    assert "correct `setup`" in output


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


def test_a_changed_setup_restarts_the_engines_only_when_asked_to(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path, setup=[python("print('old')")])
    with up(file, pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        before = {name: deployment.id_of(name) for name in ("lmcache-0", "prefill-0", "decode-0", "proxy")}
        change(file, "setup", [python("print('new')")])
        code, output = pdserve("up", file)
        assert code == 8
        assert "setup-0, lmcache-0, prefill-0, decode-0 run(s) with another command, environment or setup" in output
        code, output = pdserve("up", file, "--replace")
        assert code == 0, output
        after = {name: deployment.id_of(name) for name in before}
        assert [name for name in before if before[name] == after[name]] == ["proxy"]
        assert pdserve("logs", "setup-0")[1].endswith("new")
        change(file, "setup", [])
        code, output = pdserve("up", file)
        assert (code, output.splitlines()[-1]) == (
            0,
            "started nothing; ready; what setup-0 did stays until pdserve down and up",
        )
