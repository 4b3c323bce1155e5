"""`pdserve sweep --slurm` from a login node: real tasks of a real array beside each other, each on its own node."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.bench.kit import stand_in
from tests.cluster.deployments import Lab
from tests.cluster.spec import LOGIN

pytestmark = pytest.mark.cluster


def test_two_deployments_are_two_tasks_and_the_sweep_is_whole(job: Lab) -> None:
    """One deployment starts; the other cannot, and the record of its point has the reason."""
    base = job.recipe(slurm__options=["--gres=none"], slurm__nodes=1)
    document = yaml.safe_load(base.read_text())
    client = stand_in(job.folder, "bench_client.py")
    command = document["engine"]["command"]
    sweep = job.folder / "sweep.yaml"
    sweep.write_text(
        yaml.safe_dump(
            {
                "schema": 1,
                "name": "s",
                "recipe": base.name,
                "workload": [{"input_tokens": 300, "output_tokens": 2, "repeats": 1, "warmup": 0}],
                "concurrency": [1],
                "requests": 4,
                "cross": {"engine.command": [command, ["/nowhere/vllm"]]},
            }
        )
    )
    env = {"FAKE_TOKEN_SECONDS": "0.4", "FAKE_LMCACHE_URL": f"http://127.0.0.1:{job.port('lmcache_http')}"}
    done = job.pdserve(LOGIN, "sweep", sweep, "--slurm", "--python", client, env=env)
    assert done.returncode == 12, done.stdout + done.stderr
    assert "2 tasks of 1 node" in done.stdout
    assert "1 of 2 points are VALID" in done.stdout
    records = [json.loads(file.read_text()) for file in job.home.glob("*/sweep/s/points/*/point.json")]
    assert sorted(record["status"] for record in records) == ["INVALID", "VALID"]
    tasks = [json.loads(file.read_text()) for file in job.home.glob("*/sweep/s/tasks/*.json")]
    array = {task["job"].partition("_")[0] for task in tasks}
    assert len(array) == 1
    assert {task["job"].partition("_")[2] for task in tasks} == {"0", "1"}
    assert all(task["log"] is not None for task in tasks)
