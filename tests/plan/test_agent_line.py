"""The line that starts the agent of a node: the same for `up` and for who only looks at it."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.plan.node import Node, Srun, Ssh, with_agent
from pdserve.recipe.model import Timeouts

BOX = ("docker", "run", "--device=/dev/kfd", "--volume=/r:/r", "vllm:1", "python3")
TEXT = """\
schema: 1
name: boxed
platform: rocm
devices_per_node: 8
image: docker.io/org/vllm:1
model: {id: org/model, revision: abcdef0123456789012345678901234567890123, served_name: m}
prefill: {parallel: {tp: 8}, connector: {kind: mooncake, protocol: rdma}}
decode: {parallel: {tp: 8}, connector: {kind: mooncake, protocol: rdma}}
container:
  kind: docker
  mounts: ["/data/hub:/hub"]
  env: {HF_HOME: /hub, HF_TOKEN: {secret: MY_TOKEN}}
"""


def agent(node: Node) -> tuple[str, ...]:
    return with_agent(node, run_dir="/runs/1", run_id="1", timeouts=Timeouts()).agent


def test_a_local_agent_is_a_child_and_has_no_lease() -> None:
    line = agent(Node(name="here", command=("/v/python",)))
    assert line == ("/v/python", "-m", "pdserve.node.agent", "--node", "here", "--run-dir", "/runs/1", "--run-id", "1")
    boxed = agent(Node(name="here", command=BOX))
    assert boxed[-4:] == ("--pulse", "1", "--lease", "15"), "the daemon holds its pipe"


def test_srun_and_ssh_come_before_the_container() -> None:
    in_job = agent(Node(name="n1", command=BOX, reach=Srun(job="7", kill_wait=30)))
    assert in_job[:3] == ("srun", "--jobid=7", "--nodelist=n1")
    assert in_job[in_job.index("docker") :][: len(BOX)] == BOX
    over_ssh = agent(Node(name="n1", command=BOX, reach=Ssh(destination="u@n1")))
    assert over_ssh[0] == "ssh"
    assert over_ssh[-1].startswith("docker run --device=/dev/kfd --volume=/r:/r vllm:1 python3 -m pdserve.node.agent")


def rendered(tmp_path: Any, *options: str) -> str:
    (tmp_path / "boxed.yaml").write_text(TEXT)
    ended = CliRunner().invoke(app, ["render", str(tmp_path / "boxed.yaml"), *options])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def test_render_of_a_recipe_with_a_container_has_image_mounts_and_devices(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_HOME", "/shared/pdserve")
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    text = rendered(tmp_path)
    for word in (
        "--device=/dev/kfd",
        "--device=/dev/infiniband",
        "--volume=/shared/pdserve/boxed/RUN_ID:/shared/pdserve/boxed/RUN_ID",
        "--volume=/data/hub:/hub",
        "docker.io/org/vllm:1",
        "srun",
        "--jobid=JOB_ID",
        "--run-id RUN_ID",
    ):
        assert word in text, word
    assert "s3cret" not in text


def test_pyxis_is_shown_in_the_srun_of_a_job(tmp_path: Any) -> None:
    text = rendered(tmp_path, "--set", "container.kind=pyxis", "--set", "container.store=/shared/images")
    assert "--container-image=/shared/images/" in text
    assert "/dev/infiniband:/dev/infiniband" in text
