"""Traces: every format that is read, what is refused with its line, and the prefix hit in theory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.workload import (
    AGENTIC,
    RequestTrace,
    asked_input,
    facts,
    prefix_hit,
    read_trace,
)
from pdserve.errors import RecipeError
from tests.bench.kit import AGENTIC_SESSIONS, AGENTIC_TURNS
from tests.tables import each_row

USER, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}


def written(folder: Path, *rows: Any) -> str:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(file)


def read(folder: Path, *rows: Any, **options: Any) -> RequestTrace:
    return read_trace(written(folder, *rows), **({"output_tokens": 128} | options))


def refused(folder: Path, *rows: Any, **options: Any) -> RecipeError:
    with pytest.raises(RecipeError) as error:
        read(folder, *rows, **options)
    return error.value


def test_a_mooncake_trace_has_lengths_and_blocks_and_a_session_for_each_line(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 9, "input_length": 600, "output_length": 6, "hash_ids": [1, 3]},
    )
    assert (trace.format, trace.block, trace.requests, len(trace.sessions)) == ("mooncake", 512, 2, 2)
    assert asked_input(trace) == 1600
    assert prefix_hit(trace) == pytest.approx(512 / 1600)
    assert "timestamp" not in trace.sessions[0].rows[0], "a load says when requests are sent"


def test_the_size_of_a_block_is_the_one_that_fits_every_line(tmp_path: Path) -> None:
    rows = [{"input_length": 40, "hash_ids": [1, 2, 3]}, {"input_length": 16, "hash_ids": [1]}]
    assert read(tmp_path, *rows).block == 16
    error = refused(tmp_path, *rows, {"input_length": 100, "hash_ids": [1]})
    assert str(error.where).endswith(":1"), "blocks of 512 do not fit the first line"
    assert "--trace-block" in str(error.todo)
    error = refused(tmp_path, *rows, block=8)
    assert "blocks of 8 tokens" in str(error.cause)
    assert read(tmp_path, {"input_length": 40}).block is None


def test_turns_of_a_mooncake_session_add_to_each_other_and_to_the_answers(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        {"session_id": "a", "input_length": 100, "output_length": 10},
        {"session_id": "b", "input_length": 7, "output_length": 1},
        {"session_id": "a", "input_length": 30, "output_length": 10, "delay": 5},
    )
    assert [session.id for session in trace.sessions] == ["a", "b"]
    assert asked_input(trace) == 100 + (100 + 10 + 30) + 7
    assert prefix_hit(trace) == pytest.approx(100 / 247), "an answer is new in the prompt that holds it first"
    assert prefix_hit(trace, answers=True) == pytest.approx(110 / 247), "decode has it, or an engine that does both"
    assert trace.asked_output() == {("a", 0): 10, ("a", 1): 10, ("b", 0): 1}


def test_a_log_of_requests_keeps_messages_tools_and_counted_lengths(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    trace = read(
        tmp_path,
        {"messages": [USER], "max_tokens": 9},
        {"body": {"messages": [USER], "tools": tools, "max_completion_tokens": 8}},
        {"request": {"messages": [USER], "max_tokens": 9}, "response": {"usage": {"completion_tokens": 3}}},
        {"session_id": "s", "messages": [USER, ANSWER, USER], "output_length": 2},
    )
    assert trace.format == "messages"
    assert [session.turns[0].output_tokens for session in trace.sessions] == [9, 8, 3, 2]
    assert trace.sessions[1].rows[0]["tools"] == tools
    assert trace.sessions[3].rows[0]["messages"] == [USER, ANSWER, USER]


def test_a_log_of_whole_conversations_is_a_request_for_each_answer_in_it(tmp_path: Path) -> None:
    (session,) = read(tmp_path, {"messages": [USER, ANSWER, USER, ANSWER]}).sessions
    assert [len(row["messages"]) for row in session.rows] == [1, 3]
    error = refused(tmp_path, {"messages": [ANSWER]})
    assert "no line asks for an answer" in str(error.cause)


@each_row("row, cause", [
    ("{", "Expecting property name"), ("[1]", "it is a list, not an object"),
    ({"prompt": "x"}, "its keys (prompt) are of no format"),
    ({"input_length": 0}, "input_length: Input should be greater than 0"),
    ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
])  # fmt: skip
def test_a_bad_line_is_refused_with_its_place_and_the_reason(tmp_path: Path, row: Any, cause: str) -> None:
    error = refused(tmp_path, row)
    assert cause in str(error.cause)
    assert str(error.where).endswith("trace.jsonl:1")
    assert "docs/guides/bench.md" in str(error.todo)


def test_files_that_are_empty_or_not_there_are_refused(tmp_path: Path) -> None:
    assert "empty" in refused(tmp_path, "", " ").what
    with pytest.raises(RecipeError, match="cannot be read"):
        read_trace(str(tmp_path / "nowhere"), output_tokens=1)


def test_the_agentic_trace_is_the_same_everywhere() -> None:
    trace = read_trace(AGENTIC, output_tokens=1)
    about = facts(trace)
    assert about.digest == "e7ddf7dc3dbf58510efc0864690dbb195aa940802146ce3f880b5e21f275774e"
    assert (about.sessions, about.requests) == (AGENTIC_SESSIONS, AGENTIC_SESSIONS * AGENTIC_TURNS)
    assert about.prefix_hit == pytest.approx(0.811, abs=0.001)
    assert not about.estimated
