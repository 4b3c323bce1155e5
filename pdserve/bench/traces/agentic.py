"""The trace `agentic-tiny`: what coding agents send, small enough for a context of 4096 tokens of a tiny model. Pure.

AIPerf's own generator (`synthesize agentic-code`) begins each session with layers of 32,000 tokens: with a limit of
4,000 every session has a single turn, and nothing is left of what such a trace is for. This one has the same shape: a
system prompt that all sessions share, a task, and turns that each add a tool call and its result. It is text, the same
in every run: with a tokenizer that reads bytes, a character is a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

NAME = "agentic-tiny"
SESSIONS, TURNS = 8, 5
_ANSWER = 32
_SEED = 20_261
_SYSTEM, _TASK, _RESULT = 640, (120, 260), (240, 480)
"""Characters: of all, and from to of each."""
_VERBS = "read write find move check build start list merge parse store load"
_NOUNS = "file cache block route token queue worker prompt layer table index socket buffer record limit"
_ENDS = "in the test of the proxy|before the first request|after a restart|with a cold cache|in the second stage"


def text() -> str:
    """Its lines: requests as an OpenAI log has them, the turns of a session one after the other."""
    return "".join(f"{json.dumps(row)}\n" for row in _rows(Random(_SEED)))  # noqa: S311  (no secret)


def _rows(numbers: Random) -> Iterator[dict[str, Any]]:
    system = f"You are an agent that works on a program. {_words(numbers, _SYSTEM)}"
    for session in range(SESSIONS):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": _some(numbers, _TASK)}]
        for turn in range(TURNS):
            if turn:
                messages += [
                    {"role": "assistant", "content": f"run: {_pick(numbers, _VERBS)} {_pick(numbers, _NOUNS)}.py"},
                    {"role": "user", "content": f"result {session}.{turn}: {_some(numbers, _RESULT)}"},
                ]
            yield {"session_id": f"agent-{session}", "output_length": _ANSWER, "messages": list(messages)}


def _some(numbers: Random, size: tuple[int, int]) -> str:
    return _words(numbers, size[0] + int(numbers.random() * (size[1] - size[0])))


def _words(numbers: Random, characters: int) -> str:
    written = ""
    while len(written) < characters:
        end = _ENDS.split("|")[int(numbers.random() * 5)]
        written += f"{_pick(numbers, _VERBS)} the {_pick(numbers, _NOUNS)} {int(numbers.random() * 1000)} {end}. "
    return written[:characters]


def _pick(numbers: Random, words: str) -> str:
    """`random()` gives the same numbers in every version of Python; `choice` does not promise that."""
    some = words.split()
    return some[int(numbers.random() * len(some))]
