"""Old runs go, and nothing else: what lives or may live, what is another user's and what a link leads to stays."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pdserve.recipe.model import Retention
from pdserve.run.directory import RunDir
from pdserve.run.retention import discard_earlier, prune, prune_all
from pdserve.run.state import NodeState
from pdserve.system import procfs
from pdserve.system.process import MARKER
from tests.doctor import kit as doctor_kit
from tests.launch.deployment import pdserve, recipe
from tests.launch.records import GONE, own_identity, recorded_state
from tests.plan import kit
from tests.strikes import at_a_call, strike
from tests.tables import each_row

DAY = 86400
STRANGER = 4242
LAST_ONLY = Retention(runs=1, days=0)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def run_id(number: int) -> str:
    return f"20260101-000000-{number:06x}"


def made(root: Path, number: int = 0, *, days: float = 0, **fields: Any) -> RunDir:
    """A run that was started, written last so many days ago; the deployment's newest one is a later one."""
    run = RunDir.create(root, "fake", run_id(number))
    state = recorded_state(**{"run_id": run.run_id, "phase": "stopped", **fields})
    run.write(run.state, state.model_dump_json())
    (run.logs / "decode-0@n.log").write_text("x" * 1000)
    written(run, days)
    return run


def written(run: RunDir, days: float) -> None:
    at = time.time() - days * DAY
    for file in run.path.iterdir():
        os.utime(file, (at, at))


def newest(root: Path) -> RunDir:
    run = made(root, 0xFFFFFF)
    run.plan.write_text(plan_with(Retention()))
    run.point_current()
    return run


def plan_with(rule: Retention) -> str:
    recipe = kit.recipe({**doctor_kit.RECIPE, "retention": rule.model_dump()})
    return kit.plan(recipe).model_dump_json()


def left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "fake").iterdir() if not path.is_symlink())


def test_the_newest_ten_are_kept_and_the_others_go_with_all_that_is_in_them(tmp_path: Path) -> None:
    runs = [made(tmp_path, number) for number in range(13)]
    runs[12].point_current()
    size = sum(file.stat().st_size for file in runs[0].path.rglob("*") if file.is_file())
    removed = prune(tmp_path / "fake", Retention())
    assert [run.path for run in removed] == [run.path for run in runs[:3]]
    assert (removed[0].size, removed[0].problem) == (size, None)
    assert left(tmp_path) == [run_id(number) for number in range(3, 13)]
    assert prune(tmp_path / "fake", Retention()) == []


def test_a_run_that_is_too_old_goes_however_few_there_are_but_never_the_current_or_the_newest(tmp_path: Path) -> None:
    made(tmp_path, 1, days=31)
    current = made(tmp_path, 2, days=90)
    made(tmp_path, 3, days=29)
    made(tmp_path, 4, days=60)
    current.point_current()
    prune(tmp_path / "fake", Retention())
    assert left(tmp_path) == [run_id(2), run_id(3), run_id(4)]


def test_a_run_whose_launcher_lives_stays(tmp_path: Path) -> None:
    made(tmp_path, phase="ready", launcher=own_identity(), days=60)
    newest(tmp_path)
    assert prune(tmp_path / "fake", LAST_ONLY) == []


@pytest.mark.process
def test_a_run_with_a_living_process_that_is_in_no_record_stays(tmp_path: Path) -> None:
    run = made(tmp_path, phase="failed")
    newest(tmp_path)
    name = f"{run.run_id}/decode-0".encode()
    with subprocess.Popen(["sleep", "1000"], env={MARKER: name.decode()}, start_new_session=True) as member:
        try:
            while name not in procfs.environment_values(MARKER).values():  # in the middle of its exec it shows none
                pass
            assert prune(tmp_path / "fake", LAST_ONLY) == []
        finally:
            member.kill()
    assert [run.path for run in prune(tmp_path / "fake", LAST_ONLY)] == [run.path]


def test_a_run_of_unknown_state_stays_until_it_was_not_heard_for_a_day(tmp_path: Path) -> None:
    nodes = {"n": NodeState(agent=GONE, guard=GONE, hostname="another")}
    lost = made(tmp_path, 1, phase="ready", host="another", nodes=nodes)
    unstarted = RunDir.create(tmp_path, "fake", run_id(2))
    unstarted.plan.write_text("{}")
    of_another_version = made(tmp_path, 3)
    of_another_version.state.write_text('{"new": 1}')
    newest(tmp_path)
    assert prune(tmp_path / "fake", LAST_ONLY) == []
    for run in (lost, unstarted, of_another_version):
        written(run, days=1.1)
    assert len(prune(tmp_path / "fake", LAST_ONLY)) == 3


def test_failed_looks_push_out_no_run(tmp_path: Path) -> None:
    run = made(tmp_path, 1)
    looks = [RunDir.create(tmp_path, "fake", run_id(number)) for number in (2, 3)]
    for look in looks:
        look.failure.write_text("a node did not answer")
    assert [removed.path for removed in prune(tmp_path / "fake", LAST_ONLY)] == [look.path for look in looks]
    assert run.path.exists()


def test_a_rule_that_cannot_be_read_removes_no_run_and_says_so(tmp_path: Path) -> None:
    for number in range(12):
        made(tmp_path, number, days=31)
    plan = newest(tmp_path).plan
    plan.write_text(plan_with(Retention(runs=0, days=0)))
    assert prune_all(tmp_path) == []
    plan.unlink()
    look = RunDir.create(tmp_path, "fake", f"preflight-{run_id(1)}")
    look.failure.write_text("a node did not answer")
    [gone, stays] = prune_all(tmp_path)
    assert (gone.path, gone.problem) == (look.path, None)
    assert stays.path == tmp_path / "fake"
    assert str(tmp_path / "fake" / "current") in str(stays.problem)
    assert "`pdserve up`" in str(stays.problem)
    assert len(left(tmp_path)) == 13


def test_the_next_look_removes_failed_looks_and_no_folder_of_a_user(tmp_path: Path) -> None:
    look = RunDir.create(tmp_path, "fake", f"preflight-{run_id(1)}")
    writable = RunDir.create(tmp_path, "fake", run_id(2))
    writable.path.chmod(0o777)
    notes = RunDir(tmp_path / "fake" / "my-incident-notes")
    notes.path.mkdir()
    for folder in (look, writable, notes):
        folder.failure.write_text("it failed")
    discard_earlier(tmp_path / "fake")
    assert left(tmp_path) == sorted([writable.path.name, notes.path.name])


def test_no_link_is_followed(tmp_path: Path) -> None:
    home, precious = tmp_path / "home", tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    run = made(home)
    (run.path / "link").symlink_to(precious)
    (home / "fake" / run_id(1)).symlink_to(precious)
    (home / "linked").symlink_to(tmp_path / "elsewhere")
    other = RunDir.create(tmp_path, "elsewhere", run_id(1))
    other.failure.touch()
    RunDir.create(tmp_path, "elsewhere", run_id(2))
    newest(home)
    assert [run.path for run in prune_all(home)] == []
    assert [run.path for run in prune(home / "fake", LAST_ONLY)] == [run.path]
    assert prune(home / "linked", LAST_ONLY) == []
    assert (precious / "file").exists()
    assert (home / "fake" / run_id(1)).is_symlink()
    assert other.path.exists()


def test_what_has_not_the_name_of_a_run_stays(tmp_path: Path) -> None:
    newest(tmp_path)
    for name in ("notes", "run-1", f"{run_id(1)}.bak", ".removed-mine"):
        (tmp_path / "fake" / name).mkdir(mode=0o700)
    assert prune(tmp_path / "fake", LAST_ONLY) == []
    assert len(left(tmp_path)) == 5


@as_root
@each_row("inside", [False, True])
def test_nothing_of_another_user_is_removed(tmp_path: Path, inside: bool) -> None:
    run = made(tmp_path)
    newest(tmp_path)
    file = run.logs / "decode-0@n.log" if inside else run.path
    os.chown(file, STRANGER, STRANGER)
    removed = prune(tmp_path / "fake", LAST_ONLY)
    assert file.exists()
    assert [run.problem for run in removed] == ([f"{file} belongs to uid {STRANGER}"] if inside else [])


def test_a_removal_that_was_interrupted_is_ended_by_the_next(tmp_path: Path) -> None:
    run = made(tmp_path)
    newest(tmp_path)
    run.path.rename(run.path.with_name(f".removed-{run.run_id}"))
    assert len(prune(tmp_path / "fake", LAST_ONLY)) == 1
    assert left(tmp_path) == [run_id(0xFFFFFF)]


@pytest.mark.process
def test_list_prune_reports_what_is_removed_with_its_size_and_dry_run_leaves_it(pdserve_home: Path) -> None:
    run = made(pdserve_home, days=31)
    newest(pdserve_home)
    assert pdserve("list", "--dry-run")[0] == 2
    code, output = pdserve("list", "--prune", "--dry-run")
    assert (code, output.splitlines()) == (0, [f"would remove {run.path} 0.0 MiB", "1 old run(s), 0.0 MiB"])
    assert run.path.exists()
    code, output = pdserve("list", "--prune", "--json")
    [row] = json.loads(output)
    assert (code, row["run"], row["removed"], row["bytes"] > 1000) == (0, str(run.path), True, True)
    assert not run.path.exists()
    assert pdserve("list", "--prune") == (0, "no old runs")


@pytest.mark.process
def test_up_removes_those_of_its_own_deployment_by_its_recipe(
    tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, last = made(pdserve_home, 1), made(pdserve_home, 2)
    last.point_current()
    other = RunDir.create(pdserve_home, "other", run_id(1))
    other.failure.touch()
    RunDir.create(pdserve_home, "other", run_id(2))
    strike(tmp_path / "site", at_a_call("up", ("pdserve/operations/launcher_process.py", "run_here")), monkeypatch)
    assert pdserve("up", recipe(tmp_path, retention__runs=1))[0] == 130
    assert (old.path.exists(), last.path.exists(), other.path.exists()) == (False, True, True)
