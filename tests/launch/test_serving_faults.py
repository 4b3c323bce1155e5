"""What goes wrong while a deployment serves: out of routing at once, back when proven, over when nobody is left."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pdserve.system import procfs
from pdserve.system.process import pid_end, send
from tests.launch.deployment import (
    BODY,
    LINE_SECONDS,
    Deployment,
    assert_nothing_left,
    pdserve,
    read_json,
    recipe,
    routing,
    serving,
    up,
)
from tests.launch.records import identity_of

pytestmark = pytest.mark.process

RESTART = {"policy": "on-failure", "max": 3, "backoff_seconds": 0.1, "backoff_max_seconds": 1}
TWO: dict[str, Any] = {"prefill__instances": 2, "decode__instances": 2}


def died_serving(deployment: Deployment) -> str:
    """The output of a deployment that ended itself with exit code 5 and left nothing."""
    assert deployment.command.finish() == 5, deployment.command.output
    assert_nothing_left(deployment)
    return deployment.command.output


def order(deployment: Deployment, *wanted: tuple[str, dict[str, Any]]) -> None:
    """Asserts that these events happened, in this order."""
    events = iter(deployment.events())
    for kind, fields in wanted:
        assert any(event["event"] == kind and fields.items() <= event.items() for event in events), (
            f"{kind} {fields} is missing, or came too early, in {deployment.events()}"
        )


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_the_last_instance_of_its_role_ends_the_deployment(tmp_path: Path, pdserve_home: Path, victim: str) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        serving(deployment).send_signal(victim, signal.SIGKILL)
        output = died_serving(deployment)
        order(deployment, ("died", {"name": victim, "code": -9}), ("failed", {"exit_code": 5}), ("down", {}))
    assert f"error: {victim}@" in output
    assert "killed by SIGKILL" in output
    assert "while serving" in output


def test_one_of_several_is_held_or_dies_and_the_others_serve(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path, **TWO), pdserve_home) as deployment:
        serving(deployment).send_signal("decode-0", signal.SIGSTOP)
        deployment.command.expect("deployment is degraded")
        assert routing(deployment, "decode-0")[-1] == "draining"
        assert [deployment.post("/v1/completions", BODY)[0] for _ in range(4)] == [200] * 4
        deployment.send_signal("decode-0", signal.SIGCONT)
        deployment.command.expect("deployment is ready")
        assert routing(deployment, "decode-0")[-1] == "ready"
        deployment.send_signal("decode-1", signal.SIGKILL)
        deployment.command.expect("deployment is degraded")
        assert routing(deployment, "decode-1")[-1] == "dead"
        assert [deployment.post("/v1/completions", BODY)[0] for _ in range(4)] == [200] * 4
        code, output = pdserve("status", "--json")
        status = read_json(output)
        assert (code, status["phase"]) == (5, "degraded")
        assert status["processes"]["decode-1"]["phase"] == "dead"
        assert "killed by SIGKILL" in status["processes"]["decode-1"]["note"]


def test_the_death_of_an_engine_core_is_the_death_of_its_engine(tmp_path: Path, pdserve_home: Path) -> None:
    """The API server still answers /health: nobody has to wait until it notices."""
    with up(recipe(tmp_path, prefill__env={"FAKE_CHILD": "1"}), pdserve_home) as deployment:
        root = serving(deployment).id_of("prefill-0")
        core = next(pid for pid in procfs.descendants(root.pid) if procfs.process_title(pid).startswith("VLLM::"))
        identity = identity_of(core)
        send(identity, signal.SIGKILL)
        output = died_serving(deployment)
    assert "VLLM::EngineCor" in output
    assert "of prefill" in output


def test_an_engine_without_sockets_leaves_routing_and_one_event_has_the_fix(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        records = serving(deployment).run.patches / "decode-0"
        lacking(records, 3)
        deployment.command.expect("decode-0     ran out of sockets or file descriptors: raise `ulimit -n`")
        assert routing(deployment, "decode-0")[-1] == "draining"
        code, output = pdserve("status", "--json")
        status = read_json(output)
        assert (code, status["phase"]) == (5, "degraded")
        assert "out of sockets" in status["processes"]["decode-0"]["note"]
        lacking(records, 8)
        deployment.command.expect("decode-0     has sockets again")
        deployment.command.expect("deployment is ready")
        (event,) = deployment.events("out_of_sockets")
        assert (event["name"], event["times"]) == ("decode-0", 3)
        assert routing(deployment, "decode-0")[-1] == "ready"


def lacking(records: Path, times: int) -> None:
    """What the record of a worker says that has had no socket so often."""
    (worker,) = (path for path in records.glob("*.json") if json.loads(path.read_text())["kind"] == "worker")
    record = json.loads(worker.read_text()) | {"effects": {"mooncake-pulls": {"out-of-sockets": times}}}
    partial = worker.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.replace(worker)


def test_restart_as_the_recipe_sets(tmp_path: Path, pdserve_home: Path) -> None:
    once = {**RESTART, "max": 1}
    file = recipe(tmp_path, prefill__restart=RESTART, decode__restart=once, proxy__restart=RESTART)
    with up(file, pdserve_home) as deployment:
        serving(deployment)
        for name in ("proxy", "prefill-0", "decode-0"):
            before = deployment.id_of(name)
            deployment.send_signal(name, signal.SIGKILL)
            deployment.command.expect(f"{name:<12} restart 1")
            deployment.command.expect("deployment is ready")
            assert deployment.id_of(name) != before
            assert deployment.post("/v1/completions", BODY)[0] == 200
        order(
            deployment,
            ("restarting", {"name": "decode-0", "attempt": 1}),
            ("canary", {"name": "decode-0", "ok": True}),
            ("route", {"name": "decode-0", "routing": "ready"}),
        )
        deployment.send_signal("decode-0", signal.SIGKILL)
        died_serving(deployment)
        assert [event["name"] for event in deployment.events("restarting")].count("decode-0") == 1


# LMCache ------------------------------------------------------------------------------------------------------------


def test_an_lmcache_that_dies_takes_its_prefills_out_meanwhile(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        prefill = serving(deployment).id_of("prefill-0")
        deployment.send_signal("lmcache-0", signal.SIGKILL)
        deployment.command.expect("lmcache-0    is down: prefill-0 get no traffic")
        deployment.command.expect("deployment is ready")
        order(
            deployment,
            ("died", {"name": "lmcache-0"}),
            ("route", {"name": "prefill-0", "routing": "draining"}),
            ("ready", {"name": "lmcache-0"}),
            ("canary", {"name": "prefill-0", "ok": True}),
            ("route", {"name": "prefill-0", "routing": "ready"}),
        )
        assert deployment.id_of("prefill-0") == prefill, "a prefill that comes back is not restarted"
        assert deployment.post("/v1/completions", BODY)[0] == 200


def test_lmcache_death_may_end_the_deployment(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path, lmcache__on_death="fail"), pdserve_home) as deployment:
        serving(deployment).send_signal("lmcache-0", signal.SIGKILL)
        assert "lmcache-0@" in died_serving(deployment)


def test_an_lmcache_that_stays_silent_is_replaced(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path, timeouts__unresponsive_seconds=1), pdserve_home) as deployment:
        before = serving(deployment).id_of("lmcache-0")
        deployment.send_signal("lmcache-0", signal.SIGSTOP)
        deployment.command.expect("treated as dead")
        deployment.command.expect("deployment is ready")
        assert deployment.id_of("lmcache-0") != before
        assert not before.alive()


# The supervisors themselves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", [("launcher",), ("agent",), ("launcher", "agent")], ids="+".join)
def test_a_killed_supervisor_leaves_nothing(tmp_path: Path, pdserve_home: Path, victims: tuple[str, ...]) -> None:
    stubborn = {"FAKE_IGNORE_TERM": "1", "FAKE_CHILD": "setsid", "FAKE_SHM": "leak"}
    file = recipe(tmp_path, prefill__env=stubborn, timeouts__stop_seconds=1)
    with up(file, pdserve_home) as deployment:
        everything = serving(deployment).all_ids()
        for victim in victims:
            deployment.send_signal(victim, signal.SIGKILL)
        code = deployment.command.finish()
        assert code == (-9 if "launcher" in victims else 5)
        for process in everything:
            asyncio.run(asyncio.wait_for(pid_end(process.pid), LINE_SECONDS))
        assert_nothing_left(deployment)


def test_with_keep_on_failure_what_a_death_leaves_healthy_is_kept(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home, "--keep-on-failure") as deployment:
        prefill = serving(deployment).id_of("prefill-0")
        deployment.send_signal("decode-0", signal.SIGKILL)
        deployment.command.expect("killed by SIGKILL after")
        deployment.command.expect("deployment is failed")
        assert prefill.alive()
        assert pdserve("restart", "decode-0")[0] == 0
        assert deployment.post("/v1/completions", BODY)[0] == 200


def test_a_death_during_the_proofs_is_named_beside_the_proof_that_failed(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        deployment.script("decode-0", die_at="request")
        code, output = pdserve("verify", "--json")
        assert code == 6
        report, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
        assert report["meanwhile"][0].startswith("decode-0 died: exited with code 1 after ")
        assert f"| meanwhile: {report['meanwhile'][0]}" in output
        deployment.command.finish()
    assert_nothing_left(deployment)
