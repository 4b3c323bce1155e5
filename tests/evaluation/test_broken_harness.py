"""A harness that cannot be started, results that are torn, a disk that takes nothing: errors with a fix."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from pdserve.errors import NotProvenError, PreflightError, StateError
from pdserve.evaluation import EvalSettings, EvalVerdict, evaluate
from pdserve.run.directory import RunDir
from pdserve.run.state import DeploymentState
from tests.bench.evidence import plan

pytestmark = pytest.mark.process
RESULTS = '{"results": {"t": {"acc,none": 1.0}}, "n-samples": {"t": {"effective": 4}}, "higher_is_better": {}}'


def program(folder: Path, first_line: str, text: str = "") -> Path:
    file = folder / "lm_eval"
    file.write_text(f"#!{first_line}\n{text}")
    file.chmod(0o755)
    return file


def writes(folder: Path, results: str) -> Path:
    """A harness that leaves these results and ends well."""
    text = (
        "import json, pathlib, sys\n"
        "out = pathlib.Path(json.loads(pathlib.Path(sys.argv[3]).read_text())['output_path'])\n"
        f"(out / 'results_1.json').write_text({results!r})\n"
    )
    return program(folder, sys.executable, text)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(keys))
    directory = RunDir(tmp_path / "run")
    directory.path.mkdir()
    directory.save_key("key")
    return directory


def evaluated(run: RunDir, harness: Path) -> EvalVerdict:
    state = DeploymentState.model_construct(run_id="r", token="t")
    settings = EvalSettings(task="t", threshold=0.5)
    return asyncio.run(
        evaluate(run, state, plan(), settings, harness=str(harness), environ={}, on_repeat=lambda score: None)
    )


def test_whole_results_are_a_score(tmp_path: Path, run: RunDir) -> None:
    assert evaluated(run, writes(tmp_path, RESULTS)).scores == (1.0,)


def test_a_harness_whose_python_is_gone_cannot_be_started(tmp_path: Path, run: RunDir) -> None:
    harness = program(tmp_path, str(tmp_path / "gone" / "python"))
    with pytest.raises(PreflightError, match="the harness cannot be started: No such file") as raised:
        evaluated(run, harness)
    assert raised.value.where == str(harness)
    assert "first line" in str(raised.value.cause)


@pytest.mark.parametrize("text", [RESULTS[:20], ""], ids=["half", "nothing"])
def test_results_that_are_torn_are_no_score(tmp_path: Path, run: RunDir, text: str) -> None:
    with pytest.raises(NotProvenError, match="results cannot be read") as raised:
        evaluated(run, writes(tmp_path, text))
    assert str(raised.value.where).endswith("results_1.json")


def test_a_run_directory_that_takes_nothing(tmp_path: Path, run: RunDir) -> None:
    (run.path / "evals").write_text("in the place of the folder")
    with pytest.raises(StateError, match="cannot be written"):
        evaluated(run, writes(tmp_path, RESULTS))
