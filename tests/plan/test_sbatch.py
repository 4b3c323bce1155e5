"""The batch script: what it asks of Slurm, and that it does what it says with a `pdserve` that only records."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.errors import RecipeError
from pdserve.plan.sbatch import job_seconds, render_sbatch, signal_seconds
from tests.plan.golden import BATCH_SCRIPT, ROOT, batch_script
from tests.plan.kit import on_gpus, plan, recipe

BIG = (on_gpus(8, 8, "rocm"), {"devices_per_node": 8, "name": "big"})
RECORDER = """\
#!/usr/bin/env bash
printf '%s\\n' "$PWD" "$@" >>"$RECORD"
echo started
"""


def graceful(code: int) -> str:
    """A launcher that takes its time after a TERM."""
    return (
        "#!/usr/bin/env bash\n"
        f"trap 'echo stopping; read -t 0.3 <> <(:) || true; echo stopped; exit {code}' TERM\n"
        "echo started\nwhile :; do read -t 0.1 <> <(:) || true; done\n"
    )


def script_of(*changes: dict[str, Any], words: tuple[str, ...] = ("r.yaml",)) -> str:
    made = recipe(*changes)
    return render_sbatch(made, plan(made), list(words))


def directives(*changes: dict[str, Any]) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script_of(*changes), re.MULTILINE)


def submitted(
    folder: Path, script: str, *arguments: str, pdserve: str = RECORDER, env: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    """The script as Slurm runs it: a copy elsewhere, with the submit folder in a variable."""
    spool, bin_ = folder / "spool", folder / "bin"
    for made in (spool, bin_, folder / "repository"):
        made.mkdir(exist_ok=True)
    (spool / "slurm_script").write_text(script)
    (bin_ / "pdserve").write_text(pdserve)
    (bin_ / "pdserve").chmod(0o755)
    environ = {
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder / "repository"),
        "RECORD": str(folder / "record"),
        **env,
    }
    command = ["bash", str(spool / "slurm_script"), *arguments]
    return subprocess.Popen(
        command, cwd="/", env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )


def ended(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    _, stderr = job.communicate(timeout=120)
    return job.returncode, stderr


def test_the_shipped_script_is_what_is_rendered() -> None:
    assert BATCH_SCRIPT.read_text() == batch_script(), "python -m tests.plan.regenerate, and read the diff"
    assert os.access(BATCH_SCRIPT, os.X_OK)


def test_the_command_renders_the_shipped_script_but_for_its_own_name() -> None:
    result = CliRunner().invoke(app, ["render", "--slurm", "recipes/kimi-mi355x-2node.yaml"])
    assert result.exit_code == 0
    assert result.stdout.replace("THIS_FILE", "slurm/disagg.sh") == BATCH_SCRIPT.read_text()


def test_overrides_are_in_the_script_and_in_what_it_asks_for() -> None:
    arguments = ["recipes/kimi-mi355x-2node.yaml", "--set", "decode.instances=2", "--unset", "slurm.time"]
    result = CliRunner().invoke(app, ["render", "--slurm", *arguments])
    assert result.exit_code == 0
    assert f"then set -- {' '.join(arguments)}; fi" in result.stdout
    assert "#SBATCH --nodes=3\n" in result.stdout
    assert "--time=" not in result.stdout


def test_it_asks_for_the_recipes_nodes_gpus_time_and_exclusions() -> None:
    slurm = {"time": "2-0", "partition": "gpu", "account": "a", "qos": "q", "reservation": "r", "constraint": "x&y"}
    degrade = {"exclude_nodes": ["n1", "n2", "n9"], "on_node_loss": "degrade"}
    options = directives(*BIG, {"slurm": slurm}, degrade)
    assert options == [
        "--job-name=big",
        "--nodes=2",
        "--gres=gpu:8",
        "--exclude=n[1-2,9]",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--time=2-0",
        "--partition=gpu",
        "--account=a",
        "--qos=q",
        "--reservation=r",
        "--constraint=x&y",
        "--output=pdserve-%j.out",
        "--open-mode=append",
        "--signal=B:TERM@155",
        "--no-requeue",
        "--no-kill",
    ]


@pytest.mark.parametrize(
    ("option", "gone"),
    [
        ("--gres=gpu:mi355x:8", "--gres=gpu:8"),
        ("--gpus-per-node=8", "--gres=gpu:8"),
        ("--mem-per-gpu=200G", "--mem=0"),
        ("--requeue", "--no-requeue"),
        ("--output=/logs/%x-%j.out", "--output=pdserve-%j.out"),
        ("--oversubscribe", "--exclusive"),
    ],
)
def test_an_option_of_the_recipe_takes_the_place_of_ours(option: str, gone: str) -> None:
    options = directives(*BIG, {"slurm": {"options": [option]}})
    assert options[-1] == option
    assert gone not in options


@pytest.mark.parametrize(
    "value", ['{"team": "kv", "note": "a \\\\ b"}', "it's #7", 'say "x"', "back\\slash", "$HOME `ls` $(ls)", "{'a': 1}"]
)
def test_a_value_with_quotes_is_read_back_as_it_was_written(value: str) -> None:
    """By the rules of a shell, which are sbatch's for a text in double quotes; tests/cluster asks sbatch itself."""
    (line,) = [line for line in directives(*BIG, {"slurm": {"options": [f"--comment={value}"]}}) if "comment" in line]
    assert shlex.split(line, comments=True) == [f"--comment={value}"]


@pytest.mark.process
def test_it_runs_up_in_the_submit_folder_with_the_recipe_it_was_made_for(tmp_path: Path) -> None:
    words = ("my recipes/r.yaml", "--set", "engine.env.A='x $y'", "--set", "description=a\ntouch gone")
    job = submitted(tmp_path, script_of(*BIG, words=words))
    assert ended(job) == (0, "")
    assert (tmp_path / "record").read_text() == "\n".join([str(tmp_path / "repository"), "up", *words, ""])
    assert not (tmp_path / "repository" / "gone").exists()
    arguments = ("recipes/tiny-cpu.yaml", "--set", "name=a b")
    assert ended(submitted(tmp_path, BATCH_SCRIPT.read_text(), *arguments)) == (0, "")
    assert (tmp_path / "record").read_text().endswith("\n".join(["up", *arguments, ""]))


@pytest.mark.process
def test_a_term_reaches_the_launcher_which_has_its_time_and_the_last_word(tmp_path: Path) -> None:
    job = submitted(tmp_path, script_of(*BIG), pdserve=graceful(5))
    assert job.stdout is not None
    assert job.stdout.readline() == "started\n"
    job.send_signal(signal.SIGTERM)
    assert job.stdout.readline() == "stopping\n"
    job.send_signal(signal.SIGTERM)
    assert ended(job)[0] == 5


@pytest.mark.process
@pytest.mark.parametrize("before", ['*"pdserve"*" up "*', "launcher=*!*"])
def test_a_term_in_the_moment_of_the_start_reaches_the_launcher(tmp_path: Path, before: str) -> None:
    """The signal comes right before a command of the script, from a trap that bash runs there. Both pipes end with the
    last process that has them."""
    early = tmp_path / "early"
    early.write_text(
        f"if [[ $0 == *slurm_script ]]; then trap '[[ $BASH_COMMAND != {before} ]] || kill -TERM $$' DEBUG; fi\n"
    )
    job = submitted(tmp_path, script_of(*BIG), pdserve=graceful(5), env={"BASH_ENV": str(early)})
    code, stderr = ended(job)
    # A TERM that comes before the launcher has its own trap ends it.
    assert (code in (5, 143), stderr) == (True, "")


@pytest.mark.process
def test_without_pdserve_it_names_the_folder_to_submit_from(tmp_path: Path) -> None:
    job = submitted(tmp_path, script_of(*BIG).replace("command -v pdserve", "command -v no-such-program"))
    code, stderr = ended(job)
    assert code == 2
    assert f"no pdserve in PATH or in {tmp_path / 'repository'}/.venv" in stderr
    made = recipe()
    script = render_sbatch(made, plan(made), ["r.yaml"], command=["true"])
    job = submitted(tmp_path, script.replace("command -v pdserve", "command -v no-such-program"))
    assert ended(job)[0] == 202, "no code of the command's"


@pytest.mark.process
def test_with_a_command_the_job_runs_it_and_leaves_it_time_to_end(tmp_path: Path) -> None:
    made = recipe({"timeouts": {"stop_seconds": 40}})
    argv = ["python", "-c", "print('a b')"]
    script = render_sbatch(made, plan(made), ["r.yaml", "--set", "a=b"], command=argv)
    assert ended(submitted(tmp_path, script)) == (0, "")
    recorded = (tmp_path / "record").read_text().splitlines()[1:]
    assert recorded == ["run", "r.yaml", "--set", "a=b", "--", *argv]
    assert signal_seconds(plan(made), runs=True) - signal_seconds(plan(made)) == 40
    assert f"--signal=B:TERM@{signal_seconds(plan(made), runs=True)}\n" in script


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120),
        ("2:30", 180),
        ("00:02:00", 120),
        ("08:00:00", 28_800),
        ("1-1", 90_000),
        ("2-0", 172_800),
        ("1-0:30", 88_200),
        ("1-0:0:1", 86_460),
        ("0", None),
        ("UNLIMITED", None),
        ("-1", None),
    ],
)
def test_a_time_is_read_as_sbatch_reads_it(text: str, seconds: int | None) -> None:
    assert job_seconds(text) == seconds


def test_a_job_that_would_be_stopped_when_it_starts_is_refused() -> None:
    made = recipe({"slurm": {"time": "00:02:00"}})
    with pytest.raises(RecipeError, match=r"00:02:00 \(120 s\) is stopped when it starts") as refused:
        render_sbatch(made, plan(made), ["r.yaml"])
    seconds, stages = signal_seconds(plan(made)), {process.stop_stage for process in plan(made).processes}
    slowest = [max(p.stop_seconds for p in plan(made).processes if p.stop_stage == stage) for stage in stages]
    assert seconds >= 60 + sum(slowest), "time to drain and to stop all stages"
    assert f"a TERM {seconds} s before its end" in refused.value.what
    assert refused.value.where == "slurm.time"
    [least] = re.findall(r"slurm.time to \"(.*?)\"", str(refused.value.todo))
    for time in (least, "UNLIMITED", "2-0"):
        assert f"--time={time}\n" in script_of({"slurm": {"time": time}})
    short = (seconds + 60) // 60
    with pytest.raises(RecipeError, match="is stopped when it starts"):
        script_of({"slurm": {"time": str(short)}})


def test_validate_refuses_it_too_with_its_line() -> None:
    arguments = ["validate", str(ROOT / "recipes/kimi-mi355x-2node.yaml"), "--set", "slurm.time=00:02:00"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, RecipeError)
    assert "--set slurm.time" in str(result.exception.where)
    assert "is stopped when it starts" in result.exception.what
