"""`up --slurm` and `run --slurm` from a login node, and `run` in a job by the script of docs/guides/slurm.md."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from tests.cluster.deployments import LIMIT, ORDER, PDSERVE, ClusterDeployment, Lab
from tests.cluster.spec import LOGIN
from tests.launch.deployment import wait_until

pytestmark = pytest.mark.cluster

NO_GPUS = {"slurm__options": ["--gres=none"]}


def test_detached_it_serves_over_two_nodes_and_down_from_the_login_node_ends_the_job(job: Lab) -> None:
    done = job.pdserve(LOGIN, "up", job.recipe(**NO_GPUS), "--slurm", "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, _ = job.cluster.nodes
    submitted = re.search(r"submitted job (\d+)", done.stdout)
    assert submitted is not None, done.stdout
    assert f": running on {first[:-1]}[{first[-1]}-{second[-1]}]" in done.stdout
    assert f"serving fake at http://127.0.0.1:{job.port('proxy')}/v1 on {first} only" in done.stdout
    up = ClusterDeployment(job, job.folder / "none", job=submitted[1])
    places = {name: up.node_of(name) for name in ("lmcache-0", "prefill-0", "decode-0", "proxy")}
    assert places == {"lmcache-0": first, "prefill-0": first, "decode-0": second, "proxy": first}
    status, answer = up.complete()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    table = job.pdserve(LOGIN, "status").stdout
    assert table.startswith("fake: ready\n")
    for name, node in places.items():
        assert re.search(rf"^{name}\s+\S+\s+{node}\s+\d+\s+ready", table, re.MULTILINE), table

    def steps() -> list[str]:
        rows = [line.split() for line in job.cluster.steps() if line.startswith("step")]
        return sorted(node for _, number, _, node in rows if not number.endswith(".batch"))

    # Slurm may take a while to forget the steps that have looked at the nodes.
    wait_until("one step a node", lambda: steps() == [first, second], LIMIT, why=lambda: str(job.cluster.steps()))
    down = job.pdserve(LOGIN, "down")
    assert (down.returncode, down.stdout.strip()) == (0, "fake: stopped")
    assert up.ended() == "COMPLETED"
    assert up.stopped() == ORDER


@pytest.mark.full
def test_a_job_that_fails_gives_its_error_and_its_exit_code(job: Lab) -> None:
    done = job.pdserve(LOGIN, "up", job.recipe(**NO_GPUS, decode__env={"FAKE_DIE_AT": "load"}), "--slurm")
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"error: decode-0@{job.cluster.nodes[1]}: decode" in done.stdout
    assert ": failed; its output: " in done.stderr


def test_ctrl_c_on_the_login_node_stops_the_deployment_in_order(job: Lab) -> None:
    argv = [*PDSERVE, "up", str(job.recipe(**NO_GPUS)), "--slurm"]
    output = job.folder / "followed"
    with (
        output.open("w") as file,
        job.cluster.popen(LOGIN, argv, env=job.env, cwd=job.folder, stdout=file, stderr=file) as following,
    ):
        wait_until("serving", lambda: "serving fake at" in output.read_text(), 2 * LIMIT, why=output.read_text)
        following.send_signal(signal.SIGINT)
        assert following.wait(LIMIT) == 130, output.read_text()
    stopped = [line.split()[2] for line in output.read_text().splitlines() if " stopped in " in line]
    assert stopped == ORDER


COMMENT = '{"team": "kv", "note": "it\'s a \\\\ #7"}'
ASK = (
    "import os, urllib.request\n"
    "opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))\n"
    "print('models', opener.open(os.environ['PDSERVE_ENDPOINT'] + '/v1/models').status, flush=True)\n"
)


@pytest.mark.full
def test_sbatch_reads_a_comment_with_json_as_the_recipe_has_it(job: Lab) -> None:
    recipe = job.recipe(slurm__options=["--gres=none", f"--comment={COMMENT}"])
    script = job.pdserve(LOGIN, "render", "--slurm", recipe)
    assert script.returncode == 0, script.stderr
    number = job.submit(script.stdout, "--hold").job
    try:
        assert f"Comment={COMMENT}" in job.cluster.output(LOGIN, ["scontrol", "show", "job", number])
    finally:
        job.cluster.output(LOGIN, ["scancel", number])


def test_from_a_login_node_the_whole_run_is_submitted_and_ends_with_the_commands_code(job: Lab) -> None:
    program = job.folder / "ask.py"
    program.write_text(ASK + "raise SystemExit(3)\n")
    done = job.pdserve(LOGIN, "run", job.recipe(**NO_GPUS), "--slurm", "--", sys.executable, program)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "models 200" in done.stdout
    stopped = [line.split()[2] for line in done.stdout.splitlines() if " stopped in " in line]
    assert stopped == ORDER


@pytest.mark.full
def test_a_term_to_the_batch_script_ends_command_and_deployment_in_order(job: Lab) -> None:
    program = job.folder / "wait.py"
    program.write_text("import signal\nprint('the command waits', flush=True)\nsignal.pause()\n")
    up = job.submit(
        "#!/usr/bin/env bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive --gres=none --no-requeue\n"
        f"exec {' '.join(PDSERVE)} run {job.recipe()} -- {sys.executable} {program}\n"
    )
    up.expect("the command waits")
    job.cluster.output(LOGIN, ["scancel", "--batch", "--signal=TERM", up.job])
    assert up.ended() == "FAILED"
    assert "ExitCode=130:0" in up.shown_by_slurm(), up.printed()
    assert up.printed().count(" stopped in ") == len(ORDER)
