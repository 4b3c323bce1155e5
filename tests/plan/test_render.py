"""The rendered script runs what the plan says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pdserve.node.supervised import environment
from pdserve.plan.bash import render_shell
from pdserve.plan.build import build_plan
from pdserve.plan.model import Plan
from pdserve.plan.node import with_agent
from pdserve.plan.placement import nodes_for
from pdserve.recipe.model import Recipe
from tests.plan.kit import VERSIONS, on_gpus, recipe, with_lmcache

pytestmark = pytest.mark.process

SPY = """\
#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}))
"""
TRICKY = 'it\'s a "test"; $(touch pwned) `id` \\ *'


@pytest.fixture
def spy(tmp_path: Path) -> Path:
    """A program that prints its arguments and its environment."""
    path = tmp_path / "spy program"
    path.write_text(SPY)
    path.chmod(0o755)
    return path


def planned(wanted: Recipe, tmp_path: Path) -> Plan:
    run_dir = str(tmp_path / "run dir")
    return build_plan(wanted, nodes_for(wanted), run_dir=run_dir, run_id="r1", versions=VERSIONS)


def run(plan: Plan, tmp_path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "plan.sh"
    script.write_text(render_shell(plan))
    environ = {"PATH": os.environ["PATH"], "HOME": "/root", **env}
    return subprocess.run(["bash", script, *words], env=environ, cwd=tmp_path, capture_output=True, text=True)


def test_one_process_runs_with_the_plans_arguments_and_environment(spy: Path, tmp_path: Path) -> None:
    change = {"engine": {"command": [str(spy)], "env": {"ODD": TRICKY}, "args": {"chat-template": TRICKY}}}
    plan = planned(recipe(with_lmcache(), change), tmp_path)
    done = run(plan, tmp_path, "prefill-0", VLLM_PORT="1", CUDA_VISIBLE_DEVICES="3", OTHER="kept", engine_key="k3y")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    process = plan.process("prefill-0")
    assert tuple(seen["argv"]) == process.argv[1:]
    assert seen["env"].items() >= {**process.env.set, "OTHER": "kept", "VLLM_API_KEY": "k3y"}.items()
    assert not seen["env"].keys() & {*process.env.unset, "engine_key"}
    assert not (tmp_path / "pwned").exists()


def test_the_proxy_gets_its_file_and_only_what_is_allowed(spy: Path, tmp_path: Path) -> None:
    plan = planned(recipe({"proxy": {"command": [str(spy)]}}), tmp_path)
    done = run(plan, tmp_path, "proxy", HTTP_PROXY="http://x", MY_TOKEN="t", PDSERVE_ENGINE_KEY="stale", engine_key="k")
    seen = json.loads(done.stdout)
    config = Path(seen["argv"][seen["argv"].index("--config") + 1])
    assert config.read_text() == plan.process("proxy").files["proxy.json"]
    assert "--no-control" in seen["argv"]
    assert seen["env"]["PDSERVE_ENGINE_KEY"] == "k"
    assert not seen["env"].keys() & {"HTTP_PROXY", "MY_TOKEN", "engine_key"}


def test_lmcache_on_rocm_gets_every_hsa_variable_of_the_image_and_no_other(spy: Path, tmp_path: Path) -> None:
    """Also where a file of such a name lies in the folder in which the script runs."""
    section = with_lmcache(command=[str(spy)], env={"HSA_NO_SCRATCH_RECLAIM": 1})
    plan = planned(recipe(on_gpus(platform="rocm"), section), tmp_path)
    (tmp_path / "HSA_file").touch()
    image = {"HSA_ENABLE_IPC_MODE_LEGACY": "1", "HSA_XNACK": "0", "HSA_NO_SCRATCH_RECLAIM": "0"}
    done = run(plan, tmp_path, "lmcache-0", **image, HSA="x", NOT_HSA_XNACK="1", MY_TOKEN="t")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)["env"]
    assert seen.items() >= {**image, "HSA_NO_SCRATCH_RECLAIM": "1"}.items()
    assert not seen.keys() & {"HSA", "NOT_HSA_XNACK", "MY_TOKEN"}
    assert seen == {**seen, **environment(plan.process("lmcache-0").env, {**image, "HSA": "x"}, {})}


def test_a_missing_secret_stops_it_by_name(spy: Path, tmp_path: Path) -> None:
    change = {"engine": {"command": [str(spy)], "env": {"HF_TOKEN": {"secret": "MY_HF_TOKEN"}}}}
    plan = planned(recipe(change), tmp_path)
    refused = run(plan, tmp_path, "decode-0")
    assert refused.returncode != 0
    assert "MY_HF_TOKEN" in refused.stderr
    given = run(plan, tmp_path, "decode-0", MY_HF_TOKEN="t0ken")
    assert json.loads(given.stdout)["env"]["HF_TOKEN"] == "t0ken"


def test_a_node_whose_process_dies_ends_with_everything_else_stopped(tmp_path: Path) -> None:
    """LMCache lives and never answers, so that what ends the wait is the death of another process."""
    lives, dies = ["bash", "-c", "exec sleep 600"], ["false"]
    ports = {"ports": {"lmcache_http": 9, "prefill": 10, "decode": 11, "proxy": 12}}  # where nobody answers
    wanted = recipe(with_lmcache(command=lives), {"engine": {"command": dies}, "proxy": {"command": lives}}, ports)
    plan = planned(wanted, tmp_path)
    everything_at_once = plan.model_copy(
        update={"processes": tuple(p.model_copy(update={"start_stage": 0}) for p in plan.processes)}
    )
    done = run(everything_at_once, tmp_path, "@localhost")
    assert done.returncode == 4
    assert "died; its log says why" in done.stderr


def test_no_line_of_a_value_is_run_because_it_stands_in_a_comment(tmp_path: Path) -> None:
    """A container's variables are in the line of the agent, which is a comment, and a text in YAML may have lines."""
    box = ("docker", "run", "--env=NOTE=first\ntouch pwned\n", "vllm:1", "python3")
    plan = planned(recipe({"proxy": {"host": "localhost\ntouch pwned"}}), tmp_path)
    (node,) = plan.nodes
    node = node.model_copy(update={"command": box})
    node = with_agent(node, run_dir="/runs/1", run_id="1", timeouts=plan.timeouts)
    plan = plan.model_copy(update={"nodes": (node,), "warnings": ("two lines:\ntouch pwned",)})
    script = render_shell(plan)
    header, _, rest = script.partition("set -euo pipefail\n")
    assert [line for line in header.splitlines() if not line.startswith("#")] == []
    assert header.count("#   touch pwned") == 2
    assert rest.count("#   touch pwned") == 1
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert run(plan, tmp_path).returncode == 2
    assert not (tmp_path / "pwned").exists()
