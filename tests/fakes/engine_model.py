"""The fake's language model: deterministic text that depends on every token of the prompt, and its caches.

A token is a byte. The "KV" of a prompt is a hash chain over its tokens; each generated token is read off the chain and
extends it. Wrong KV therefore changes the output, and feeding an output back continues it, as with a real model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

EOS = 2
ALPHABET = b"abcdefghijklmnopqrstuvwxyz    .,"


def tokenize(text: str) -> list[int]:
    return list(text.encode())


def detokenize(tokens: Sequence[int]) -> str:
    return bytes(token % 256 for token in tokens if token != EOS).decode(errors="replace")


def render_chat(body: dict[str, Any]) -> str:
    """The chat template: everything that a real template may read changes the prompt."""
    parts = []
    if body.get("tools") and body.get("tool_choice") != "none":
        parts.append(f"<tools>{body['tools']}")
    if body.get("chat_template_kwargs"):
        parts.append(f"<kwargs>{body['chat_template_kwargs']}")
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        parts.append(f"<{message['role']}>{content}")
    return "".join([*parts, "<assistant>"])


def extend(state: bytes, token: int) -> bytes:
    return hashlib.sha256(state + token.to_bytes(8, "little", signed=True)).digest()


def prefill(tokens: Sequence[int]) -> bytes:
    """The KV of a prompt."""
    state = b""
    for token in tokens:
        state = extend(state, token)
    return state


def next_token(state: bytes) -> int:
    return ALPHABET[state[0] % len(ALPHABET)]


def logprob(state: bytes, token: int) -> float:
    """The chosen token is likely, every other one is not, and both depend on the state."""
    likely = -(1 + state[1]) / 256
    return likely if token == next_token(state) else likely - 5.0 - (token % 7)


def prompt_logprobs(tokens: Sequence[int], *, sees_context: bool = True) -> list[dict[str, dict[str, float]] | None]:
    """Of each prompt token and of the likeliest one in its place; the first token has none."""
    entries: list[dict[str, dict[str, float]] | None] = [None]
    state = extend(b"", tokens[0]) if sees_context else b"\0\0"
    for token in tokens[1:]:
        entries.append(
            {str(candidate): {"logprob": logprob(state, candidate)} for candidate in (token, next_token(state))}
        )
        state = extend(state, token) if sees_context else state
    return entries


@dataclass
class PrefixCache:
    """Counts cached tokens in whole blocks, as vLLM does; the last token of a prompt is always computed."""

    block: int
    chains: set[tuple[str, bytes]] = field(default_factory=set)
    queries: int = 0
    hits: int = 0

    def lookup(self, tokens: Sequence[int], salt: str) -> int:
        matched = 0
        for end, state in self.block_states(tokens[:-1]):
            if (salt, state) not in self.chains:
                break
            matched = end
        self.queries += len(tokens)
        self.hits += matched
        return matched

    def store(self, tokens: Sequence[int], salt: str) -> int:
        """Returns how many blocks are new."""
        before = len(self.chains)
        self.chains.update((salt, state) for _, state in self.block_states(tokens))
        return len(self.chains) - before

    def block_states(self, tokens: Sequence[int]) -> list[tuple[int, bytes]]:
        states, state = [], b""
        for position, token in enumerate(tokens, start=1):
            state = extend(state, token)
            if position % self.block == 0:
                states.append((position, state))
        return states
