"""`pdserve eval` by the real lm-evaluation-harness: a task whose right score is known, through prefill, transfer and
decode. The right answer to each question is that of prefill asked alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.launch.deployment import REPOSITORY, pdserve, read_json
from tests.real.reached import Reached, body

pytestmark = pytest.mark.real

HARNESS = REPOSITORY / ".cache" / "lm-eval"
QUESTIONS, TOKENS = 8, 12
WRONG = 2
"""Of the answers that a second task holds to be right."""


@pytest.fixture(scope="module")
def harness() -> Path:
    """The extra `eval` in an environment of its own, as docs/proofs.md has it: its packages are not the engines'."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["eval"]
    made, wanted = HARNESS / "made", f"{REPOSITORY} {requirements}"
    if not made.exists() or made.read_text() != wanted:
        shutil.rmtree(HARNESS, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(HARNESS)], check=True)
        pip = [str(HARNESS / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, "--no-input", *requirements], check=True)
        made.write_text(wanted)
    return HARNESS / "bin" / "lm_eval"


def task(folder: Path, name: str, questions: list[dict[str, str]]) -> Path:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    document = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": ["<no answer ends so>"], "max_gen_toks": TOKENS, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


async def test_a_task_of_known_score_gets_it_and_each_wrong_answer_counts(
    reached: Reached, harness: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prompts = [f"{number}. " + f"What comes after {number * 7}? " * 30 + "It is" for number in range(QUESTIONS)]
    alone = [await reached.ask(body(prompt, TOKENS, ignore_eos=False), of="prefill-0") for prompt in prompts]
    answers = [answer.raise_for_status().json()["choices"][0]["text"] for answer in alone]
    questions = [{"question": prompt, "answer": text} for prompt, text in zip(prompts, answers, strict=True)]
    right = task(tmp_path, "known", questions)
    others = [question | {"answer": "?" * 40} for question in questions[:WRONG]]
    spoilt = task(tmp_path, "spoilt", [*others, *questions[WRONG:]])

    code, output = pdserve("eval", right, "--threshold", "1", "--harness", harness, "--json")
    assert code == 0, output
    report = read_json(output)
    assert (report["scores"], report["questions"]) == ([1.0], QUESTIONS)
    code, output = pdserve("eval", spoilt, "--threshold", "0.8", "--harness", harness, "--json")
    assert code == 6, output
    report, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))
    assert report["scores"] == [pytest.approx(1 - WRONG / QUESTIONS)]
