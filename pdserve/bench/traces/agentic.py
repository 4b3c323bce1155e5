"""The trace `agentic-tiny`: sessions as coding agents have them, small enough for a context of 4096 tokens.

AIPerf's generator of such sessions made it. It is kept here, so that it is the same everywhere and read without AIPerf:

    aiperf synthesize agentic-code --config agentic-tiny.json --num-sessions 8 --seed 20261

The generator's own sizes are those of large contexts (32,000 tokens before the first turn); agentic-tiny.json has
smaller ones. Every session begins with 640 tokens that all share (tools, system prompt) and 256 of one of two projects.
"""

from __future__ import annotations

from importlib.resources import files

NAME = "agentic-tiny"
SESSIONS, TURNS, SEED = 8, 5, 20_261


def text() -> str:
    """Its lines: requests in Mooncake's format, the turns of a session one after the other."""
    return _read("jsonl")


def configuration() -> str:
    """What AIPerf's generator was given, as JSON."""
    return _read("json")


def _read(kind: str) -> str:
    return files("pdserve.bench.traces").joinpath(f"{NAME}.{kind}").read_text(encoding="utf-8")
