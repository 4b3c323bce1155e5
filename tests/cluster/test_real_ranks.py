"""Real vLLM with two data-parallel ranks on two nodes of a Slurm job, in each load-balancing mode that a CPU can run.

`internal`: one server, and on the second node a rank without one. `external`: a server for each rank, among which the
proxy chooses. `hybrid` needs two ranks on each node, and so four engines.

Servers for single ranks need a model with experts, and on a CPU vLLM cannot compute experts on several ranks
(docs/many-nodes.md). So the model of `external` only claims to have some: its ranks meet, wait for each other at each
step and serve as those of a model with experts, and what they compute is dense.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.deployments import PATIENT, ClusterDeployment, Lab, until_ready
from tests.cluster.spec import LOGIN
from tests.launch.deployment import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800), pytest.mark.full]

NAME = "two-ranks"
TINY = REPOSITORY / ".cache/tiny-model"
SERVERS = {"internal": ["aggregated-0"], "external": ["aggregated-0", "aggregated-0-rank1"]}
PROCESSES = {"internal": ["aggregated-0", "aggregated-0-node1"], "external": SERVERS["external"]}


def claiming_experts(folder: Path) -> Path:
    """The tiny model with a config.json by which vLLM takes it for one with experts; its layers have none."""
    shutil.copytree(TINY, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_local_experts": 2}))
    return folder


def recipe(folder: Path, mode: str) -> Path:
    """tiny-cpu's engines as one instance of two ranks."""
    document: dict[str, Any] = yaml.safe_load((REPOSITORY / "recipes/tiny-cpu.yaml").read_text())
    for key in ("prefill", "decode", "lmcache", "description"):
        del document[key]
    document |= {
        "name": NAME,
        "mode": "aggregated",
        "model": {
            "path": str(claiming_experts(folder / "model") if mode == "external" else TINY),
            "served_name": "tiny",
        },
        "aggregated": {"parallel": {"dp": 2, "nodes": 2, "load_balancing": mode}},
        "timeouts": PATIENT,
    }
    file = folder / f"{NAME}.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def computing(deployment: ClusterDeployment, url: str) -> list[str]:
    """The ranks behind that API server that have computed prompts, asked for on its node."""
    ask = "import sys, httpx; print(httpx.get(sys.argv[1] + '/metrics', timeout=60).text)"
    page = deployment.cluster.run(deployment.cluster.nodes[0], [sys.executable, "-c", ask, url], env=deployment.lab.env)
    assert page.returncode == 0, page.stderr
    counted = re.findall(r'^vllm:prompt_tokens_total\{engine="(\d+)".*\} (\S+)$', page.stdout, re.M)
    return [rank for rank, tokens in counted if float(tokens) > 0]


@pytest.fixture(params=list(SERVERS))
def serving(request: pytest.FixtureRequest, job: Lab) -> Iterator[tuple[str, ClusterDeployment]]:
    """In a job of two nodes."""
    deployment = job.sbatch(recipe(job.folder, request.param), "--nodes=2", "--gres=none")
    until_ready(deployment, NAME)
    yield request.param, deployment
    job.pdserve(LOGIN, "down", NAME)


def test_two_ranks_on_two_nodes_serve_as_one_instance(serving: tuple[str, ClusterDeployment]) -> None:
    mode, deployment = serving
    first, second, _ = deployment.cluster.nodes
    assert [deployment.node_of(name) for name in PROCESSES[mode]] == [first, second]
    assert [worker.name for worker in deployment.run.read_plan().proxy.workers] == SERVERS[mode]

    answers = [deployment.complete(model="tiny", prompt="rank " * 40, temperature=0) for _ in range(6)]
    assert [code for code, _ in answers] == [200] * 6
    assert len({body["choices"][0]["text"] for _, body in answers}) == 1

    done = deployment.lab.pdserve(first, "verify", NAME, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    proofs = {proof["name"]: proof["status"] for proof in json.loads(done.stdout)["proofs"]}
    assert proofs == dict.fromkeys(("endpoints", "requests", "output", "clean"), "proven")

    ranks = [computing(deployment, worker.url) for worker in deployment.run.read_plan().proxy.workers]
    assert ranks == ([["0", "1"]] if mode == "internal" else [["0"], ["1"]])
