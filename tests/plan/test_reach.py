"""How an agent is started on a node: the exact words, the same for `up` and for who only looks at them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.plan.node import Local, Node, Srun, Ssh, reach_argv, term_seconds, with_agent
from pdserve.recipe.model import Timeouts
from tests.tables import each_row

AGENT = ("/shared/venv/bin/python", "-m", "pdserve.node.agent", "--run-dir", "/shared/a run")


def test_on_this_machine_it_is_a_child() -> None:
    assert reach_argv(Local(), "here", "pdserve-here", AGENT) == AGENT


def test_in_a_slurm_job_it_is_a_named_step_of_one_task_beside_all_others() -> None:
    assert reach_argv(Srun(job="42", kill_wait=30), "gpu007", "pdserve-gpu007", AGENT) == (
        "srun",
        "--jobid=42",
        "--nodelist=gpu007",
        "--nodes=1",
        "--ntasks=1",
        "--job-name=pdserve-gpu007",
        "--overlap",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--unbuffered",
        *AGENT,
    )


def test_over_ssh_nothing_is_asked_and_no_connection_is_shared() -> None:
    argv = reach_argv(Ssh(destination="me@gpu7", config="/etc/x", options=("-o", "Port=22")), "gpu7", "step", AGENT)
    assert argv[:4] == ("ssh", "-F", "/etc/x", "-T")
    assert argv[-4:-1] == ("Port=22", "--", "me@gpu7")
    given = [argv[i + 1] for i, word in enumerate(argv) if word == "-o"]
    assert {"BatchMode=yes", "ConnectTimeout=10", "ControlPath=none", "ControlMaster=no"} <= set(given)
    of_logins = {"ClearAllForwardings=yes", "ForwardAgent=no", "ForwardX11=no", "Tunnel=no", "PermitLocalCommand=no"}
    assert {*of_logins, "RemoteCommand=none"} <= set(given), "what a user's configuration asks for is off"


def test_the_shell_on_the_other_side_gives_back_the_same_words() -> None:
    awkward = ("python", "-c", "print('$HOME; \"x\"')", "", "a b", "ü")
    assert tuple(shlex.split(reach_argv(Ssh(destination="h"), "h", "s", awkward)[-1])) == awkward


@each_row("reach, left", [
    *((Srun(job="1", kill_wait=wait), left) for wait, left in ((30, 25), (5, pytest.approx(10 / 3)), (0, 1))),
    (Local(), None), (Ssh(destination="h"), None),
])  # fmt: skip
def test_stops_after_scancel_fit_slurms_kill_wait_and_others_take_what_the_plan_sets(
    reach: Local | Ssh | Srun, left: Any
) -> None:
    assert term_seconds(reach) == left


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


def test_render_of_a_recipe_with_a_container_has_image_mounts_and_devices(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_HOME", "/shared/pdserve")
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    (tmp_path / "boxed.yaml").write_text(TEXT)
    ended = CliRunner().invoke(app, ["render", str(tmp_path / "boxed.yaml")])
    assert ended.exit_code == 0, ended.output
    text = ended.stdout
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
