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


def prefix_hit(trace: RequestTrace, *, answers: bool = False) -> float:
    """0 to 1, of the tokens of all prompts together. `answers`: where a cache has the KV of answers too, as that of
    decode, or of an engine that does both."""
    seen: set[int] = set()
    asked = hits = 0.0
    for prompt, answer in _requests(trace.sessions):
        chain = 0
        for key, tokens in prompt:
            chain = hash((chain, key))
            asked += tokens
            hits += tokens if chain in seen else 0.0
            seen.add(chain)
        if answers:
            seen.add(hash((chain, answer[0])))
    return hits / asked if asked else 0.0


def asked_input(trace: RequestTrace) -> int | None:
    """Tokens of all prompts together, as a client sends them; None: the trace does not have lengths."""
    if any(turn.input_tokens is None for session in trace.sessions for turn in session.turns):
        return None
    return round(sum(tokens for prompt, _ in _requests(trace.sessions) for _, tokens in prompt))


def _requests(sessions: Sequence[Session]) -> list[tuple[list[Piece], Piece]]:
    """The prompt and the answer of each, in order. A fork begins with the prompt and the answer of its parent."""
    after: dict[tuple[str, int], list[Piece]] = {}
    requests: list[tuple[list[Piece], Piece]] = []
    for session in sessions:
        history = list(after.get(session.parent, [])) if session.parent is not None else []
        for index, turn in enumerate(session.turns):
            prompt = list(turn.pieces) if turn.whole else [*history, *turn.pieces]
            answer: Piece = (("answer", session.id, index), float(turn.output_tokens))
            requests.append((prompt, answer))
            history = [*prompt, answer]
            after[session.id, index] = history
    return requests
