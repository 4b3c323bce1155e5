"""The model is fetched before anything else starts, and a failure of that ends the start."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import StartError
from pdserve.launch.start_proofs import same_commit
from pdserve.plan.process import ExitProbe
from pdserve.run.directory import RunDir
from tests.fakes.hub import COMMIT, Hub
from tests.launch.deployment import assert_nothing_left, pdserve, read_json, recipe, up
from tests.plan import kit

pytestmark = pytest.mark.process


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("org/model") as running:
        yield running


def from_hub(folder: Path, hub: Hub, **changes: Any) -> Path:
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "VLLM_CPU_KVCACHE_SPACE": 1}
    return recipe(folder, model__path=None, model__id="org/model", engine__env=env, **changes)


def test_the_download_is_done_before_anything_starts_and_is_no_part_of_serving(
    tmp_path: Path, pdserve_home: Path, hub: Hub
) -> None:
    with up(from_hub(tmp_path, hub), pdserve_home) as deployment:
        deployment.command.expect("revision main is not pinned")
        deployment.command.expect(f"weights: every node has commit {COMMIT}")
        deployment.command.expect("serving fake at")
        history = [(event["event"], event.get("name")) for event in deployment.events()]
        assert history.index(("ready", "weights-0")) < history.index(("start", "lmcache-0"))
        assert isinstance(deployment.run.read_plan().process("weights-0").probe, ExitProbe)
        code, output = pdserve("status", "--json")
        shown = read_json(output)
        assert (code, shown["phase"], shown["processes"]["weights-0"]["phase"]) == (0, "ready", "done")
        deployment.send_signal("proxy", signal.SIGKILL)
        assert deployment.wait_for("phase", phase="ready", after="degraded")
        assert deployment.started().count("weights-0") == 1
        code, output = pdserve("restart", "weights-0")
        assert code == 8
        assert "nothing to do while engines run" in output
        deployment.command.interrupt()
        assert deployment.command.finish() == 0
        assert_nothing_left(deployment)
        assert "weights-0" not in [event["name"] for event in deployment.events("stopped")]


def test_a_download_that_fails_ends_the_start_with_its_cause(tmp_path: Path, pdserve_home: Path, hub: Hub) -> None:
    with up(from_hub(tmp_path, hub, model__revision="v9"), pdserve_home) as deployment:
        assert deployment.command.finish() == 4
        assert deployment.started() == ["weights-0"]
        assert_nothing_left(deployment)
        output = deployment.command.output
    node = deployment.run.read_plan().process("weights-0").node
    assert f"weights-0@{node}: weights (PID" in output
    assert "likely cause: the hub has org/model, but no revision v9" in output
    assert "what to do:   correct model.revision" in output


DRAFTING: dict[str, Any] = {
    "model": {"path": None, "id": "org/model"},
    "engine": {"args": {"speculative-config": {"method": "eagle3", "model": "org/draft"}}},
}


@pytest.mark.parametrize(
    ("commits", "model", "others"),
    [
        ((COMMIT, "e" * 40, "f" * 40, "e" * 40), "org/model", (0, 2)),
        ((COMMIT, "e" * 40, COMMIT, "f" * 40), "org/draft", (1, 3)),
    ],
    ids=["of the model", "of its draft"],
)
async def test_nodes_with_different_commits_do_not_start_engines(
    tmp_path: Path, commits: tuple[str, ...], model: str, others: tuple[int, int]
) -> None:
    plan = kit.plan(kit.recipe(kit.on_gpus(), DRAFTING), *kit.hosts(1, 1))
    write_records(tmp_path, commits)
    with pytest.raises(StartError) as failure:
        await same_commit(plan, RunDir(tmp_path))
    assert failure.value.what == f"the nodes have different commits of {model} at main"
    assert failure.value.evidence == tuple(f"weights-{n}@host{n // 2}: {commits[n]}" for n in others)
    assert ("speculative-config" in str(failure.value.todo)) == (model == "org/draft")


async def test_the_models_commit_is_reported_and_not_that_of_its_drafts(tmp_path: Path) -> None:
    plan = kit.plan(kit.recipe(kit.on_gpus(), DRAFTING), *kit.hosts(2))
    write_records(tmp_path, (COMMIT, "e" * 40))
    assert await same_commit(plan, RunDir(tmp_path)) == COMMIT


def write_records(run: Path, commits: tuple[str, ...]) -> None:
    """Of each node: the model, and then its draft."""
    (run / "weights").mkdir()
    for number, commit in enumerate(commits):
        record = {"model": ("org/model", "org/draft")[number % 2], "revision": "main", "commit": commit, "size": 1}
        (run / "weights" / f"weights-{number}.json").write_text(json.dumps(record))
