"""The tiny model: the same bytes every time, written whole, and sensitive to its context."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "tiny_model.py"
WEIGHTS = "dfd5fc6360bed37b84d6e840a9446f78f1f137db2814da88bc4beb4fd7212437"
pytestmark = pytest.mark.real


def make(folder: Path) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, check=True)
    return done.stdout


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make(folder)
    return folder


def test_a_damaged_one_is_written_again_with_the_same_bytes_and_a_complete_one_is_left_alone(model: Path) -> None:
    whole = digests(model)
    assert whole["model.safetensors"] == WEIGHTS
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert make(model).startswith("wrote")
    assert digests(model) == whole
    assert [path.name for path in model.parent.iterdir()] == ["tiny"], "nothing is left beside it"
    before = {path: path.stat().st_mtime_ns for path in [model, *model.iterdir()]}
    assert make(model) == ""
    assert {path: path.stat().st_mtime_ns for path in [model, *model.iterdir()]} == before


def test_one_changed_character_far_back_changes_the_answer(model: Path) -> None:
    code = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
answers = []
for prompt in ("the quick brown fox " * 20, "the quick brown fix " + "the quick brown fox " * 19):
    ids = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    answers.append(tokenizer.decode(answer[0][ids.input_ids.shape[1]:]))
print(json.dumps([ids.input_ids.shape[1], *answers]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    tokens, first, other = json.loads(done.stdout)
    assert tokens == 400
    assert first != other
    assert first.isascii()
    assert len(set(first)) > 5
