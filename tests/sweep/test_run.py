"""`pdserve sweep` over fake engines: a start for each recipe, faults are INVALID, it goes on where it was cut."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
import yaml

from pdserve.bench.aiperf_environment import interpreter, place
from pdserve.operations.current_run import find_running
from pdserve.report.rows import read_report
from pdserve.run import history
from pdserve.run.directory import find
from pdserve.sweep.record import PointRecord, SweepFolder, records_in
from tests.launch.deployment import REPOSITORY, Command, Deployment, assert_nothing_left, pdserve, recipe, up
from tests.strikes import at_a_call, strike

pytestmark = pytest.mark.process

CLIENT_JUST_STARTED = ("pdserve/bench/sampling.py", "proxy_pids")
LOOP_CLOSES = ("asyncio/base_events.py", "close")
WORK = {"input_tokens": 300, "output_tokens": 2, "repeats": 1, "warmup": 0}


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What stands for the engines' interpreter: it runs the fake client, which waits more than it computes, so that it
    is not saturated on a busy machine."""
    monkeypatch.setenv("FAKE_TOKEN_SECONDS", "0.4")
    program = tmp_path / "python-fake"
    client = REPOSITORY / "tests/fakes/bench_client.py"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(client)])} "$@"\n')
    program.chmod(0o755)
    return str(program)


def sweep_file(folder: Path, **changes: object) -> Path:
    """Over a recipe without LMCache, whose fakes start fast."""
    base = recipe(
        folder,
        lmcache=None,
        prefill__connector={"kind": "mooncake", "protocol": "tcp"},
        engine__cache_reset_endpoint=True,  # or each point would be a start
    )
    document = {
        "schema": 1,
        "name": "s",
        "recipe": base.name,
        "workload": [WORK],
        "concurrency": [1, 2],
        "requests": 4,
        **changes,
    }
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def clients_of(python: str) -> list[str]:
    """Command lines of the fake client that run."""
    lines = [path.read_bytes().replace(b"\0", b" ").decode() for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if str(Path(python).parent) in line and "bench_client.py" in line]


def records(home: Path) -> list[PointRecord]:
    folder = SweepFolder.of(home, "fake", "s").path
    return sorted(records_in(folder).values(), key=lambda record: (record.settings, record.load.concurrency or 0))


def _by_load(home: Path) -> list[tuple[Path, PointRecord]]:
    every = records_in(SweepFolder.of(home, "fake", "s").path)
    return sorted(every.items(), key=lambda pair: pair[1].load.concurrency or 0)


def starts(home: Path) -> int:
    return len(list(SweepFolder.of(home, "fake", "s").starts.iterdir()))


def test_each_recipe_is_started_once(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path, cross={"proxy.drain_seconds": [1, 2]})
    code, output = pdserve("sweep", "--dry-run", file)
    assert code == 0, output
    assert "to run: 4 points on 2 starts" in output
    assert not (pdserve_home / "fake").exists(), "nothing has run"
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 0, output
    assert [(each.settings, each.load.concurrency, each.status) for each in records(pdserve_home)] == [
        ((("proxy.drain_seconds", "1"),), 1, "VALID"),
        ((("proxy.drain_seconds", "1"),), 2, "VALID"),
        ((("proxy.drain_seconds", "2"),), 1, "VALID"),
        ((("proxy.drain_seconds", "2"),), 2, "VALID"),
    ]
    assert starts(pdserve_home) == 2
    assert find_running(pdserve_home, "fake") is None
    assert_nothing_left(Deployment(None, pdserve_home))
    folder = SweepFolder.of(pdserve_home, "fake", "s")
    for path, record in records_in(folder.path).items():
        result = json.loads((path / str(record.result) / "result.json").read_text())
        assert "drain_seconds: " + record.settings[0][1] in result["provenance"]["recipe"]
        assert (path / str(record.result) / result["measurements"][0]["raw"]).exists()
        kept = folder.starts / str(record.run_id)
        assert list((kept / "logs").glob("prefill-0*"))
        assert (kept / "versions.json").exists()
    code, output = pdserve("sweep", "--dry-run", file)
    assert "to run: 0 points" in output


@pytest.mark.full
def test_other_code_or_no_result_is_measured_once_more(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path)
    assert pdserve("sweep", "--python", python, file)[0] == 0
    before = records(pdserve_home)
    old, lost = (path / str(each.result) / "result.json" for path, each in _by_load(pdserve_home))
    document = json.loads(old.read_text())
    document["provenance"]["versions"]["pdserve (client)"] = "0.0.1 (old)"
    old.write_text(json.dumps(document))
    lost.unlink()
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 0, output
    assert "measured again: point 1: measured with pdserve 0.0.1 (old), here is " in output
    assert "measured again: point 2: its result is gone or cannot be read" in output
    assert "2 of 2 points are VALID" in output
    after = records(pdserve_home)
    assert not {each.result for each in before} & {each.result for each in after}
    assert starts(pdserve_home) == 2
    assert "to run: 0 points" in pdserve("sweep", "--dry-run", file)[1]


def test_a_failed_start_is_invalid_and_the_next_run(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path, cross={"engine.command": [["/nowhere/vllm"], None]}, concurrency=[1])
    command = yaml.safe_load((tmp_path / "fake.yaml").read_text())["engine"]["command"]
    text = yaml.safe_load(file.read_text())
    text["cross"]["engine.command"][1] = command
    file.write_text(yaml.safe_dump(text))
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 12, output
    assert sorted(each.status for each in records(pdserve_home)) == ["INVALID", "VALID"]
    (wrong,) = [each for each in records(pdserve_home) if each.status == "INVALID"]
    assert wrong.reasons[0].check == "start"
    assert "/nowhere/vllm" in wrong.reasons[0].text
    assert "error: " in output
    assert "1 of 2 points are INVALID" in output
    assert find_running(pdserve_home, "fake") is None


@pytest.mark.full
def test_a_history_has_its_death(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CLIENT", "hang")
    command = Command("sweep", "--python", python, "--limit", "5", sweep_file(tmp_path, concurrency=[1]))
    command.expect("serving fake")
    decode = find(pdserve_home, "fake").read_state().processes["decode-0"].id
    assert decode is not None
    os.kill(decode.pid, signal.SIGKILL)
    assert command.finish() == 12, command.output
    (record,) = records(pdserve_home)
    folder = SweepFolder.of(pdserve_home, "fake", "s")
    events, _ = history.read(folder.events(str(record.run_id)), 0)
    assert "decode-0" in [event["name"] for event in events if event["event"] == "died"]
    assert events[-1]["event"] == "down", "it is kept to the end"
    (drawn,) = read_report([folder.path]).timelines
    assert any(text.startswith("decode-0 died") for _, text in drawn.incidents)
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.full
def test_a_start_that_failed_names_its_run(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    base = sweep_file(tmp_path, concurrency=[1])
    recipe_file = tmp_path / "fake.yaml"
    document = yaml.safe_load(recipe_file.read_text())
    document["engine"]["command"] = [sys.executable, "-c", "raise SystemExit(7)"]
    recipe_file.write_text(yaml.safe_dump(document))
    code, output = pdserve("sweep", "--python", python, base)
    assert code == 12, output
    (record,) = records(pdserve_home)
    assert record.reasons[0].check == "start"
    assert record.run_id is not None
    events, _ = history.read(SweepFolder.of(pdserve_home, "fake", "s").events(record.run_id), 0)
    assert "died" in {event["event"] for event in events}


@pytest.mark.full
def test_an_invalid_one_is_over(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sweep_file(tmp_path, concurrency=[1])
    monkeypatch.setenv("FAKE_CLIENT", "die")
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 12, output
    monkeypatch.delenv("FAKE_CLIENT")
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 12, "it is over, and still INVALID: " + output
    code, output = pdserve("sweep", "--retry", "--python", python, file)
    assert code == 0, output


def test_a_killed_one_goes_on(tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sweep_file(tmp_path)
    command = Command("sweep", "--python", python, file)
    command.expect("concurrency 1: VALID")
    (first,) = records(pdserve_home)
    command.popen.send_signal(signal.SIGKILL)
    command.finish()
    assert find_running(pdserve_home, "fake") is not None, "its launcher is a process of its own"
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 0, output
    assert "left by this sweep" in output
    done, second = records(pdserve_home)
    assert done == first, "what is whole is not measured again"
    assert second.status == "VALID"
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.full
def test_ctrl_c_stops_it(tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CLIENT", "hang")
    command = Command("sweep", "--python", python, sweep_file(tmp_path))
    command.expect("serving fake")
    command.interrupt()
    assert command.finish() == 130, command.output
    assert not records(pdserve_home)
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.full
def test_a_late_ctrl_c_stops_it(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(tmp_path / "site", at_a_call("sweep", ("pdserve/operations/down.py", "down")), monkeypatch)
    code, output = pdserve("sweep", "--python", python, sweep_file(tmp_path))
    assert code == 130, output
    assert len(records(pdserve_home)) == 2, "all was measured"
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.parametrize(
    ("signum", "late"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, True)],
    ids=["client just started, INT", "client just started, TERM", "loop just closed, HUP"],
)
@pytest.mark.full
def test_a_stop_while_a_point_is_measured_ends_its_client_and_the_deployment(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, late: bool
) -> None:
    """Also in the moments in which no event loop hears it."""
    places = [CLIENT_JUST_STARTED, LOOP_CLOSES] if late else [CLIENT_JUST_STARTED]
    strike(tmp_path / "site", at_a_call("sweep", *places, signum=signum, late=late), monkeypatch)
    if not late:
        monkeypatch.setenv("FAKE_CLIENT", "hang")
    code, output = pdserve("sweep", "--python", python, sweep_file(tmp_path))
    assert code == 130, output
    assert not records(pdserve_home)
    assert_nothing_left(Deployment(None, pdserve_home))
    assert not clients_of(python)


def test_a_deployment_that_is_not_the_sweeps_own_is_left_alone(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path)
    with up(tmp_path / "fake.yaml", pdserve_home) as deployment:
        deployment.command.expect("serving fake")
        code, output = pdserve("sweep", "--python", python, file)
        assert code == 8
        assert "pdserve down fake" in output
        assert deployment.state().phase == "ready"


def test_a_combination_that_is_no_recipe_is_refused_before_anything_runs(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("sweep", sweep_file(tmp_path, cross={"prefill.instances": [1, "two"]}))
    assert code == 2
    assert "sweep.yaml:" in output
    assert "prefill.instances=two" in output
    assert not (pdserve_home / "fake").exists()


def test_a_trace_without_its_client(tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, output = pdserve("sweep", sweep_file(tmp_path, workload=[{"trace": "agentic-tiny"}], requests=None))
    assert code == 3
    assert "pdserve bench --setup" in output
    assert not (pdserve_home / "fake").exists()


@pytest.mark.full
def test_a_trace_is_a_workload(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_TOKEN_SECONDS", "0.02")
    folder = place(os.environ)
    interpreter(folder).parent.mkdir(parents=True)
    client = REPOSITORY / "tests/fakes/aiperf_client.py"
    interpreter(folder).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(client)])} "$@"\n')
    interpreter(folder).chmod(0o755)
    (folder / "complete").touch()
    trace = {"trace": "agentic-tiny", "sessions": 2, "repeats": 1, "warmup": 0}
    file = sweep_file(tmp_path, workload=[trace, WORK | {"client": "aiperf"}], concurrency=[2])
    code, output = pdserve("sweep", file)
    assert code == 0, output
    assert sorted((each.workload.title, each.load.requests) for each in records(pdserve_home)) == [
        ("300 in, 2 out", 4),
        ("trace agentic-tiny, 2 sessions", 10),
    ]
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.full
def test_one_that_had_come_up_is_tried_once_more(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    """Here each point has a start of its own, and the second start fails."""
    file = sweep_file(tmp_path, concurrency=[1, 2, 3])
    recipe_file = tmp_path / "fake.yaml"
    document = yaml.safe_load(recipe_file.read_text())
    document["engine"].pop("cache_reset_endpoint")
    engine = tmp_path / "engine"
    runs = f"$(ls -d {pdserve_home}/fake/2*/ | wc -l)"
    engine.write_text(f'#!/bin/sh\n[ "{runs}" = 2 ] && exit 7\nexec {shlex.join(document["engine"]["command"])} "$@"\n')
    engine.chmod(0o755)
    document["engine"]["command"] = [str(engine)]
    recipe_file.write_text(yaml.safe_dump(document))
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 12, output
    first, second, third = records(pdserve_home)
    assert [each.status for each in (first, second, third)] == ["VALID", "INVALID", "VALID"]
    assert [reason.check for reason in second.reasons] == ["start"]
    assert len({first.run_id, second.run_id, third.run_id}) == 3
    assert_nothing_left(Deployment(None, pdserve_home))
