"""`pdserve up --slurm --detach` between the record that a deployment is ready and the line of its job that has the
endpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pdserve.operations.submit import Submission, submit_and_follow
from pdserve.plan.node import Srun
from tests.doctor import kit

pytestmark = pytest.mark.process

ENDPOINT = "http://127.0.0.1:8000"
SERVING = f"serving tiny at {ENDPOINT}/v1\n"


def test_the_endpoint_is_shown_where_the_record_is_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = kit.plan()
    in_job = tuple(node.model_copy(update={"reach": Srun(job="1", kill_wait=30)}) for node in planned.nodes)
    up = {"event": "up", "endpoint": ENDPOINT}
    kit.run_dir(tmp_path, events=[up], phase="ready", plan_of_it=planned.model_copy(update={"nodes": in_job}))
    output, programs = tmp_path / "job.out", tmp_path / "bin"
    output.write_text("starts\n")
    programs.mkdir()
    job = f"JobId=1 JobState=RUNNING Reason=None NodeList=n0 ExitCode=0:0 StdOut={output} Power="
    for name, answer in {"sbatch": "1", "scontrol": job}.items():
        (programs / name).write_text(f"#!/bin/sh\ncat >/dev/null\necho '{answer}'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path / "home"))

    def job_prints(_: float) -> None:
        with output.open("a") as file:
            file.write(SERVING)

    monkeypatch.setattr(time, "sleep", job_prints)
    shown: list[str] = []
    submit_and_follow(Submission("test", "#!/bin/sh\n"), shown.append, detach=True)
    text = "".join(shown)
    assert SERVING in text
    assert text.index(SERVING) < text.index("next: pdserve status")
