"""Two prefills and two decodes on the real stack: every proof holds, and every instance takes part."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pdserve.system.process import send
from tests.launch.deployment import REPOSITORY, Deployment, pdserve, read_json
from tests.real import kv_corruption, kv_faults
from tests.real.conftest import brought_up, member, status_of_all

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files tell the engines what to do wrong."""
    return tmp_path_factory.mktemp("faults") / "orders"


@pytest.fixture(scope="module")
def tiny(home: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    recipe = tmp_path_factory.mktemp("recipe") / "tiny-cpu-2p2d.yaml"
    document = {
        "extends": str(REPOSITORY / "recipes" / "tiny-cpu-2p2d.yaml"),
        "name": "tiny-cpu-2p2d",
        "engine": {"env": kv_faults.installed(faults)},
        "decode": {"restart": {"policy": "never"}},
    }
    recipe.write_text(yaml.safe_dump(document))
    yield from brought_up("tiny-cpu-2p2d", home, recipe)


def test_every_proof_is_proven(tiny: Deployment) -> None:
    code, output = pdserve("verify", "--json")
    assert code == 0, output


def test_every_instance_took_part(tiny: Deployment) -> None:
    _, status = status_of_all()
    engines = {name: process["engine"] for name, process in status["processes"].items() if process["engine"]}
    assert set(engines) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert all(sum(engine["prompt_tokens"].values()) > 0 for engine in engines.values()), engines


def test_every_process_proves_its_patches_the_workers_too(tiny: Deployment) -> None:
    plan, (_, status) = tiny.run.read_plan(), status_of_all()
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        reported = status["processes"][name]["patch_processes"]
        assert sorted(record["kind"] for record in reported) == ["api-server", "engine-core", "worker"]
        assert {tuple(record["active"]) for record in reported} == {plan.process(name).patches}


def test_a_peer_whose_transfers_fail_is_found_by_a_new_engine_and_restarted(tiny: Deployment, faults: Path) -> None:
    lost = faults / kv_corruption.LOST
    lost.write_text("prefill-1")
    code, output = pdserve("restart", "decode-0")
    lost.unlink()
    assert code == 0, output
    tiny.wait_for("canary", name="decode-0", ok=True)
    tiny.wait_for("canary", name="decode-0", peer="prefill-1", ok=False)
    assert tiny.wait_for("bad_peer", name="prefill-1")["crossed"] == ["prefill-0"]
    for peer in ("decode-0", "decode-1"):
        tiny.wait_for("canary", name="prefill-1", peer=peer, ok=True)
    tiny.wait_for("phase", after="degraded", phase="ready")


@pytest.mark.ends_fixture
def test_a_killed_worker_is_the_death_of_its_engine_and_the_others_serve(tiny: Deployment) -> None:
    """Last: vLLM itself exits with code 0 seconds later, as if nothing had happened."""
    worker = member(tiny, "decode-1", "VLLM::Worker")
    assert send(worker, signal.SIGKILL)
    died = tiny.wait_for("died", name="decode-1")
    tiny.wait_for("phase", phase="degraded")
    assert died["member"].startswith("VLLM::")
    body = {"model": "tiny", "prompt": "the others serve on", "max_tokens": 2}
    assert [tiny.post("/v1/completions", body)[0] for _ in range(4)] == [200] * 4
    code, output = pdserve("status", "--json")
    assert (code, read_json(output)["processes"]["decode-1"]["phase"]) == (5, "dead")
