"""The prefix hit that a trace has in theory. Pure.

Every prompt is a chain of pieces. A piece is a hit when an earlier prompt began with the same chain. An answer is new
in the prompt that holds it first: with prefill and decode apart, prefill has computed prompts only.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.traces.trace import Piece, RequestTrace, Session, TraceFacts


def facts(trace: RequestTrace) -> TraceFacts:
    """What the result has of it."""
    return TraceFacts(
        name=trace.name,
        digest=trace.digest,
        format=trace.format,
        sessions=len(trace.sessions),
        requests=trace.requests,
        block=trace.block,
        prefix_hit=prefix_hit(trace),
        estimated=trace.format != "mooncake" or asked_input(trace) is None,
    )


def prefix_hit(trace: RequestTrace) -> float:
    """0 to 1, of the tokens of all prompts together."""
    seen: set[int] = set()
    asked = hits = 0.0
    for prompt in _prompts(trace.sessions):
        chain = 0
        for key, tokens in prompt:
            chain = hash((chain, key))
            asked += tokens
            hits += tokens if chain in seen else 0.0
            seen.add(chain)
    return hits / asked if asked else 0.0


def asked_input(trace: RequestTrace) -> int | None:
    """Tokens of all prompts together, as a client sends them; None: the trace does not have lengths."""
    if any(turn.input_tokens is None for session in trace.sessions for turn in session.turns):
        return None
    return round(sum(tokens for prompt in _prompts(trace.sessions) for _, tokens in prompt))


def _prompts(sessions: Sequence[Session]) -> list[list[Piece]]:
    """Of all requests, in order. A fork begins with the prompt and the answer of its parent."""
    after: dict[tuple[str, int], list[Piece]] = {}
    prompts = []
    for session in sessions:
        history = list(after.get(session.parent, [])) if session.parent is not None else []
        for index, turn in enumerate(session.turns):
            prompt = list(turn.pieces) if turn.whole else [*history, *turn.pieces]
            prompts.append(prompt)
            history = [*prompt, (("answer", session.id, index), float(turn.output_tokens))]
            after[session.id, index] = history
    return prompts
