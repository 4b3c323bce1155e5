"""Prompts and the bytes of HTTP requests, the same for every system."""

from __future__ import annotations

import json
import random

API_KEY = "sk-bench-0123456789abcdef"
MODEL = "bench"
PAIRS = 2
"""Prefill workers, and as many decode workers: a policy with a single candidate would cost nothing."""
STAMP = b"@"
STAMP_DIGITS = 19
"""A relayed token is `@` and this many digits: CLOCK_MONOTONIC in ns when the mock wrote it."""

WORDS = ("the", "of", "prefill", "decode", "cache", "block", "token", "request", "worker", "lease", "batch", "step")
VARIANTS = {"small": 64, "large": 8}


def text(size: int, seed: int) -> str:
    """Words in lines of about 80 characters with an occasional quote: JSON has to escape it, as it has to for code."""
    chance = random.Random(seed)  # noqa: S311
    parts: list[str] = []
    length = column = 0
    while length < size:
        word = chance.choice(WORDS)
        if chance.random() < 0.02:
            word = f'"{word}"'
        column += len(word) + 1
        end = "\n" if column > 80 else " "
        column = 0 if column > 80 else column
        parts.append(word + end)
        length += len(word) + 1
    return "".join(parts)[:size]


def chat(size: int, seed: int, *, stream: bool) -> bytes:
    """A chat request whose user message has `size` characters."""
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text(size, seed)}],
        "max_tokens": 64,
        "temperature": 0.7,
        "user": f"user-{seed}",
        "stream": stream,
    }
    return json.dumps(body).encode()


def post(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {API_KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()


def chats(size: int, *, stream: bool) -> list[bytes]:
    """Requests with different prompts, to be sent in turn: a policy that looks at prompts finds some to look at."""
    variants = VARIANTS["small" if size < 50_000 else "large"]
    return [post("/v1/chat/completions", chat(size, seed, stream=stream)) for seed in range(variants)]
