"""The batch script, with a `pdserve` that only records; and what is said of a job that is not what it asks for."""

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
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.errors import PreflightError, RecipeError
from pdserve.plan.placement import place
from pdserve.plan.sbatch import (
    JobShape,
    check_allocation,
    job_seconds,
    job_shape,
    render_sbatch,
    signal_seconds,
    usable_nodes,
)
from tests.plan.golden import BATCH_SCRIPT, ROOT
from tests.plan.kit import hosts, on_gpus, plan, recipe
from tests.tables import each_row

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


def test_the_command_renders_the_shipped_script_but_for_its_own_name() -> None:
    result = CliRunner().invoke(app, ["render", "--slurm", "recipes/kimi-mi355x-2node.yaml"])
    assert result.exit_code == 0
    assert result.stdout.replace("THIS_FILE", "slurm/disagg.sh") == BATCH_SCRIPT.read_text(), "tests.regenerate"
    assert os.access(BATCH_SCRIPT, os.X_OK)


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


@each_row("option, gone", [
    ("--gres=gpu:mi355x:8", "--gres=gpu:8"), ("--gpus-per-node=8", "--gres=gpu:8"), ("--mem-per-gpu=200G", "--mem=0"),
    ("--requeue", "--no-requeue"), ("--oversubscribe", "--exclusive"),
])  # fmt: skip
def test_an_option_of_the_recipe_takes_the_place_of_ours(option: str, gone: str) -> None:
    options = directives(*BIG, {"slurm": {"options": [option]}})
    assert options[-1] == option
    assert gone not in options


@each_row(
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


@each_row("text, seconds", [
    ("2", 120), ("2:30", 180), ("00:02:00", 120), ("1-1", 90_000), ("2-0", 172_800), ("1-0:30", 88_200),
    ("1-0:0:1", 86_460), ("0", None), ("UNLIMITED", None), ("-1", None),
])  # fmt: skip
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


WORDS = ["recipes/big.yaml", "--set", "prefill.args.x=a b"]


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


@each_row("changes, nodes, gpus", [
    (({},), 1, 0),
    (({"slurm": {"nodes": 2}},), 2, 0),
    (BIG, 2, 8),
    ((on_gpus(4, 4),), 1, 8),
    ((on_gpus(4, 2), {"prefill": {"instances": 2}, "slurm": {"nodes": 3}}), 3, 4),
    ((on_gpus(8, 8), {"prefill": {"parallel": {"nodes": 2}}, "slurm": {"nodes": 2}}), 2, 12),
])  # fmt: skip
def test_a_job_is_as_large_as_the_roles_need_or_as_the_recipe_sets(
    changes: tuple[dict[str, Any], ...], nodes: int, gpus: int
) -> None:
    assert job_shape(recipe(*changes)) == JobShape(nodes, gpus)


def test_too_few_nodes_in_the_recipe_are_the_recipes_fault() -> None:
    with pytest.raises(RecipeError) as caught:
        job_shape(recipe(*BIG, {"slurm": {"nodes": 1}}))
    assert caught.value.what == ("1 node of 8 devices cannot hold prefill 1 x 8 + decode 1 x 8 = 16 devices")
    assert (caught.value.where, caught.value.todo) == ("slurm.nodes", "write 2, or leave it out")


@each_row("count, gpus, here", [
    (1, 8, "this job has 1 node with 8 GPUs each"), (2, 4, "this job has 2 nodes with 4 GPUs each"),
    (1, None, "this job has 1 node with 8 GPUs each"),
])  # fmt: skip
def test_a_job_of_the_wrong_shape_is_an_error_with_the_line_to_type(count: int, gpus: int | None, here: str) -> None:
    with pytest.raises(PreflightError) as caught:
        check_allocation(recipe(*BIG), names(count), gpus, words=WORDS)
    assert caught.value.what == (
        f"{here}; big needs 2 nodes with 8 GPUs each, for prefill 1 x 8 + decode 1 x 8 = 16 devices"
    )
    assert caught.value.todo == (
        "sbatch --nodes=2 --gres=gpu:8 slurm/disagg.sh recipes/big.yaml --set 'prefill.args.x=a b'"
    )
    assert caught.value.exit_code == 3


def test_excluded_nodes_do_not_count_and_are_excluded_by_the_line_to_type() -> None:
    made = recipe(*BIG, {"exclude_nodes": ["n1", "n2", "bad"]})
    assert usable_nodes(made, names(4)) == ("n0", "n3")
    assert check_allocation(made, names(4), 8, words=WORDS) is None
    with pytest.raises(PreflightError) as caught:
        check_allocation(made, names(3), 8, words=["r.yaml"])
    assert caught.value.what.startswith("this job has 3 nodes with 8 GPUs each, and the recipe excludes n1, n2; big")
    assert caught.value.todo == "sbatch --nodes=2 --gres=gpu:8 '--exclude=n[1-2],bad' slurm/disagg.sh r.yaml"


def test_a_job_of_the_right_shape_is_nothing_to_speak_of() -> None:
    assert check_allocation(recipe(*BIG), names(2), 8, words=WORDS) is None
    assert check_allocation(recipe(*BIG), names(2), None, words=WORDS) is None
    assert check_allocation(recipe(*BIG), names(1), 16, words=WORDS) is None
    idle = check_allocation(recipe(*BIG), names(4), 8, words=WORDS)
    assert idle == "this job has 4 nodes with 8 GPUs each; big leaves 2 nodes without work"


def test_on_a_cpu_nodes_are_counted_where_the_recipe_says_how_many() -> None:
    made = recipe({"slurm": {"nodes": 2}})
    assert check_allocation(made, names(2), 0, words=["r.yaml"]) is None
    with pytest.raises(PreflightError) as caught:
        check_allocation(made, names(1), 0, words=["r.yaml"])
    assert caught.value.what == "this job has 1 node; test needs 2 nodes"
    assert caught.value.todo == "sbatch --nodes=2 --gres=none slurm/disagg.sh r.yaml"


@given(
    tp=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    instances=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    nodes=st.none() | st.integers(1, 6),
    size=st.sampled_from([0, 4, 8]),
)
def test_a_job_of_the_shape_that_is_asked_for_holds_the_recipe(
    tp: tuple[int, int], instances: tuple[int, int], nodes: int | None, size: int
) -> None:
    roles = {"prefill": {"instances": instances[0]}, "decode": {"instances": instances[1]}}
    made = recipe(on_gpus(*tp), roles, {"devices_per_node": size, "slurm": {"nodes": nodes}})
    shape = shape_or_none(made)
    if shape is not None:
        assert nodes in (None, shape.nodes)
        assert place(made, hosts(*[shape.gpus_per_node] * shape.nodes))
        check_allocation(made, names(shape.nodes), shape.gpus_per_node, words=["r.yaml"])


def shape_or_none(made: Any) -> JobShape | None:
    try:
        return job_shape(made)
    except RecipeError:
        return None
