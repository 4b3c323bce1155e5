"""The sweep file is read as strictly as a recipe: file, line, and a line that works when it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.sweep.file import load_sweep
from tests.tables import each_row

HEAD = "schema: 1\nname: load\nrecipe: r.yaml\nworkload:\n  - {input_tokens: 8, output_tokens: 4}\n"
TRACED = "schema: 1\nname: load\nrecipe: r.yaml\nworkload:\n  - {trace: agentic-tiny}\n"
LOADS = "concurrency: [1, 4]\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(text)
    return file


def test_a_sweep_names_its_recipe_beside_itself_and_the_line_of_each_key(tmp_path: Path) -> None:
    loaded = load_sweep(written(tmp_path, HEAD + LOADS + "cross:\n  lmcache.l1_size_gb: [1, 2]\n"))
    assert loaded.recipe == tmp_path / "r.yaml"
    assert loaded.sweep.concurrency == [1, 4]
    assert loaded.sweep.workload[0].repeats == 3
    assert loaded.locate_key("lmcache.l1_size_gb") == f"{tmp_path / 'sweep.yaml'}:8"


@each_row("text, line, what", [
    (HEAD, "", "write for example `concurrency: [1, 4, 8]`"),
    (HEAD + "concurency: [1]\n", ":6", "did you mean concurrency"),
    (HEAD + "concurrency: [1, 4, 4]\n", ":6", "4 is there twice"),
    (HEAD + "concurrency: [1, 8]\nrequests: 7\n", ":7", "7 requests are never 8 at a time"),
    (HEAD + LOADS + "cross:\n  prefill.instances: 2\n", ":8", "list"),
    (HEAD + LOADS + "cross:\n  name: [a, b]\n", ":8", "name cannot be swept"),
    (HEAD + LOADS + "zip:\n  a.b: [1, 2]\n  a.c: [1]\n", ":7", "a.b has 2, a.c has 1"),
    (HEAD + LOADS + "zip:\n  a.b: [1]\ncross:\n  a: [{b: 1}]\n", ":10", "set the same part of the recipe"),
    (HEAD.replace("output_tokens", "output_token") + LOADS, ":5", "output_tokens"),
    ("schema: 1\nname: x\nmodel: {id: a}\n", ":3", "this is a recipe, not a sweep file"),
    (HEAD + LOADS + "cross: {a: [1}\n", ":7", "sweep.yaml"),
    (HEAD + LOADS + "grace_seconds: 5\n", ":7", "the time after `seconds`"),
    (HEAD.replace("output", "client: vllm, output") + LOADS + "seconds: 5\n", ":5", "cannot end after `seconds`"),
    (TRACED.replace("}", ", input_tokens: 8}") + LOADS, ":5", "a trace has its own prompts"),
    (TRACED.replace("}", ", client: vllm}") + LOADS, ":5", "replays no trace"),
    (TRACED.replace("}", ", sessions: 3}") + LOADS, ":5", "3 sessions, which are never 4 at a time"),
])  # fmt: skip
def test_what_is_wrong_has_its_line_and_a_fix(tmp_path: Path, text: str, line: str, what: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(RecipeError) as raised:
        load_sweep(file)
    message = raised.value.render()
    assert what in message
    assert f"{file}{line}" in message


def test_a_trace_is_beside_the_sweep_file(tmp_path: Path) -> None:
    """The same sweep measures the same requests from wherever it is started."""
    file = written(tmp_path, TRACED.replace("agentic-tiny", "t.jsonl") + "  - {trace: gone.jsonl}\n" + LOADS)
    with pytest.raises(RecipeError) as raised:
        load_sweep(file)
    message = raised.value.render()
    for line, name in ((5, "t.jsonl"), (6, "gone.jsonl")):
        assert f"{file}:{line}: workload.{line - 5}.trace: {tmp_path / name} does not exist" in message
    assert "agentic-tiny" in message
    (tmp_path / "t.jsonl").write_text('{"input_length": 3}\n' * 5)
    loaded = load_sweep(written(tmp_path, TRACED.replace("agentic-tiny", "t.jsonl") + LOADS))
    trace = loaded.trace_of(loaded.sweep.workload[0])
    assert trace is not None
    assert trace.requests == 5
